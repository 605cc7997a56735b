"""The wire: each verb of the engine as a request of the HTTP API, in one table.

The API's routes and its OpenAPI document are made of it (`http/api.py`), and so is the engine of another process
(`remote.py`). Names in a request are those of the verb's arguments, unless the table says otherwise.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal

from pydantic import Field, JsonValue

from belljar.engine import models
from belljar.engine.contract import (
    MAX_COMPLETED_CHARS,
    MAX_FORKS,
    MAX_ITEMS,
    MAX_PIECES,
    MAX_WAIT_S,
    STREAM_CHARS,
    Asks,
)
from belljar.engine.runs import MAX_STEPS_SHOWN, RunActs, RunDetail, RunEntry
from belljar.errors import InvalidArgument
from belljar.kernels.variables import MAX_COLUMNS, MAX_ROWS
from belljar.models import (
    MAX_GPUS,
    MAX_REASON_CHARS,
    ExecutionResult,
    MappedResult,
    Model,
    OutputEvent,
    Rewinding,
    SessionFork,
)
from belljar.questions.models import MAX_EDITED_CHARS, MAX_SAID_CHARS, InboxQuestion

PREFIX: Final = "/api/v1"
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
STREAM: Final = "text/event-stream"
NOTEBOOKS: Final = "application/x-ipynb+json, text/html, text/x-python, text/markdown"
IN_PATH: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
"""An argument in a path, with the form that the routes of Starlette give it."""
MAX_MAP_BYTES: Final = 32 * 1024 * 1024
_SESSION: Final = "/sessions/{session_id}"
_EXECUTION: Final = "/executions/{execution_id}"


# What requests say


class NewSession(Model):
    """A session to open."""

    environment: str = ""
    reason: str = Field("", max_length=MAX_REASON_CHARS)
    gpus: int | None = Field(None, ge=0, le=MAX_GPUS)


class SessionReason(Model):
    """What a session is for, by which lists name it; empty for none."""

    reason: str = Field(max_length=MAX_REASON_CHARS)


class StartedSession(NewSession):
    """A session to open with its kernel."""

    patience_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class FileName(Model):
    """A file, and the name that it gets."""

    name: str = Field(min_length=1, max_length=4_096)
    to: str = Field(min_length=1, max_length=4_096)


class NewCell(Model):
    """A cell to run."""

    code: str
    timeout_s: float | None = Field(None, gt=0)
    filename: str = ""
    asks: Asks = "inbox"
    client: str = ""
    keeps_files: bool = False
    wait_s: float = Field(0, ge=0, le=MAX_WAIT_S)


class WaitRequest(Model):
    """What of an execution to wait for beside its end, and how long."""

    since: int | None = Field(None, ge=0)
    asked: int | None = Field(None, ge=0)
    wait_s: float = Field(MAX_WAIT_S, ge=0, le=MAX_WAIT_S)


class ClientReply(Model):
    """The answer of a client to question `number` of its execution."""

    number: int
    action: Literal["accept", "decline", "cancel"]
    values: dict[str, JsonValue] = {}


class InterruptRequest(Model):
    """On whose behalf it is stopped, and whether to wait for its end."""

    why: str = Field("", max_length=MAX_REASON_CHARS)
    waits: bool = True


class NewPackages(Model):
    """Packages to install: names with an optional version, like pandas>=2."""

    packages: list[str] = Field(min_length=1, max_length=models.MAX_REQUIREMENTS)


class CompletionRequest(Model):
    """Code that somebody types, and where in it they are, in characters."""

    code: str = Field(max_length=MAX_COMPLETED_CHARS)
    cursor: int = Field(ge=0)


class ForkRequest(Model):
    """Where to fork a session, before the execution `at` or where it is now, and how many times."""

    at: str | int = ""
    reseed: bool = False
    count: int = Field(1, ge=1, le=MAX_FORKS)


class MapRequest(Model):
    """Pieces of code, each for a fork of its own or a new session, and how many of them run together."""

    pieces: list[models.Piece] = Field(min_length=1, max_length=MAX_PIECES)
    environment: str = ""
    at_once: int = Field(16, ge=1, le=MAX_FORKS)
    timeout_s: float | None = Field(None, gt=0)
    in_order: bool = False
    keeps: bool = False
    reseed: bool = False
    retries_lost: bool = False


class RewindRequest(Model):
    """The execution before which the session goes on."""

    to: str | int


class RunSteering(Model):
    """What to do with a run of a workflow."""

    act: RunActs


class QuestionAnswer(Model):
    """The answer to a question; `edited` is allowed in place of what was asked about, `said` is told to the agent."""

    action: Literal["accept", "decline"]
    values: dict[str, JsonValue] = {}
    edited: str = Field("", max_length=MAX_EDITED_CHARS)
    said: str = Field("", max_length=MAX_SAID_CHARS)


# What answers say that is no model of its own


class Installing(Model):
    """The cell that installs packages. Its output and its end are events of the session."""

    execution_id: str


class InterruptedList(Model):
    """The executions that were stopped."""

    interrupted: list[str]


class Items(Model, Generic[models.Item]):
    """A whole list."""

    items: list[models.Item]


class EventPage(Model):
    """Output events in order."""

    items: list[OutputEvent]
    next: int | None = None
    """What to pass as `since` for those that follow; null when there are no more yet."""


class ProblemDetail(Model):
    """What is wrong, and what to do about it."""

    code: str
    message: str
    hint: str = ""


class ApiProblem(Model):
    """The answer to a request that was refused."""

    error: ProblemDetail


# The table


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter in the query of an operation."""

    meaning: str
    default: str | int = ""
    least: int = 0
    most: int = 2**31
    argument: str = ""
    """The verb's argument, where it has another name."""

    def read(self, name: str, text: str | None) -> str | int:
        """Return the value, or refuse one of another form."""
        if text is None or (text == "" and isinstance(self.default, int)):
            return self.default
        if isinstance(self.default, str):
            return text
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or not self.least <= int(text) <= self.most:
            raise InvalidArgument(
                f"{name} is {text[:64]!r}", hint=f"Pass a whole number from {self.least} to {self.most}"
            )
        return int(text)

    @property
    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        if isinstance(self.default, str):
            return {"type": "string", "default": self.default}
        return {"type": "integer", "default": self.default, "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table."""

    verb: str
    """The method of the engine that answers."""
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    summary: str
    answer: type[Model] | None = None
    query: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    body: type[Model] | None = None
    status: int = 200
    media: str = JSON
    item: type[Model] | None = None
    """What a stream consists of; its kind and its id are the event's."""
    most_bytes: int = 4 * 1024 * 1024
    """The largest body that it takes."""
    wrapped: str = ""
    """The field of the answer that has what the verb returns; empty where that is the answer itself, or its items."""
    tool: str = ""
    """The MCP tool that does the same with the same arguments, for those who reach a server by MCP alone."""
    tool_answers: bool = True
    """Whether the tool answers with `answer` too; one that tells less is only called."""

    @property
    def returned(self) -> str:
        """Return the field of the answer that has what the verb returns; empty where that is the answer itself."""
        return "items" if self.answer is not None and issubclass(self.answer, Items) else self.wrapped

    @property
    def names_in_path(self) -> list[str]:
        """Return the arguments that the path names."""
        return IN_PATH.findall(self.path)


LIMIT: Final = Parameter("How many items at most", 50, 1, MAX_ITEMS)
CURSOR: Final = Parameter("The `next` of the page before")
_AFTER: Final = Parameter("The id of the last event that the reader has")

OPERATIONS: Final = (
    Operation("servers", "GET", "/servers", "The servers of the data directory", Items[models.Server]),
    Operation("health", "GET", "/health", "Checks and gauges", models.Health),
    Operation(
        "console_link",
        "POST",
        "/console-link",
        "A link that signs in to the console once; on the server's own socket only",
        models.ConsoleLink,
    ),
    Operation("usage", "GET", "/usage", "What sessions used in the last 15 minutes", models.UsageHistory),
    Operation(
        "sessions",
        "GET",
        "/sessions",
        "Sessions, newest first",
        models.SessionPage,
        {
            "state": Parameter("running, idle, fresh, asleep or gone"),
            "owner": Parameter("Of this owner only; for operators"),
            "q": Parameter("Text in id, reason, environment or owner", argument="text"),
            "cursor": CURSOR,
            "limit": LIMIT,
        },
    ),
    Operation(
        "search",
        "GET",
        "/search",
        "Cells whose code or output has a text, the latest first",
        models.FoundPage,
        {"q": Parameter("Words, or text in double quotes", argument="text"), "cursor": CURSOR, "limit": LIMIT},
    ),
    Operation(
        "live_sessions",
        "GET",
        "/live-sessions",
        "Those that are open now, in full",
        Items[models.LiveSession],
        {"asleep": Parameter("1: the caller's own too that are only on disk", 0, 0, 1)},
    ),
    Operation("create", "POST", "/sessions", "Open a session", models.SessionEntry, body=NewSession, status=201),
    Operation(
        "open_session",
        "POST",
        "/open-session",
        "Open a session and start its kernel: a stream of its stages",
        body=StartedSession,
        media=STREAM,
        item=models.ProgressStep,
    ),
    Operation("session", "GET", _SESSION, "One session", models.SessionDetail),
    Operation(
        "rename",
        "POST",
        f"{_SESSION}/rename",
        "Change its reason",
        models.SessionEntry,
        body=SessionReason,
        tool="rename_session",
        tool_answers=False,
    ),
    Operation("end", "DELETE", _SESSION, "End a session and delete all of it", status=204, tool="clear_session"),
    Operation(
        "executions",
        "GET",
        f"{_SESSION}/executions",
        "Executions, newest first, without output",
        models.EntryPage[models.ExecutionEntry],
        {"cursor": CURSOR, "limit": LIMIT},
    ),
    Operation(
        "blocks",
        "GET",
        f"{_SESSION}/blocks",
        "Cursors of the further pages of its executions, the latest first",
        Items[str],
        {"size": Parameter("How many executions a page has", 50, 1, MAX_ITEMS)},
    ),
    Operation(
        "submit",
        "POST",
        f"{_SESSION}/executions",
        "Run a cell; with the header Idempotency-Key, once",
        models.Submitted,
        body=NewCell,
        status=202,
    ),
    Operation(
        "submit", "POST", "/executions", "Run a cell in a new session", models.Submitted, body=NewCell, status=202
    ),
    Operation(
        "complete",
        "POST",
        f"{_SESSION}/complete",
        "Names that fit at a place in code; none while the session is busy or asleep",
        models.NameCompletion,
        body=CompletionRequest,
    ),
    Operation(
        "interrupt",
        "POST",
        f"{_SESSION}/interrupt",
        "Stop what runs and waits",
        InterruptedList,
        body=InterruptRequest,
        wrapped="interrupted",
    ),
    Operation("fork", "POST", f"{_SESSION}/fork", "Fork it", SessionFork, body=ForkRequest, status=201),
    Operation(
        "map",
        "POST",
        f"{_SESSION}/map",
        "Run pieces of code, each in a fork of its own: a stream of their results",
        body=MapRequest,
        media=STREAM,
        item=MappedResult,
        most_bytes=MAX_MAP_BYTES,
    ),
    Operation(
        "map",
        "POST",
        "/map",
        "Run pieces of code, each in a new session: a stream of their results",
        body=MapRequest,
        media=STREAM,
        item=MappedResult,
        most_bytes=MAX_MAP_BYTES,
    ),
    Operation(
        "rewind", "POST", f"{_SESSION}/rewind", "Rewind it", Rewinding, body=RewindRequest, tool="rewind_session"
    ),
    Operation(
        "files",
        "GET",
        f"{_SESSION}/files",
        "Files and folders in a folder, by name",
        models.FileListing,
        {
            "path": Parameter("A folder"),
            "after": Parameter("A name"),
            "recursive": Parameter("1: all files in and below it", 0, 0, 1),
        },
    ),
    Operation("read_part", "GET", f"{_SESSION}/files/{{name:path}}", "A file", media=BYTES),
    Operation("write_file", "PUT", f"{_SESSION}/files/{{name:path}}", "Write a file", status=204),
    Operation("rename_file", "POST", f"{_SESSION}/rename-file", "Give a file another name", body=FileName, status=204),
    Operation("delete_file", "DELETE", f"{_SESSION}/files/{{name:path}}", "Delete a file", status=204),
    Operation(
        "variables",
        "GET",
        f"{_SESSION}/variables",
        "Its variables; while it is busy or asleep, their names",
        models.VariableList,
        {"offset": Parameter("After so many", 0), "limit": Parameter("How many", 500, 1, models.MAX_LISTED)},
    ),
    Operation(
        "rows",
        "GET",
        f"{_SESSION}/variables/{{name:path}}/rows",
        "Rows of a DataFrame, a Series, an array or a list of dictionaries",
        models.TableRows,
        {
            "offset": Parameter("After so many rows", 0),
            "limit": Parameter("How many rows", 100, 1, MAX_ROWS),
            "order": Parameter("POSITION:asc or POSITION:desc of the column to sort by"),
            "where": Parameter("POSITION:TEXT or any:TEXT, rows whose cells contain it, or compare: `2:>= 10`"),
            "summaries": Parameter("1: what each column holds", 0, 0, 1),
            "columns": Parameter(f"FIRST:LAST, the positions of columns; {MAX_COLUMNS} at most", "0:30"),
        },
    ),
    Operation("packages", "GET", f"{_SESSION}/packages", "What its code can import", models.PackageList),
    Operation(
        "install",
        "POST",
        f"{_SESSION}/install",
        "Install packages: a stream of its stages",
        body=NewPackages,
        media=STREAM,
        item=models.ProgressStep,
    ),
    Operation(
        "queue_install",
        "POST",
        f"{_SESSION}/packages",
        "Install packages by a cell",
        Installing,
        body=NewPackages,
        status=202,
        wrapped="execution_id",
    ),
    Operation("notebook", "GET", f"{_SESSION}/notebook.{{form}}", "As ipynb, html, py or md", media=NOTEBOOKS),
    Operation(
        "follow",
        "GET",
        f"{_SESSION}/events",
        "Cells and output as they come",
        query={"after": _AFTER},
        media=STREAM,
        item=models.Followed,
    ),
    Operation("execution", "GET", _EXECUTION, "One execution, without output", models.ExecutionEntry),
    Operation(
        "result",
        "GET",
        f"{_EXECUTION}/result",
        "What its client was told",
        ExecutionResult,
        {"since": Parameter("Of its output only what came after this event", 0)},
    ),
    Operation(
        "wait",
        "POST",
        f"{_EXECUTION}/wait",
        "How far it is, once it has ended or has news",
        models.ExecutionProgress,
        body=WaitRequest,
    ),
    Operation("reply", "POST", f"{_EXECUTION}/reply", "Answer it as its client", body=ClientReply, status=204),
    Operation(
        "interrupt",
        "POST",
        f"{_EXECUTION}/interrupt",
        "Stop it",
        InterruptedList,
        body=InterruptRequest,
        wrapped="interrupted",
    ),
    Operation(
        "output",
        "GET",
        f"{_EXECUTION}/events",
        "Output events",
        EventPage,
        {"since": Parameter("After this number", 0), "limit": Parameter("How many", 500, 1, 500)},
    ),
    Operation("event", "GET", f"{_EXECUTION}/events/{{sequence:int}}", "One output event", OutputEvent),
    Operation(
        "excerpt",
        "GET",
        f"{_EXECUTION}/excerpt",
        "Its output, head and tail of the text",
        Items[OutputEvent],
        {
            "upto": Parameter("Up to this number of an event; 0 for all", 0),
            "chars": Parameter("How many characters of text", STREAM_CHARS, 1, 1_000_000),
        },
    ),
    Operation(
        "lines",
        "GET",
        f"{_EXECUTION}/lines",
        "Lines of its printed output",
        models.OutputLines,
        {
            "first": Parameter("The first line", 1, 1),
            "count": Parameter("How many", 200, 1, 1_000),
            "q": Parameter("Text to look for", argument="search"),
        },
    ),
    Operation("calls", "GET", f"{_EXECUTION}/calls", "Its tool calls", Items[models.CallEntry]),
    Operation("decisions", "GET", f"{_EXECUTION}/decisions", "The policy's decisions", Items[dict[str, JsonValue]]),
    Operation("display", "GET", f"{_EXECUTION}/displays/{{name}}", "The file of a display", media=BYTES),
    Operation(
        "decisions",
        "GET",
        "/decisions",
        "The policy's decisions, newest first",
        Items[dict[str, JsonValue]],
        {"limit": LIMIT},
    ),
    Operation(
        "questions",
        "GET",
        "/questions",
        "Questions to a person",
        Items[InboxQuestion],
        {"state": Parameter("waiting or ended", "waiting")},
    ),
    Operation("answer", "POST", "/questions/{question_id:path}", "Answer one", InboxQuestion, body=QuestionAnswer),
    Operation(
        "runs",
        "GET",
        "/runs",
        "Runs of workflows, newest first",
        models.EntryPage[RunEntry],
        {
            "state": Parameter("running, waiting, interrupted, done, failed or stopped"),
            "q": Parameter("Text in id, name or owner", argument="text"),
            "cursor": CURSOR,
            "limit": LIMIT,
        },
    ),
    Operation(
        "run",
        "GET",
        "/runs/{run_id}",
        "One run, with its graph and a part of its steps",
        RunDetail,
        {
            "node": Parameter("Only steps that are rounds of this one of the workflow"),
            "offset": Parameter("After so many steps", 0),
            "limit": Parameter("How many steps", 50, 1, MAX_STEPS_SHOWN),
        },
    ),
    Operation("steer_run", "POST", "/runs/{run_id}", "Go on with it, or stop it", body=RunSteering, status=204),
    Operation("note_presence", "POST", "/presence", "Say that somebody who may answer questions is there", status=204),
    Operation(
        "server_events",
        "GET",
        "/events",
        "What happens to sessions",
        query={"after": _AFTER},
        media=STREAM,
        item=models.ServerEvent,
    ),
)
