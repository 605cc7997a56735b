"""The kernel contract: something that runs cells and keeps variables between them.

A kernel is used by one session, one cell at a time. It knows its process in the sandbox and the meaning of that
process's messages; it knows nothing of budgets, journals, timeouts or surfaces. Everything it reports comes from code
that may be hostile, so implementations check form and size before they yield an event. What only some kernels can do
(be forked, have comms, prove imports, save variables) is a protocol of its own here. `ProcessUsage` is what every
kernel measures its process with.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeGuard, runtime_checkable

from pydantic import BaseModel, Field, ValidationError

from belljar.environments.base import Environment
from belljar.outputs.events import CommMessage, Event, MimeBundle
from belljar.sandboxes.base import Incident, Sandbox


@dataclass(frozen=True, slots=True)
class Completion:
    """The names that fit at the cursor, and the span of the code that they replace."""

    matches: list[str] = field(default_factory=list[str])
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Completeness:
    """Whether code that is being typed could be run as it is; `indent` is what its next line would begin with."""

    status: Literal["complete", "incomplete", "invalid", "unknown"] = "unknown"
    indent: str = ""


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What a plugin gets that starts kernels: the name, and a way to open the session's sandbox."""

    name: str
    """NAME of the session's environment `kernel:NAME`."""
    environment: Environment
    """The server's configured environment, whose Python the sandbox shows."""
    open_sandbox: Callable[[Sequence[Path]], Awaitable[Sandbox]]
    """Opens the session's sandbox, which also shows these folders, read-only. The kernel closes it."""
    variables: Callable[[Sandbox], Mapping[str, str]]
    """Returns the variables for the kernel's process."""
    scratch: Path
    """A folder for sockets and files of the kernel, on the host; the sandbox shows it as `sandbox.scratch`."""
    layer: Path
    """The folder of the packages that are installed for this session."""
    start_timeout_s: float


class Kernel(Protocol):
    """A kernel; see the module's docstring. Every call raises `KernelDied` once the process has ended."""

    name: str

    def execute(
        self, code: str, *, allow_input: bool, on_begin: Callable[[], None] | None = None, wants_value: bool = False
    ) -> AsyncIterator[Event]:
        """Run a cell. The session calls it under its turn and consumes it to the end.

        With `wants_value`, the result has the form `outputs.events.VALUE` too, where the kernel can make one.

        `on_begin` is called once before any of the code runs. The execution commits its row to the journal there, so
        that a cell which may have run is on record whatever becomes of the server. It is a callback, and not a step
        before `execute`, because a kernel can send the cell first and have it parsed meanwhile. The commit takes
        0.13 ms (5th percentile of 2,000 cells on a busy machine, median 0.16 ms): that is the most it can save.
        Such a kernel must hold the code back until `on_begin` has returned.
        """
        ...

    def is_alive(self) -> bool:
        """Return whether the process is still there. Asked before each cell, because a kernel may die while idle."""
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
        """Describe the name at the cursor, as a MIME bundle; empty for nothing. Called between cells only."""
        ...

    async def check_complete(self, code: str) -> Completeness:
        """Return whether this code is a whole cell, for a person who types it. Called between cells only."""
        ...

    async def kill(self) -> None:
        """End the process at once. The running `execute` then raises `KernelDied`."""
        ...

    async def aclose(self) -> None:
        """End the process and release everything; may be called twice."""
        ...

    def incidents(self) -> list[Incident]:
        """Return the limits hit since the last call. Called after each cell, and before a dead kernel is released."""
        ...

    def memory_mb(self) -> float:
        """Return the resident memory of the kernel's process now; 0 when it is unknown."""
        ...

    def cpu_s(self) -> float:
        """Return the processor time of the kernel's process so far; 0 when it is unknown."""
        ...


class KernelCheckpoint(Protocol):
    """A frozen fork of a kernel: it has the kernel's memory as it once was, and runs nothing."""

    lost: list[str]
    """What the checkpoint lacks, because threads, processes and sockets are not forked along."""

    def is_alive(self) -> bool:
        """Return whether a kernel can still be restored from it."""
        ...

    def memory_mb(self) -> float:
        """Return the memory that the checkpoint takes in addition to the kernel's."""
        ...


