"""What is shown of sessions and of what happens in them: the JSON of the HTTP API, and what the console's pages get."""

from typing import Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue

from belljar.kernels.variables import ColumnKind, ColumnSummary
from belljar.models import ExecutionResult, FileReference, Model, OutputEvent, SessionInfo, SessionNotice, Status, Usage

MAX_LISTED = 1_000
"""The most variables of one page."""
MAX_REQUIREMENTS = 50
"""The most packages of one installation."""
MAX_PIECE_KEY_CHARS = 180
UNFINISHED = ("queued", "running")
"""The states of an execution that has not ended."""

SessionState = Literal["waiting", "running", "idle", "fresh", "asleep", "gone"]
"""`waiting`: for a person's answer, whether a cell of it asks or the run of a workflow that it belongs to."""
ExecutionState = Literal["queued"] | Status
Item = TypeVar("Item")


class LiveSession(SessionInfo):
    """A session that is open on a server, as its owner sees it, and who that is."""

    principal: str


class ConsoleLink(Model):
    """Where the console of a server is; both are empty where it has none."""

    url: str = ""
    link: str = ""
    """The same with a token that signs in once; empty where the server gives no links."""


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


class FoundPiece(Model):
    """A piece of a text, and whether it is what was looked for."""

    text: str
    is_match: bool = False


class FoundCell(Model):
    """A cell that has what was looked for, with an excerpt of its code, of its output or of both."""

    execution_id: str
    session_id: str
    session_name: str
    """The reason of the session, or the first telling line of its first cell."""
    owner: str
    submitted_at: str
    is_undone: bool = False
    code: list[FoundPiece] = []
    output: list[FoundPiece] = []
    cursor: str
    """What to pass as `cursor` for those before it."""


class FoundPage(EntryPage[FoundCell]):
    """A part of what was found. `unread` cells are not searched yet: the same search again goes on with them."""

    unread: int = 0


class RunningCell(Model):
    """The cell that a session runs now."""

    execution_id: str
    first_line: str
    """Its first line that is no import and no comment, where it has one."""
    since: str
    running_s: float


class AskedPerson(Model):
    """The first of the questions to a person that a session waits with."""

    question_id: str
    title: str
    put_at: str = ""
    expires_at: str = ""


class SessionEntry(Model):
    """A session in a list."""

    session_id: str
    owner: str
    environment: str
    state: SessionState
    reason: str = ""
    server: str = ""
    created_at: str
    cursor: str = ""
    """What to pass as `cursor` for those after it in the list."""
    last_used_at: str
    expires_at: str = ""
    executions: int = 0
    first_line: str = ""
    """The first line of its first cell that is no import and no comment: its name, where it has no reason."""
    last_line: str = ""
    """The same of its latest cell."""
    checkpoints: int = 0
    memory_mb: float = 0.0
    cpu_percent: float = 0.0
    memory_history: list[float] = []
    """Resident memory in megabytes over the last minutes, oldest first."""
    cpu_history: list[float] = []
    last_status: ExecutionState | None = None
    last_error: str = ""
    """What its latest cell failed with, if it did."""
    last_cause: str = ""
    """The latest limit, timeout, interrupt or death; of a session that is not live, why it ended."""
    now: RunningCell | None = None
    asks: AskedPerson | None = None
    rewindable: list[str] = []
    """The executions before which a state of the session is held, oldest first."""


class SessionPage(EntryPage[SessionEntry]):
    """A part of the list of sessions. `after` is what to pass on to hear of everything that changes from then on."""

    after: str = ""


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
    undone_at: str | None = None
    """When its session was rewound to before it; the same for all that one rewind undid."""
    is_dropped: bool = False
    """Whether its output was dropped because the journal was full."""
    output_bytes: int = 0
    events: int = 0
    """The number of its latest output event; 0 while it runs."""
    cursor: str = ""
    """What to pass as `cursor` for those before it in the list of its session."""


class Submitted(Model):
    """A cell that was accepted."""

    execution_id: str
    session_id: str
    progress: "ExecutionProgress | None" = None
    """How far it was when its caller had waited as long as asked."""


