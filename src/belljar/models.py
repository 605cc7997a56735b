"""What callers get back: the execution result and its parts, for every surface and for the Python API."""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

Status = Literal["ok", "error", "timeout", "interrupted", "out_of_memory", "died", "running", "rejected"]
State = Literal["kept", "rewound", "lost"]
MAX_REASON_CHARS = 200
"""The longest reason of a session."""
MAX_GPUS = 1_024


class Model(BaseModel):
    """A value: strict about unknown fields, so that a renamed one cannot vanish silently."""

    # Validators are built at their first use: most runs use few of them, and start-up need not wait for any.
    model_config = ConfigDict(extra="forbid", defer_build=True)


class FileReference(Model):
    """A file in a session's folder; `name` is its path there."""

    uri: str
    name: str
    mime_type: str
    size: int
    change: Literal["created", "modified"] | None = None


class Display(Model):
    """One rich output. Text that fits is in `text`; anything else is behind `uri`. `plain` is its plain-text form."""

    mime: str
    text: str | None = None
    uri: str | None = None
    size: int = 0
    file: str | None = None
    """The file of the session that was made of it."""
    plain: str | None = None
    display_id: str | None = None
    also: list["Display"] = []
    at: int | None = None
    """How many texts of the result's `output` came before it; None for the rich form of the last expression."""


class ResultNotice(Model):
    """Words of belljar's own among the output of a cell: `text` is the item of the result's `output` at place `at`."""

    text: str
    at: int


class Truncation(Model):
    """How much of the output is in the result, and where the whole is."""

    shown_bytes: int
    total_bytes: int
    uri: str


class Usage(Model):
    """What the execution cost."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    queue_s: float = 0.0
    peak_memory_mb: float = 0.0
    gpu_memory_mb: float = 0.0
    """The most GPU memory that the session was seen with, looked at every half second."""


class SessionNotice(Model):
    """Told once, with a session's first execution."""

    session_id: str
    instructions: str
    expires_at: str


TEXT_KINDS = ("stdout", "stderr", "notice")
"""The kinds of output events that are printed text, belljar's own words among it."""


class OutputEvent(Model):
    """One numbered piece of an execution's output, in the order it was produced."""

    sequence: int
    kind: Literal["stdout", "stderr", "display", "result", "error", "clear", "input", "notice"]
    text: str = ""
    data: dict[str, JsonValue] = {}

    @property
    def display(self) -> Display | None:
        """Return the rich form of a display or a result, if it has one."""
        value = self.data.get("display")
        return Display.model_validate(value) if isinstance(value, dict) else None

    @property
    def traceback(self) -> list[str]:
        """Return the lines of an error's traceback."""
        lines = self.data.get("traceback")
        return [str(line) for line in lines] if isinstance(lines, list) else []


class ToolCall(Model):
    """A tool that a cell called, and how that went; arguments and results are not told."""

    server: str
    tool: str
    state: Literal["started", "returned", "failed", "refused", "cancelled"]
    duration_s: float = 0.0
    reason: str = ""


class NextCall(Model):
    """A call that goes on from an answer."""

    tool: str
    arguments: dict[str, JsonValue]


class ExecutionResult(Model):
    """What one execution gave, finished or so far."""

    # Journals of earlier servers have results with fields that there are no more.
    model_config = ConfigDict(extra="ignore")

    success: bool
    status: Status
    execution_id: str
    session_id: str
    execution_count: int
    output: list[str]
    """What was printed and belljar's notices, in order. Printed text that looks like a notice says that it is none."""
    notices: list[ResultNotice] = []
    """Which texts of `output` are belljar's; what code printed is never among them."""
    stdout: str
    stderr: str
    result: str | None = None
    displays: list[Display] = []
    error: str | None = None
    traceback: list[str] = []
    files: list[FileReference] = []
    truncated: Truncation | None = None
    usage: Usage = Usage()
    state: State = "kept"
    lost: list[str] = []
    cause: str | None = None
    sequence: int = 0
    session_info: SessionNotice | None = None
    calls: list[ToolCall] = []
    """The tools that a cell had called, if it did not end well."""
    next: NextCall | None = None
    """The MCP call that waits for the rest, if the cell still runs."""
    waits_for: str | None = None
    """What a cell that has not started waits for: the environment that is being made, or cells before it."""
    asks_person: str | None = None
    """What a person is asked while it runs, and where it can be answered."""


