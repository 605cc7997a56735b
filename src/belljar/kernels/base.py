"""The kernel contract: something that runs cells and keeps variables between them.

A kernel is used by one session, one cell at a time. It knows its sandbox's process and the meaning of its messages;
it knows nothing of budgets, journals, timeouts or surfaces. Everything it reports comes from code that may be
hostile: implementations check form and size before they yield an event.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, TypeGuard, runtime_checkable

from pydantic import BaseModel, Field, ValidationError

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


class KernelSnapshot(Protocol):
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
class ForkableKernel(Kernel, Protocol):
    """A kernel that can be copied as it is, between two cells."""

    async def snapshot(self) -> KernelSnapshot:
        """Keep a copy in the same sandbox. Raises CopyRefused when it would not be sound."""
        ...

    async def restore(self, copy: KernelSnapshot) -> Kernel:
        """A kernel in this one's sandbox that goes on where the copy stands, and has answered there.

        This one may be dead by now, or alive: until it is discarded both are.
        """
        ...

    def forget(self, copy: KernelSnapshot) -> None:
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
class CommKernel(Kernel, Protocol):
    """A kernel that has comms: a way between its widgets and their views in front ends."""

    def deliver_comm(self, message: CommMessage) -> AsyncIterator[Event]:
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


def has_comms(kernel: Kernel | None) -> TypeGuard[CommKernel]:
    """Whether it has comms. Asked ten times a second where someone looks on, so each kind is looked at once."""
    kind = type(kernel)
    if kind not in _converses:
        _converses[kind] = isinstance(kernel, CommKernel)
    return _converses[kind]


def is_forkable(kernel: Kernel | None) -> TypeGuard[ForkableKernel]:
    """Whether it can be copied. Asked before every cell, and each kind looked at once: Python takes 0.2 ms for it."""
    kind = type(kernel)
    if kind not in _copyable:
        _copyable[kind] = isinstance(kernel, ForkableKernel)
    return _copyable[kind]


@runtime_checkable
class RehearsableKernel(Protocol):
    """A kernel that can get its first times over before it is anyone's."""

    async def rehearse(self) -> None:
        """Run what every cell runs through, leaving no trace."""
        ...


# Proof that modules import where the cells run. Some kernels can give it: those that run Python.

_CODE = """
import contextlib, importlib, io, json, sys
loaded = [name for name in watched if name in sys.modules]
errors = {}
importlib.invalidate_caches()
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            errors[name] = f"{type(error).__name__}: {error}"[:2000]
told = json.dumps({"loaded": loaded, "errors": errors}).encode().hex()
"""


@dataclass(frozen=True, slots=True)
class ImportProof:
    """What a kernel says after it has imported modules; written by code that may be hostile."""

    loaded: frozenset[str] = frozenset()
    """Those of the watched modules that were there before."""
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules that do not import, and why."""


@runtime_checkable
class ImportProvingKernel(Protocol):
    """A kernel that can be asked."""

    async def prove_imports(self, modules: Sequence[str], *, watched: Sequence[str]) -> ImportProof:
        """Import modules, as no cell of anyone's; under the session's turn, like `execute`."""
        ...


class _ProofText(BaseModel):
    loaded: list[str] = Field(max_length=2_000)
    errors: dict[str, Annotated[str, Field(max_length=2_000)]]


def proof_expression(modules: Sequence[str], watched: Sequence[str]) -> str:
    """A Python expression whose value `read_proof` reads; it leaves no name behind."""
    given = {"modules": [*modules], "watched": [*watched]}
    return f"(lambda names: (exec({_CODE!r}, names), names['told'])[1])({given!r})"


def read_proof(text: str) -> ImportProof | None:
    """What the expression's value says, as a notebook shows it; None when it cannot be read."""
    try:
        told = _ProofText.model_validate_json(bytes.fromhex(text.strip("'\"")))
    except (ValueError, ValidationError):
        return None
    return ImportProof(frozenset(told.loaded), told.errors)


# Variables that outlive their kernel. Some kernels can do it: those that pickle them inside the sandbox.
# The file is written and read by the session's own code only. The host names it, moves it, deletes it, and never
# loads a byte of it; what it is told about it was written by code that may be hostile.


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
class StatefulKernel(Protocol):
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
