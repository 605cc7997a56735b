"""The contract between those who show sessions (the HTTP API, the console) and where the sessions are.

`Access` says who asks, and the implementation decides: a session or an execution of another owner is answered exactly
as an unknown one. Reading never wakes a session, marks it as used or keeps it open.
"""

import base64
import binascii
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from pydantic import ConfigDict, JsonValue

from belljar.errors import InvalidArgument
from belljar.executions.inbox import InboxQuestion
from belljar.models import (
    ExecutionResult,
    FileReference,
    Model,
    OutputEvent,
    Rewinding,
    SessionFork,
    Status,
    ToolCall,
    Usage,
)

if TYPE_CHECKING:
    from belljar.monitor.packages import PackageList
    from belljar.monitor.variables import TableRows, VariableList

MAX_ITEMS = 200
"""The most items of one page of a list."""
STREAM_CHARS = 20_000
"""So much text of a running cell goes through a stream; then the number of its lines, and the last of them."""
TAIL_LINES = 50
MAX_COMPLETED_CHARS = 100_000
"""The most code that names are looked for in."""
MAX_MATCHES = 200
BATCH_BYTES = 64 * 1024
BATCH_INTERVAL_S = 0.05
UNFINISHED = ("queued", "running")
"""The states of an execution that has not ended."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who asks: an owner sees their own sessions, an operator those of all owners."""

    principal: str
    is_operator: bool = False
    name: str = ""
    """What the journal calls them when they act in a session of somebody else."""

    def may_see(self, owner: str) -> bool:
        """Return whether a session of this owner is visible to them."""
        return self.is_operator or owner == self.principal


# What is shown

SessionState = Literal["running", "idle", "fresh", "asleep", "gone"]
ExecutionState = Literal["queued"] | Status
Item = TypeVar("Item")


class EntryPage(Model, Generic[Item]):
    """A part of a list, newest first. `next` is the cursor of the part after it; null at the end."""

    items: list[Item]
    next: str | None = None


class Server(Model):
    """A server of the data directory."""

    name: str
    pid: int
    version: str = ""
    sessions: int
    is_answering: bool = True


class RunningCell(Model):
    """The cell that a session runs now."""

    execution_id: str
    first_line: str
    """Its first line that is no import and no comment, where it has one."""
    since: str
    running_s: float
    asks: str = ""
    """The first line of the question to a person that it waits with."""


class SessionEntry(Model):
    """A session in a list."""

    session_id: str
    owner: str
    environment: str
    state: SessionState
    reason: str = ""
    server: str = ""
    created_at: str
    last_used_at: str
    expires_at: str = ""
    executions: int = 0
    checkpoints: int = 0
    memory_mb: float = 0.0
    cpu_percent: float = 0.0
    memory_history: list[float] = []
    """Resident memory in megabytes over the last minutes, oldest first."""
    cpu_history: list[float] = []
    last_status: ExecutionState | None = None
    last_cause: str = ""
    """The latest limit, timeout, interrupt or death; of a session that is not live, why it ended."""
    now: RunningCell | None = None
    rewindable: list[str] = []
    """The executions before which a state of the session is held, oldest first."""


class SessionDetail(SessionEntry):
    """A session with all that is known of it."""

    sandbox: str = ""
    kernel: str = ""
    limits: dict[str, float | None] = {}
    variables: list[str] = []
    """The names of its variables after its last cell."""
    unkept: list[str] = []
    """What of it could not be saved to disk when it was put to sleep."""
    origin: str = ""
    """The session that it is a fork of."""
    origin_execution: str = ""
    forks: list[str] = []


class ExecutionEntry(Model):
    """An execution without its output."""

    execution_id: str
    session_id: str
    execution_count: int = 0
    code: str
    author: str = ""
    """Who ran it; empty for the owner of the session."""
    client: str = ""
    status: ExecutionState
    submitted_at: str
    started_at: str | None = None
    ended_at: str | None = None
    usage: Usage = Usage()
    error: str | None = None
    cause: str | None = None
    state: str = "kept"
    lost: list[str] = []
    files: list[FileReference] = []
    is_undone: bool = False
    is_dropped: bool = False
    """Whether its output was dropped because the journal was full."""
    output_bytes: int = 0
    events: int = 0
    """The number of its latest output event; 0 while it runs."""


class CallEntry(Model):
    """A tool call of an execution; arguments and results are not told."""

    number: int
    server: str
    tool: str
    state: Literal["started", "returned", "failed", "refused", "cancelled"]
    started_at: str
    duration_s: float
    reason: str


