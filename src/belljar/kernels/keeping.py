"""Variables that outlive their kernel. Some kernels can do it: those that pickle them inside the sandbox.

The file is written and read by the session's own code only. The host names it, moves it, deletes it, and never loads a
byte of it; what it is told about it was written by code that may be hostile.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class StateLoss:
    """Something that could not be kept."""

    name: str
    """The variable's, or of what is around variables, such as `os.environ`; `*` for a remark on the file as a whole."""
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateReport:
    """What became of a session's variables."""

    kept: tuple[str, ...] = ()
    lost: tuple[StateLoss, ...] = ()
    size_bytes: int = 0
    """Of the file; 0 when there is none."""


@runtime_checkable
class KeepsState(Protocol):
    """A kernel that can be asked. Both run code of the session's: between cells, under its turn, like `execute`.

    `interrupt` ends them early, and what is done by then is kept. They never raise for what the variables do; they
    raise `KernelDied` when the process ends meanwhile.
    """

    @property
    def scratch(self) -> str:
        """A folder shared with the host, as code inside sees it."""
        ...

    def is_alive(self) -> bool:
        """See `Kernel`."""
        ...

    async def interrupt(self) -> None:
        """See `Kernel`."""
        ...

    async def save_state(
        self, path_inside: str, *, limit_bytes: int | None = None, limit_s: float | None = None
    ) -> StateReport:
        """Write the variables to a file, by the sandbox's path. Over a limit the largest are left out."""
        ...

    async def load_state(self, path_inside: str) -> StateReport:
        """Bring the variables of such a file into a kernel that has run nothing yet."""
        ...
