"""How an execution ended, and its result: the status and cause that callers see, lost variables, usage, also of GPUs.

Owns the wording that callers rely on. Knows nothing of how an execution is run.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from belljar import measures
from belljar.errors import KernelDied
from belljar.executions.stopper import Stopper
from belljar.executions.transcript import Transcript
from belljar.executions.working_folder import DiskQuota
from belljar.kernels.base import Kernel, pid_of
from belljar.models import ExecutionResult, FileReference, State, Status, ToolCall, Usage
from belljar.outputs.events import Event, Finished, Raised
from belljar.provisioning.gpus import SessionGpus
from belljar.sandboxes.base import Incident
from belljar.spans import ExecutionSpan
from belljar.toolbox.base import CallRecord
from belljar.toolbox.call_log import most_telling

# How libraries say that a GPU has no memory left: torch and CuPy by the error's name, JAX, Numba and CUDA itself in
# words. MemoryError is not among them, because it means the host's memory.
_NAMES = ("OutOfMemoryError",)
_MESSAGES = (
    *("CUDA out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "HIP out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "RESOURCE_EXHAUSTED: Out of memory"),
)


@dataclass(slots=True)
class Outcome:
    """The outcome of one execution; `running` until it is known."""

    status: Status = "running"
    state: State = "kept"
    lost: tuple[str, ...] = ()
    cause: str | None = None
    count: int = 0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0
    gpu_memory_mb: float = 0.0

    def conclude(self, finished: Finished, stopper: Stopper, timeout_s: float, quota: DiskQuota) -> None:
        """Set the outcome of a cell that the kernel reports as finished."""
        self.status = stopped_status(stopper) or ("ok" if finished.is_ok else "error")
        self.count = finished.execution_count
        self.cpu_s = finished.cpu_s
        self.peak_memory_mb = finished.peak_memory_mb
        if stopper.reason == "timeout":
            self.cause = f"timeout: interrupted after {timeout_s:g} s; variables are kept"
        elif stopper.reason == "interrupted":
            self.cause = f"interrupted {stopper.why}; variables are kept"
        elif stopper.reason == "disk_full":
            self.cause = survived_text(Incident("disk_full", f"folder {quota.detail}, so the cell was interrupted"))


def never_ran(why: str, before: str) -> Outcome:
    """Return the outcome of a cell that was interrupted before it began; `why` says on whose behalf."""
    return Outcome(status="interrupted", cause=f"interrupted {why} before {before}; it never ran")


def stopped_status(stopper: Stopper) -> Status | None:
    """Return the status of a cell that was stopped; None if it was not."""
    return "interrupted" if stopper.reason == "disk_full" else stopper.reason


def cause_of_death(death: KernelDied, stopper: Stopper, timeout_s: float, quota: DiskQuota) -> str:
    """Return why a kernel died while its cell ran, where no limit of the sandbox and not the session ended it."""
    if not stopper.was_killed:
        return f"{KernelDied.code}: {death.message}"
    match stopper.reason:
        case "disk_full":
            return killed_text(Incident("disk_full", f"folder {quota.detail}, and the cell went on"))
        case "timeout":
            return f"timeout: killed after {timeout_s:g} s, because it ignored the interrupt"
        case _:
            return f"killed {stopper.why}, because it ignored the interrupt"


# Limits that were hit: a fixed word that callers can rely on, the values, and what state survived.

RESUMED = "its server ended while it ran; it went on under the next one"
_SURVIVED = {
    "out_of_memory": "a process of it was killed; the kernel lives, variables are kept",
    "too_many_processes": "starting more was refused; the kernel lives, variables are kept",
    "disk_full": "the kernel lives, variables and files are kept",
    "gpu_out_of_memory": "the kernel lives, variables are kept: delete tensors (and torch.cuda.empty_cache()) or use "
    "smaller ones",
    "gpu_lost": "the kernel lives, variables in the host's memory are kept, those on the GPU are gone",
}


def survived_text(incident: Incident) -> str:
    """Return the message for a limit that the kernel hit and survived."""
    return f"{incident.kind}: the session {incident.detail}; {_SURVIVED[incident.kind]}"


def killed_text(incident: Incident) -> str:
    """Return the message for a limit that killed the kernel."""
    return f"{incident.kind}: the session {incident.detail}; the kernel was killed, variables are lost, files are kept"


def fatal_incident(incidents: Sequence[Incident], death: str) -> Incident | None:
    """Return the incident that ended a kernel, given the message of its death; None if no incident did.

    Lack of memory kills with SIGKILL and nothing else. "process ended" is included, because the process that would have
    reported the signal may have been killed too, and a closed connection, because a slow machine closes that seconds
    before it has freed the memory of the process.
    """
    if not death.endswith(("SIGKILL", "process ended", "closed the kernel's connection, so its process was ended")):
        return None
    return next((incident for incident in incidents if incident.kind == "out_of_memory"), None)


def rewound_text(count: int, lost: Sequence[str]) -> str:
    """Return the notice that the kernel died and an earlier state took its place, as far as that came back."""
    cells = "this cell" if count == 1 else f"the last {count} cells"
    what = came_back(lost)
    return f"the kernel died and the session was rewound: {what} are as they were before {cells}"


def came_back(lost: Sequence[str]) -> str:
    """Return what a rewind has restored, given what it could not."""
    is_partly = any(item.startswith(("file ", "files ", "files:")) for item in lost)
    return "variables, and files but for those that did not come back," if is_partly else "variables and files"


# Lost variables


@dataclass(frozen=True, slots=True)
class StateLossNotice:
    """Which variables went with the last kernel, for the output of the next execution."""

    names: tuple[str, ...]
    notice: str
    state: State = "lost"


@dataclass(frozen=True, slots=True)
class KernelLoss:
    """The variables lost with a kernel that died, and whether a checkpoint took its place."""

    lost: tuple[str, ...]
    is_rewound: bool = False
    since: str = ""
    """The first execution that was undone; empty if no execution began from the checkpoint."""

    @property
    def state(self) -> State:
        """Return what became of the session's variables."""
        return "rewound" if self.is_rewound else "lost"