class OutputLines(Model):
    """Some lines of an execution's output, from `first` on; lines are numbered from 1."""

    first: int
    lines: list[str]
    total: int
    is_complete: bool
    """Whether the execution has ended, so that there will be no more lines."""
    matches: list[int] = []
    """The numbers of the lines that have the text that was searched for, the first 1,000."""


class FileEntryInfo(Model):
    """A file of a session."""

    name: str
    size: int
    modified_at: str
    mime_type: str


class FileListing(Model):
    """Files and folders right in a folder of a session, by name. `next` is the name to go on after."""

    items: list[FileEntryInfo]
    folders: list[str] = []
    next: str | None = None


class FilePart(Model):
    """A part of a file of a session."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    content: bytes
    size: int
    """The size of the whole file."""
    version: str
    """Changes when the file does."""


class NameCompletion(Model):
    """Names that fit at a place in code, and the span of the code that they replace."""

    matches: list[str] = []
    start: int = 0
    end: int = 0


class Health(Model):
    """Whether the server works, and what it holds."""

    status: Literal["ready", "not ready"]
    checks: dict[str, str]
    gauges: dict[str, float]
    limits: dict[str, float | None] = {}
    """What a session of this server may use; null for no limit."""
    version: str
    servers: list[Server]


class UsageHistory(Model):
    """What sessions used over the last 15 minutes, one value for each `interval_s`, oldest first and the last now."""

    interval_s: float
    gauges: dict[str, list[float]]
    """Sessions that run, are idle or fresh, their memory in megabytes, and their share of a processor in percent."""


# What happens

FollowedKind = Literal["cell", "output", "tail", "ended", "undone", "question", "session", "gone", "reset"]


class Tail(Model):
    """The end of the output of a cell that printed more than a stream carries."""

    execution_id: str
    sequence: int
    lines: int
    chars: int
    text: str


class Followed(Model):
    """One thing that happened in a session. `id` names its place, for a reader who comes back."""

    kind: FollowedKind
    id: str = ""
    execution: ExecutionEntry | None = None
    execution_id: str = ""
    output: OutputEvent | None = None
    tail: Tail | None = None
    undone: list[str] = []
    state: str = ""
    """Of a question: `put`, or what became of it."""
    session: SessionEntry | None = None


class Happening(Model):
    """One thing that happened to the sessions that the reader may see."""

    id: str
    kind: Literal["session", "execution", "question", "usage", "reset"]
    state: str = ""
    session_id: str = ""
    execution_id: str = ""
    at: str = ""


# Cursors


def cursor_of(place: str) -> str:
    """Return the cursor for a place in a list."""
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def place_of(cursor: str) -> str:
    """Return the place of a cursor, or refuse one that no list of ours gave."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        raise InvalidArgument(
            f"cursor {cursor[:64]!r} is none that a list gave", hint="Pass the `next` of the page before, unchanged"
        ) from None