@runtime_checkable
class ForkableKernel(Kernel, Protocol):
    """A kernel whose process can be forked between two cells."""

    async def fork_checkpoint(self) -> KernelCheckpoint:
        """Fork a checkpoint into the same sandbox. Raises CopyRefused when it would not be sound."""
        ...

    async def restore(self, checkpoint: KernelCheckpoint) -> Kernel:
        """Return a kernel in this one's sandbox that continues from the checkpoint, once it has answered a request.

        This kernel may be dead by now. If it is alive, both are alive until this one is discarded.
        """
        ...

    def forget(self, checkpoint: KernelCheckpoint) -> None:
        """End the process of a checkpoint."""
        ...

    def shares_sandbox(self, other: Kernel) -> bool:
        """Return whether closing one kernel would end the other."""
        ...

    async def discard(self, successor: Kernel | None = None) -> None:
        """End this kernel's processes and release it, but keep its sandbox, because its checkpoints live there.

        The successor is a kernel that was restored from one of them; its processes are spared.
        """
        ...


@runtime_checkable
class CommKernel(Kernel, Protocol):
    """A kernel that has comms, the connections between its widgets and their views in front ends."""

    def deliver_comm(self, message: CommMessage) -> AsyncIterator[Event]:
        """Deliver a front end's message to its comm. Called under the session's turn and consumed to the end."""
        ...

    async def receive_comm(self) -> CommMessage | None:
        """Return the next comm message that a thread or task of an earlier cell sent, or None. Between cells only."""
        ...

    async def comms(self) -> dict[str, str]:
        """Return the targets of the open comms by comm id. Called between cells only."""
        ...


@runtime_checkable
class RemoteKernel(Kernel, Protocol):
    """A kernel on another machine, which may end there without a word, and which has a clock of its own."""

    async def look(self) -> str:
        """Ask whether it is still there, and return why not; empty if it is. Called before each cell."""
        ...

    def limit_cell(self, timeout_s: float) -> None:
        """Set how long the next cell may run there. Called before `execute`."""
        ...


_is_remote_type: dict[type, bool] = {}
_is_forkable_type: dict[type, bool] = {}
_has_comms_type: dict[type, bool] = {}


def has_comms(kernel: Kernel | None) -> TypeGuard[CommKernel]:
    """Return whether the kernel has comms.

    Asked ten times a second while a front end is attached, so the answer is remembered for each class.
    """
    kind = type(kernel)
    if kind not in _has_comms_type:
        _has_comms_type[kind] = isinstance(kernel, CommKernel)
    return _has_comms_type[kind]


def is_remote(kernel: Kernel | None) -> TypeGuard[RemoteKernel]:
    """Return whether the kernel is on another machine. Asked before every cell, like `is_forkable`."""
    kind = type(kernel)
    if kind not in _is_remote_type:
        _is_remote_type[kind] = isinstance(kernel, RemoteKernel)
    return _is_remote_type[kind]


def is_forkable(kernel: Kernel | None) -> TypeGuard[ForkableKernel]:
    """Return whether the kernel can be forked.

    Asked before every cell, so the answer is remembered for each class: `isinstance` of a protocol takes 0.2 ms.
    """
    kind = type(kernel)
    if kind not in _is_forkable_type:
        _is_forkable_type[kind] = isinstance(kernel, ForkableKernel)
    return _is_forkable_type[kind]


@runtime_checkable
class RehearsableKernel(Protocol):
    """A kernel that can do the slow work of its first cell before a session uses it."""

    async def rehearse(self, *, makes_context: bool = False) -> str:
        """Run the code that every cell runs through, and leave nothing of it in the session.

        With `makes_context` also make a context on the session's GPU; return why that failed, if it did.
        """
        ...


# Proof that modules import where the cells run. Only kernels that run Python can give it.

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
proof = json.dumps({"loaded": loaded, "errors": errors}).encode().hex()
"""


@dataclass(frozen=True, slots=True)
class ImportProof:
    """What a kernel reports after it has imported modules; written by code that may be hostile."""

    loaded: frozenset[str] = frozenset()
    """Those of the watched modules that were loaded before."""
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """The modules that do not import, and why."""


@runtime_checkable
class ImportProvingKernel(Protocol):
    """A kernel that can import modules outside any cell and report which of them fail."""

    async def prove_imports(self, modules: Sequence[str], *, watched: Sequence[str]) -> ImportProof:
        """Import the modules without running a cell. Called under the session's turn, like `execute`."""
        ...


