"""The result of an execution, made of what is known of it so far, and its numbers for whoever operates the server."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from belljar import measures
from belljar.models import ExecutionResult, FileReference, ToolCall, Usage
from belljar.sessions.outcomes import Outcome
from belljar.sessions.transcript import Transcript
from belljar.spans import ExecutionSpan
from belljar.toolbox.base import CallRecord
from belljar.toolbox.ledger import most_telling

MOST_CALLS_TOLD = 100


@dataclass(slots=True)
class Times:
    """When an execution was submitted, had its turn and ended, by the clock that nobody sets."""

    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    ended_at: float | None = None

    def usage(self, outcome: Outcome) -> Usage:
        """What it took until its end, or until now."""
        now = self.ended_at or time.monotonic()
        started = self.started_at or now
        return Usage(
            wall_s=round(now - started, 6),
            cpu_s=round(outcome.cpu_s, 6),
            queue_s=round(started - self.submitted_at, 6),
            peak_memory_mb=round(outcome.peak_memory_mb, 1),
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
    not_undoable: str | None,
) -> ExecutionResult:
    """The result, or as much of it as there is."""
    summary = transcript.summary
    return ExecutionResult(
        success=outcome.status in ("ok", "running"),
        status=outcome.status,
        execution_id=execution_id,
        session_id=session_id,
        execution_count=outcome.count,
        output=[text for _, text in summary.segments()],
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
        calls=_told(calls, outcome),
        not_undoable=not_undoable,
    )


def _told(calls: Sequence[CallRecord], outcome: Outcome) -> list[ToolCall]:
    """Of a cell that did not end well: who reads on needs to know what it has done already."""
    if outcome.status in ("ok", "running"):
        return []
    return [
        ToolCall(server=call.server, tool=call.tool, state=call.state, duration_s=call.duration_s, reason=call.reason)
        for call in most_telling(calls, MOST_CALLS_TOLD)
    ]


def measure(result: ExecutionResult, span: ExecutionSpan) -> None:
    """Count a result that is final, and end its span."""
    usage = result.usage
    measures.executions.add(result.status)
    measures.execution_queue.observe(usage.queue_s)
    measures.execution_wall.observe(usage.wall_s)
    span.end(
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