NotebookForm = Literal["ipynb", "html", "py", "md"]


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to list."""

    state: str = ""
    owner: str = ""
    text: str = ""


class Monitor(Protocol):
    """All that is shown of sessions and may be done with them. Every method raises what `errors.py` has."""

    # Looking

    async def health(self, access: Access) -> Health:
        """Return whether sessions can be started, and what is open."""
        ...

    async def usage(self, access: Access) -> UsageHistory:
        """Return what the sessions that the caller may see used over the last 15 minutes."""
        ...

    async def sessions(
        self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50
    ) -> EntryPage[SessionEntry]:
        """List sessions, newest first."""
        ...

    async def session(self, access: Access, session_id: str) -> SessionDetail:
        """Return one session."""
        ...

    async def executions(
        self, access: Access, session_id: str, cursor: str = "", limit: int = 50
    ) -> EntryPage[ExecutionEntry]:
        """List executions of a session, newest first."""
        ...

    async def blocks(self, access: Access, session_id: str, size: int) -> list[str]:
        """Return the cursors with which `executions` gives each further `size` of them, the latest first."""
        ...

    async def execution(self, access: Access, execution_id: str) -> ExecutionEntry:
        """Return one execution."""
        ...

    async def result(self, access: Access, execution_id: str) -> ExecutionResult:
        """Return the result that the client of an execution got, or what there is of it so far."""
        ...

    async def output(
        self, access: Access, execution_id: str, since: int = 0, limit: int = 500
    ) -> tuple[list[OutputEvent], bool]:
        """Return output events after number `since`, within `BATCH_BYTES`, and whether there are more."""
        ...

    async def excerpt(
        self, access: Access, execution_id: str, upto: int = 0, chars: int = STREAM_CHARS
    ) -> list[OutputEvent]:
        """Return the output of an execution up to an event, head and tail of its text within `chars`."""
        ...

    async def event(self, access: Access, execution_id: str, sequence: int) -> OutputEvent:
        """Return one output event."""
        ...

    async def lines(self, access: Access, execution_id: str, first: int, count: int, search: str = "") -> OutputLines:
        """Return some lines of the printed output of an execution."""
        ...

    async def display(self, access: Access, execution_id: str, name: str) -> bytes:
        """Return the file of one display."""
        ...

    async def calls(self, access: Access, execution_id: str) -> list[CallEntry]:
        """Return the tool calls of an execution in the order that they started."""
        ...

    async def decisions(self, access: Access, *, execution_id: str = "", limit: int = 50) -> list[dict[str, JsonValue]]:
        """Return decisions of the policy, newest first."""
        ...

    async def notebook(self, access: Access, session_id: str, form: NotebookForm) -> bytes:
        """Return all executions of a session as a file."""
        ...

    async def files(self, access: Access, session_id: str, path: str = "", after: str = "") -> FileListing:
        """List what is right in a folder of a session."""
        ...

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """Return a part of a file of a session, `length` bytes or less."""
        ...

    async def complete(self, access: Access, session_id: str, code: str, cursor: int) -> NameCompletion:
        """Return the names that fit at a place in code; none while the session is busy or not live."""
        ...

    async def variables(self, access: Access, session_id: str, offset: int = 0, limit: int = 500) -> "VariableList":
        """Return variables of a session. A busy or sleeping one tells the names on record."""
        ...

    async def rows(
        self,
        access: Access,
        session_id: str,
        name: str,
        *,
        offset: int = 0,
        limit: int = 100,
        first_column: int = 0,
        columns: int = 30,
        order: str = "",
    ) -> "TableRows":
        """Return rows of a variable; `order` is POSITION:asc or POSITION:desc of a column. `Busy` while a cell runs."""
        ...

    async def packages(self, access: Access, session_id: str) -> "PackageList":
        """Return the packages that a session's code can import."""
        ...

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """Return the questions that wait for a person, or those that were answered."""
        ...

    # What happens

    def happenings(self, access: Access, after: str = "") -> AsyncGenerator[Happening]:
        """Yield what happens to sessions after a place; without one, from now on."""
        ...

    def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """Yield the cells of a session and their output after a place, as they come; without one, from the first."""
        ...

    # Acting

    async def create(self, access: Access, environment: str = "", reason: str = "") -> SessionEntry:
        """Open a session of the caller's own."""
        ...

    async def run_cell(
        self, access: Access, session_id: str, code: str, timeout_s: float | None = None, key: str = ""
    ) -> str:
        """Queue a cell under the caller's name; return its execution id."""
        ...

    async def install(self, access: Access, session_id: str, requirements: list[str]) -> str:
        """Queue a cell under the caller's name that installs packages; return its execution id."""
        ...

    async def interrupt(self, access: Access, session_id: str) -> list[str]:
        """Stop what runs or waits in a session; return the executions."""
        ...

    async def fork(self, access: Access, session_id: str, at: str = "") -> SessionFork:
        """Fork a session; the fork belongs to the owner of its origin."""
        ...

    async def rewind(self, access: Access, session_id: str, to: str) -> Rewinding:
        """Rewind a session to before an execution."""
        ...

    async def end(self, access: Access, session_id: str) -> None:
        """End a session and delete all of it."""
        ...

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """Write a file into the folder of a session."""
        ...

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """Delete a file of a session."""
        ...

    async def answer(
        self, access: Access, question_id: str, action: Literal["accept", "decline"], values: dict[str, JsonValue]
    ) -> InboxQuestion:
        """Answer a question that waits; `QuestionClosed` says who was first."""
        ...

    async def note_presence(self, access: Access) -> None:
        """Note that somebody who may answer questions looks on."""
        ...


__all__ = [
    "Access",
    "CallEntry",
    "EntryPage",
    "ExecutionEntry",
    "Followed",
    "Happening",
    "Health",
    "InboxQuestion",
    "Monitor",
    "OutputLines",
    "SessionDetail",
    "SessionEntry",
    "SessionFilter",
    "ToolCall",
]