# Results and metrics

MAX_CALLS_REPORTED = 100


@dataclass(slots=True)
class Times:
    """When an execution was submitted, got its turn and ended, by the monotonic clock."""

    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    ended_at: float | None = None
    earlier_s: float = 0.0
    """How long it ran under an earlier server."""

    def usage(self, outcome: Outcome) -> Usage:
        """Return what it used until its end, or until now."""
        now = self.ended_at or time.monotonic()
        started = self.started_at or now
        return Usage(
            wall_s=round(now - started, 6),
            cpu_s=round(outcome.cpu_s, 6),
            queue_s=round(started - self.submitted_at, 6),
            peak_memory_mb=round(outcome.peak_memory_mb, 1),
            gpu_memory_mb=round(outcome.gpu_memory_mb, 1),
        )


def make_result(
    execution_id: str,
    session_id: str,
    *,
    outcome: Outcome,
    transcript: Transcript,
    times: Times,
    files: list[FileReference],
    calls: Sequence[CallRecord],
    waits_for: str | None = None,
) -> ExecutionResult:
    """Return the result of an execution, or as much of it as is known yet."""
    summary = transcript.summary
    output, notices = summary.texts()
    return ExecutionResult(
        success=outcome.status in ("ok", "running"),
        status=outcome.status,
        execution_id=execution_id,
        session_id=session_id,
        execution_count=outcome.count,
        output=output,
        notices=notices,
        stdout=summary.stream("stdout"),
        stderr=summary.stream("stderr"),
        result=summary.result,
        displays=summary.displays,
        error=(None if outcome.status in ("ok", "error") else outcome.cause) or summary.error,
        traceback=summary.traceback,
        files=files,
        truncated=summary.truncation,
        usage=times.usage(outcome),
        state=outcome.state,
        lost=list(outcome.lost),
        cause=outcome.cause,
        sequence=transcript.sequence,
        calls=_reported_calls(calls, outcome),
        waits_for=waits_for,
    )


def _reported_calls(calls: Sequence[CallRecord], outcome: Outcome) -> list[ToolCall]:
    """Return the tool calls of a cell that did not end well, because its caller must know what was done already."""
    if outcome.status in ("ok", "running"):
        return []
    return [
        ToolCall(server=call.server, tool=call.tool, state=call.state, duration_s=call.duration_s, reason=call.reason)
        for call in most_telling(calls, MAX_CALLS_REPORTED)
    ]


def measure(result: ExecutionResult, span: ExecutionSpan) -> None:
    """Count a result that is final, and end its span."""
    usage = result.usage
    measures.executions.add(result.status)
    measures.execution_queue.observe(usage.queue_s)
    measures.execution_wall.observe(usage.wall_s)
    span.finish(
        result.status,
        is_failure=not result.success,
        queue_s=usage.queue_s,
        wall_s=usage.wall_s,
        cpu_s=usage.cpu_s,
        peak_memory_mb=usage.peak_memory_mb,
        events=result.sequence,
        displays=len(result.displays),
        files=len(result.files),
        lost=len(result.lost),
    )


class GpuUse:
    """The GPU memory of one execution."""

    def __init__(self, gpus: SessionGpus, session_id: str) -> None:
        self._gpus = gpus
        self._session_id = session_id
        self._has_raised = self._is_short = False

    @asynccontextmanager
    async def watching(self, kernel: Kernel, outcome: Outcome) -> AsyncGenerator[None]:
        """Record in the outcome how much GPU memory the session holds until the block ends."""
        async with self._gpus.watching(self._session_id, pid_of(kernel)) as peak:
            try:
                yield
            finally:
                outcome.gpu_memory_mb = peak.mb
        outcome.gpu_memory_mb = max(outcome.gpu_memory_mb, peak.mb)

    def on_event(self, event: Event) -> None:
        """Note an error of the cell."""
        if isinstance(event, Raised):
            self._has_raised, self._is_short = True, is_shortage(event.name, event.message)

    async def incidents(self, kernel: Kernel) -> list[Incident]:
        """Return what became of the GPU, if the cell raised: it was out of memory, or was taken away."""
        if not self._has_raised:
            return []
        if self._is_short:
            return [await self._gpus.shortage(self._session_id, pid_of(kernel))]
        loss = await asyncio.to_thread(self._gpus.loss, self._session_id)
        return [loss] if loss is not None else []


def is_shortage(name: str, message: str) -> bool:
    """Return whether an error of a cell says that its GPU has no memory left."""
    return name.rpartition(".")[2] in _NAMES or any(text in message for text in _MESSAGES)


def with_gpu_memory(cause: str, held_mb: float) -> str:
    """Return the cause of a kernel's death with the GPU memory that went with it."""
    return f"{cause}; the {held_mb:,.0f} MB that it held on its GPU are free again" if held_mb else cause
