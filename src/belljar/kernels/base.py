"""The kernel contract: something that runs cells and keeps variables between them.

A kernel is used by one session, one cell at a time. It knows its sandbox's process and the meaning of its messages;
it knows nothing of budgets, journals, timeouts or surfaces. Everything it reports comes from code that may be
hostile: implementations check form and size before they yield an event.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from belljar.outputs.events import Event
from belljar.sandboxes.base import Incident


@dataclass(frozen=True, slots=True)
class Completion:
    """Names that fit at the cursor, and the span they replace."""

    matches: list[str] = field(default_factory=list[str])
    start: int = 0
    end: int = 0


class Kernel(Protocol):
    """See the module's docstring. Raises `KernelDied` from any call once the process is gone."""

    name: str

    def execute(self, code: str, *, allow_input: bool) -> AsyncIterator[Event]:
        """Run a cell. The session calls it under its turn and consumes it to the end."""
        ...

    def is_alive(self) -> bool:
        """Whether the process is still there. Asked before each cell: a kernel may die while it is idle."""
        ...

    async def reply_input(self, text: str | None) -> None:
        """Answer the pending `InputRequest`; `None` makes `input()` raise `EOFError`. Called by the execution."""
        ...

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running cell. Called while `execute` is being consumed."""
        ...

    async def complete(self, code: str, cursor: int) -> Completion:
        """Complete a name. Called between cells only."""
        ...

    async def kill(self) -> None:
        """End the process at once. The running `execute` then raises `KernelDied`."""
        ...

    async def aclose(self) -> None:
        """End the process and release everything; may be called twice."""
        ...

    def incidents(self) -> list[Incident]:
        """Limits that were hit since the last call. Asked after each cell, and before a dead kernel is released."""
        ...

    def memory_mb(self) -> float:
        """Resident memory of the kernel's process now; 0 when it cannot be told."""
        ...
