"""The kernel contract: something that runs cells and keeps variables between them.

A kernel is used by one session, one cell at a time. It knows its sandbox's process and the meaning of its messages;
it knows nothing of budgets, journals, timeouts or surfaces. Everything it reports comes from code that may be
hostile: implementations check form and size before they yield an event.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeGuard, runtime_checkable

from belljar.outputs.events import CommMessage, Event, MimeBundle
from belljar.sandboxes.base import Incident


@dataclass(frozen=True, slots=True)
class Completion:
    """Names that fit at the cursor, and the span they replace."""

    matches: list[str] = field(default_factory=list[str])
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Completeness:
    """Whether code that is being typed could be run as it stands; `indent` is what its next line would begin with."""

    status: Literal["complete", "incomplete", "invalid", "unknown"] = "unknown"
    indent: str = ""


class Kernel(Protocol):
    """See the module's docstring. Raises `KernelDied` from any call once the process is gone."""

    name: str

    def execute(
        self, code: str, *, allow_input: bool, on_begin: Callable[[], None] | None = None
    ) -> AsyncIterator[Event]:
        """Run a cell. The session calls it under its turn and consumes it to the end.

        `on_begin` is called once before any of the code runs. The execution commits its row to the journal there, so
        that a cell which may have run is on record whatever becomes of the server. It is a callback, and not a step
        before `execute`, because a kernel can send the cell first and have it parsed meanwhile. The commit takes
        0.13 ms (5th percentile of 2,000 cells on a busy machine, median 0.16 ms): that is the most it can save.
        Such a kernel must hold the code back until `on_begin` has returned.
        """
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

    async def inspect(self, code: str, cursor: int, *, detail: int = 0) -> MimeBundle:
        """What the name at the cursor is, in the forms there are; empty for nothing. Called between cells only."""
        ...

    async def check_complete(self, code: str) -> Completeness:
        """Whether a person who typed this has ended the cell. Called between cells only."""
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

    def cpu_s(self) -> float:
        """Processor time of the kernel's process so far; 0 when it cannot be told."""
        ...


class Asleep(Protocol):
    """A copy of a kernel as it once was, which runs nothing."""

    lost: list[str]
    """What it lacks: threads, processes and sockets do not come along."""

    def is_alive(self) -> bool:
        """Whether it can still be woken."""
        ...

    def memory_mb(self) -> float:
        """What it costs beside the kernel."""
        ...


@runtime_checkable
class Copyable(Kernel, Protocol):
    """A kernel that can be copied as it is, between two cells."""

    async def fall_asleep(self) -> Asleep:
        """Keep a copy in the same sandbox. Raises CopyRefused when it would not be sound."""
        ...

    async def wake(self, copy: Asleep) -> Kernel:
        """A kernel in this one's sandbox that goes on where the copy stands, and has answered there.

        This one may be dead by now, or alive: until it is discarded both are.
        """
        ...

    def forget(self, copy: Asleep) -> None:
        """End a copy."""
        ...

    def shares_sandbox(self, other: Kernel) -> bool:
        """Whether closing one would end the other."""
        ...

    async def discard(self, successor: Kernel | None = None) -> None:
        """End this kernel's processes and let go of it, but not of its sandbox, where copies sleep.

        The successor is a kernel that was woken from one of them, and lives on.
        """
        ...


@runtime_checkable
class Converses(Kernel, Protocol):
    """A kernel that has comms: a way between its widgets and their views in front ends."""

    def hear(self, message: CommMessage) -> AsyncIterator[Event]:
        """Hand a front end's word to its comm. Called under the session's turn, and consumed to the end like a cell."""
        ...

    async def overhear(self) -> CommMessage | None:
        """What a thread or a task of an earlier cell had a widget say, if any did. Called between cells only."""
        ...

    async def comms(self) -> dict[str, str]:
        """Targets of the comms that are open, by their ids. Called between cells only."""
        ...


_copyable: dict[type, bool] = {}
_converses: dict[type, bool] = {}


def converses(kernel: Kernel | None) -> TypeGuard[Converses]:
    """Whether it has comms. Asked ten times a second where someone looks on, so each kind is looked at once."""
    kind = type(kernel)
    if kind not in _converses:
        _converses[kind] = isinstance(kernel, Converses)
    return _converses[kind]


def is_copyable(kernel: Kernel | None) -> TypeGuard[Copyable]:
    """Whether it can be copied. Asked before every cell, and each kind looked at once: Python takes 0.2 ms for it."""
    kind = type(kernel)
    if kind not in _copyable:
        _copyable[kind] = isinstance(kernel, Copyable)
    return _copyable[kind]


@runtime_checkable
class Rehearses(Protocol):
    """A kernel that can get its first times over before it is anyone's."""

    async def rehearse(self) -> None:
        """Run what every cell runs through, leaving no trace."""
        ...