class MappedResult(ExecutionResult):
    """What one piece of a map gave. One that never ran has the status `rejected`, and `error` says why."""

    index: int
    """Its place among the pieces, from 0 on."""
    key: str = ""

    @classmethod
    def of(cls, result: ExecutionResult, index: int, key: str = "", session_id: str = "") -> "MappedResult":
        """Return the result of a piece. Its session is named only where it is kept."""
        fields: dict[str, Any] = {**dict(result), "session_id": session_id, "index": index, "key": key}
        return cls.model_construct(None, **fields)

    @classmethod
    def of_lost(cls, cause: str, index: int) -> "MappedResult":
        """Return the result of a piece that may have run."""
        told = cls.rejected(cause, index)
        return told.model_copy(update={"status": "died", "state": "lost", "cause": cause})

    @classmethod
    def rejected(cls, reason: str, index: int, key: str = "") -> "MappedResult":
        """Return the result of a piece that never ran."""
        return cls(
            success=False,
            status="rejected",
            execution_id="",
            session_id="",
            execution_count=0,
            output=[],
            stdout="",
            stderr="",
            error=reason,
            index=index,
            key=key,
        )


class Rewinding(Model):
    """A session that goes on from an earlier state."""

    session_id: str
    to: str
    """The session is now as it was before this execution."""
    undone: list[str]
    """The executions that are undone, that one first."""
    lost: list[str] = []
    """What did not come back: threads, processes and sockets of that time, and files that were not kept."""


class SessionFork(Model):
    """A new session that goes on from another one's state."""

    session_id: str
    origin: str
    variables: list[str] = []
    lost: list[str] = []
    """What did not come along."""
    session_info: SessionNotice | None = None
    session_ids: list[str] = []
    """Where several were asked for, all that were made, in order; `session_id` is the first of them."""
    unmade: str = ""
    """Why there are fewer than were asked for."""


class SessionInfo(Model):
    """A session as its owner sees it."""

    session_id: str
    environment: str
    kernel: str
    sandbox: str
    state: Literal["idle", "running", "fresh", "asleep"]
    created_at: str
    last_used_at: str
    expires_at: str
    age_s: float
    memory_mb: float
    gpus: list[str] = []
    """The uuids of the GPUs that it has."""
    gpu_memory_mb: float = 0.0
    executions: int
    files: int | None
    """None while it sleeps, because they are not counted then."""
    checkpoints: int = 0
    """Earlier states that it can be rewound to."""
    reason: str = ""
    """What it is for, by which lists name it; `MAX_REASON_CHARS` at most."""
    last_status: Status | None = None
    last_cause: str | None = None
    """The latest limit, timeout, interrupt or death; it stays when later cells end well."""


# Times, as callers read them

_FIRST_TIME, _LAST_TIME = -62_135_596_800, 253_402_300_799
"""The first second of year 1 and the last of year 9999."""


def iso(timestamp: float) -> str:
    """Return a time in the ISO format that callers read."""
    return _formatted(timestamp, "seconds")


def iso_ms(timestamp: float) -> str:
    """Return a time in ISO 8601, in UTC, to the millisecond."""
    return _formatted(timestamp, "milliseconds")


def _formatted(timestamp: float, precision: str) -> str:
    # A session may give its files times that no calendar has.
    moment = datetime.fromtimestamp(min(max(timestamp, _FIRST_TIME), _LAST_TIME), UTC)
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")
