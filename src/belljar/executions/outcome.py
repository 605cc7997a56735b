"""How an execution ends, and its result: what stops it, the status and cause that callers see, lost variables, usage.

The stopper applies the timeout, the interrupt, and the kill of a cell that ignores it. This module owns the wording
that callers rely on, and counts the memory of GPUs in sessions that have one. Knows nothing of how an execution is run.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from belljar import metrics
from belljar.errors import KernelDied
from belljar.executions.transcript import Transcript
from belljar.files.disk_usage import DiskQuota
from belljar.kernels.base import Kernel, pid_of
from belljar.models import ExecutionResult, FileReference, State, Status, ToolCall, Usage
from belljar.outputs.events import Event, Finished, Raised
from belljar.provisioning.gpus import SessionGpus
from belljar.sandboxes.base import Incident
from belljar.toolbox.base import CallRecord, most_telling
from belljar.tracing import ExecutionSpan

Reason = Literal["timeout", "interrupted", "disk_full"]
SERVER_STOPPED = "the server stopped while it ran"
ON_REQUEST = "on request"
# How libraries say that a GPU has no memory left: torch and CuPy by the error's name, JAX, Numba and CUDA itself in
# words. MemoryError is not among them, because it means the host's memory.
_NAMES = ("OutOfMemoryError",)
_MESSAGES = (
    *("CUDA out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "HIP out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "RESOURCE_EXHAUSTED: Out of memory"),
)


class Stopper:
    """Stops one running cell at its timeout or on request.

    The timeout is paused while the cell waits for a person, for `pause_s` in all. That is bounded, because only the
    cell itself says that it waits.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        timeout_s: float,
        grace_s: float,
        pause_s: float = 0.0,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._kernel = kernel
        self._on_stop = on_stop
        self._pauses = 0
        self._pause_left_s = pause_s
        self._paused_at = 0.0
        self._pause_end: asyncio.TimerHandle | None = None
        self._is_over = False
        self._grace_s = grace_s
        self._left_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._started_at = 0.0
        self._stopping: asyncio.Task[None] | None = None
        self.reason: Reason | None = None
        self.why = ON_REQUEST
        """Who wanted it stopped, in words for the cause."""
        self.was_killed = False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Apply the timeout while the cell runs."""
        self._start_clock()
        try:
            yield
        finally:
            self._is_over = True
            self._stop_clock()
            self._end_pause()
            if self._stopping is not None:
                self._stopping.cancel()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the timeout while the cell waits for a person."""
        # Several tool calls of a cell may wait for answers at once, and may still wait when the cell has ended.
        if self._pauses == 0 and not self._is_over:
            self._begin_pause()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._end_pause()

    def pause_left_s(self) -> float:
        """Return how long the cell may still wait for people."""
        passed_s = asyncio.get_running_loop().time() - self._paused_at if self._pause_end is not None else 0.0
        return max(0.0, self._pause_left_s - passed_s)

    def stop(self, reason: Reason, why: str = ON_REQUEST) -> None:
        """Interrupt the cell now, and kill the kernel if the cell has not ended after the grace period."""
        if self.reason is None:
            self.reason, self.why = reason, why
            self._on_stop()
            self._stopping = asyncio.get_running_loop().create_task(self._interrupt_then_kill())

    def kill(self, reason: Reason) -> None:
        """Kill the kernel now, also when an interrupt is already under way."""
        if self._stopping is not None:
            self._stopping.cancel()
        self.reason = self.reason or reason
        self._on_stop()
        self.was_killed = True
        self._stopping = asyncio.get_running_loop().create_task(self._kernel.kill())

    async def _interrupt_then_kill(self) -> None:
        # Twice, because ipykernel can lose a signal that arrives while its own code runs.
        for _ in range(2):
            try:
                await self._interrupt(self._grace_s / 2)
            except KernelDied:
                return
        self.was_killed = True
        await self._kernel.kill()

    async def _interrupt(self, patience_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + patience_s
        # A kernel that takes no messages must not delay its kill.
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._kernel.interrupt()
        await asyncio.sleep(max(0, deadline - asyncio.get_running_loop().time()))

    def _begin_pause(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pause_left_s <= 0:
            return
        self._stop_clock()
        self._paused_at = loop.time()
        self._pause_end = loop.call_later(self._pause_left_s, self._end_pause)

    def _end_pause(self) -> None:
        if self._pause_end is None:
            return
        self._pause_left_s = self.pause_left_s()
        self._pause_end.cancel()
        self._pause_end = None
        if not self._is_over:
            self._start_clock()

    def _start_clock(self) -> None:
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        self._timer = loop.call_later(max(self._left_s, 0), self.stop, "timeout")

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s -= asyncio.get_running_loop().time() - self._started_at


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
    metrics.executions.add(result.status)
    metrics.execution_queue.observe(usage.queue_s)
    metrics.execution_wall.observe(usage.wall_s)
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