class Piece(Model):
    """One piece of code of a map. Under one key it runs once, whoever asks again, and gives the same result."""

    code: str
    key: str = Field(default="", max_length=MAX_PIECE_KEY_CHARS)


class ClientQuestion(Model):
    """What the client of an execution is asked."""

    number: int
    """Its number among the questions of the execution, from 1 on."""
    message: str
    fields: dict[str, JsonValue] = {}
    """A JSON Schema of the answer; empty for plain consent."""
    url: str = ""
    """An address that the person should open first."""
    is_password: bool = False


class ExecutionProgress(Model):
    """How far an execution is."""

    status: ExecutionState
    sequence: int = 0
    """The number of its latest output event."""
    progress: str = ""
    """The latest of its text, or of what a tool that it calls says."""
    question: ClientQuestion | None = None
    result: ExecutionResult | None = None
    """None while it runs."""


class Installation(Model):
    """What came of an installation."""

    packages: list[dict[str, JsonValue]]
    """Of each requirement its version, or why it has none."""
    restart_needed: list[str] = []
    """Packages that changed although the session has imported them."""
    pinned: list[str] = []
    """All that was installed, as an installer takes it."""


class ProgressStep(Model):
    """A step of what takes long: with `stage`, what it is busy with; the last one has what came of it."""

    kind: Literal["stage", "done"]
    text: str = ""
    """With `done`, what a new session still waits for."""
    session: SessionInfo | None = None
    notice: SessionNotice | None = None
    """What a client is told once about a new session."""
    installation: Installation | None = None


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
    rest: int = 0
    """How many more files and folders were seen."""


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
    """Sessions that run, are idle or fresh, executions that wait for their turn, memory in megabytes, and the share of
    a processor in percent; for operators the cells and tool calls a minute and how long a cell took on average, too.
    """


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


class ServerEvent(Model):
    """One thing that happened to the sessions that the reader may see."""

    id: str
    kind: Literal["session", "execution", "question", "usage", "reset"]
    state: str = ""
    session_id: str = ""
    execution_id: str = ""
    at: str = ""


# What the code of a session has at hand

VariablesState = Literal["live", "busy", "asleep", "not started", "names only", "withheld", "gone"]
"""`live`: told by the kernel now. Otherwise there are names at most, and `note` says why."""


class VariableEntry(Model):
    """One variable. Of names that the journal has, nothing else is known."""

    name: str
    type: str = ""
    length: int | None = None
    shape: list[int] | None = None
    size_bytes: int | None = None
    """The memory of it alone, without that of objects it refers to; null where its class would have to be asked."""
    value: str | None = None
    """The value of texts, numbers, True, False and None, at most 200 characters; null for other types."""
    is_cut: bool = False
    has_rows: bool = False


class VariableList(Model):
    """The variables of a session in the order in which they were made. `next` is the `offset` of those that follow."""

    state: VariablesState
    note: str = ""
    items: list[VariableEntry]
    total: int
    next: int | None = None


class TableColumnInfo(Model):
    """One column. `position` is what `order` takes."""

    position: int
    name: str
    kind: ColumnKind
    dtype: str
    summary: ColumnSummary | None = None
    """What it holds, where that was asked for and could be read in time."""


class TableRows(Model):
    """Some rows and columns of a variable, as texts; null is a missing value. `next` is the `offset` that follows."""

    name: str
    type: str
    total_rows: int
    total_columns: int
    offset: int
    order: str = ""
    matching: int = 0
    """How many rows fit `where`; all, where nothing is looked for."""
    columns: list[TableColumnInfo]
    labels: list[str]
    """The labels of the rows: of frames and series their index, of others the number of the row."""
    rows: list[list[str | None]]
    next: int | None = None


class PackageEntry(Model):
    """A package that code of the session can import. Those of the session itself come before the environment's."""

    name: str
    version: str
    origin: Literal["session", "environment"]


class PackageList(Model):
    """The packages of a session. `pins` are those installed for it, as an installer takes them."""

    environment: str
    python: str = ""
    """The version of its Python; empty while that is not known."""
    items: list[PackageEntry]
    pins: list[str]
    note: str = ""