class _ProofText(BaseModel):
    loaded: list[str] = Field(max_length=2_000)
    errors: dict[str, Annotated[str, Field(max_length=2_000)]]


def proof_expression(modules: Sequence[str], watched: Sequence[str]) -> str:
    """Return a Python expression whose value `read_proof` reads; evaluating it defines no name."""
    given = {"modules": [*modules], "watched": [*watched]}
    return f"(lambda names: (exec({_CODE!r}, names), names['proof'])[1])({given!r})"


def read_proof(text: str) -> ImportProof | None:
    """Return the proof in the `repr` of the expression's value; None when it cannot be read."""
    try:
        proof = _ProofText.model_validate_json(bytes.fromhex(text.strip("'\"")))
    except (ValueError, ValidationError):
        return None
    return ImportProof(frozenset(proof.loaded), proof.errors)


# Variables that outlive their kernel. Only kernels that pickle them inside the sandbox can do it.
# The file is written and read by the session's own code only. The host names it, moves it and deletes it, but never
# loads a byte of it. The report about it was written by code that may be hostile.


@dataclass(frozen=True, slots=True)
class StateLoss:
    """Something that could not be saved or loaded."""

    name: str
    """The name of a variable, or of other state such as `os.environ`; `*` for a remark on the file as a whole."""
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateReport:
    """Which of a session's variables were saved or loaded, and which were lost."""

    kept: tuple[str, ...] = ()
    lost: tuple[StateLoss, ...] = ()
    size_bytes: int = 0
    """The size of the file; 0 when there is none."""


@runtime_checkable
class StatefulKernel(Protocol):
    """A kernel that can save its variables to a file and load them.

    `save_state` and `load_state` run code of the session, so they are called between cells, under the session's turn,
    like `execute`. `interrupt` ends them early, and what is done by then is kept. They never raise for what the
    variables do; they raise `KernelDied` when the process ends meanwhile.
    """

    @property
    def scratch(self) -> str:
        """Return the path inside the sandbox of a folder that is shared with the host."""
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
        """Write the variables to a file at a path inside the sandbox. Over a limit the largest are left out."""
        ...

    async def load_state(self, path_inside: str) -> StateReport:
        """Load the variables of such a file into a kernel that has run nothing yet."""
        ...


def pid_of(kernel: Kernel | None) -> int:
    """Return the pid of a kernel's process on this host; 0 where it has none here, or none is known."""
    pid = getattr(kernel, "pid", 0)
    return pid if isinstance(pid, int) else 0


class ProcessUsage:
    """What one process uses, as Linux's /proc tells it; zeros where there is no /proc.

    Its files there stay open, so that they can never mean a later process with the same pid.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._status = self._open("status", os.O_RDONLY)
        self._clear = self._open("clear_refs", os.O_WRONLY)

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(self._folder / name, flags | os.O_CLOEXEC)
        except OSError:
            return -1

    def reset_peak(self) -> None:
        """Reset the peak (proc(5), clear_refs); where that is refused, the peak is that of the whole session."""
        with contextlib.suppress(OSError):
            os.write(self._clear, b"5")

    def peak_memory_mb(self) -> float:
        """Return the highest resident memory since `reset_peak`."""
        return self._kilobytes(b"VmHWM:") / 1024

    def memory_mb(self) -> float:
        """Return the resident memory now."""
        return self._kilobytes(b"VmRSS:") / 1024

    def _kilobytes(self, name: bytes) -> int:
        try:
            text = os.pread(self._status, 4096, 0)
            return int(text.partition(name)[2].split(None, 1)[0])
        except (OSError, ValueError, IndexError):
            return 0

    def cpu_s(self) -> float:
        """Return the processor time so far, with that of children that have ended; in steps of 10 ms."""
        try:
            text = (self._folder / "stat").read_text(errors="replace")
        except OSError:
            return 0.0
        # The process name is in brackets and may hold blanks, so fields are counted from the last bracket.
        # These four are utime to cstime.
        fields = text.rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Release the files; may be called twice."""
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._clear = -1
