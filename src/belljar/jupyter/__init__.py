"""belljar as a Jupyter kernel: sealed sessions for notebooks, and the agent's live session for a person.

`application` is the process a front end starts, `kernel` answers its messages, `sessions` says which session is behind
it, `specs` tells front ends that it exists. All but `specs` need ipykernel, which `belljar[jupyter]` brings.
"""

from importlib.util import find_spec

from belljar.errors import EngineError


def require_ipykernel() -> None:
    """Refuse, with what to do, where the optional dependency is missing."""
    if find_spec("ipykernel") is None:
        raise EngineError(
            "ipykernel is not installed beside belljar", hint="Install it: pip install 'belljar[jupyter]'"
        )
