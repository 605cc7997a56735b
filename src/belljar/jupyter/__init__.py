"""belljar as a Jupyter kernel: sandboxed sessions for notebooks, and an agent's live session for a person.

`application` is the process that a front end starts, `kernel` answers its messages, `sessions` opens the session behind
it, `specs` installs the kernelspec. All but `specs` need ipykernel, which `belljar-mcp[jupyter]` brings.
"""

from importlib.util import find_spec

from belljar.distribution import install_extra
from belljar.errors import EngineError


def require_ipykernel() -> None:
    """Raise EngineError, with a hint, where the optional dependency is missing."""
    if find_spec("ipykernel") is None:
        raise EngineError("ipykernel is not installed beside belljar", hint=f"Install it: {install_extra('jupyter')}")
