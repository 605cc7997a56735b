"""The contract between those who use sessions (tools, the HTTP API, the console) and where the sessions are.

`Access` says who asks, and the implementation decides: a session or an execution of another owner is answered exactly
as an unknown one. Reading never wakes a session, marks it as used or keeps it open. `models.py` has what is returned.
"""

import base64
import binascii
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from pydantic import JsonValue

from belljar.engine.models import (
    CallEntry,
    ConsoleLink,
    EntryPage,
    ExecutionEntry,
    ExecutionProgress,
    FileListing,
    FilePart,
    Followed,
    FoundPage,
    Health,
    LiveSession,
    NameCompletion,
    OutputLines,
    PackageList,
    Piece,
    ProgressStep,
    Server,
    ServerEvent,
    SessionDetail,
    SessionEntry,
    SessionPage,
    Submitted,
    TableRows,
    UsageHistory,
    VariableList,
)
from belljar.engine.runs import RunActs, RunDetail, RunEntry
from belljar.errors import InvalidArgument
from belljar.models import ExecutionResult, MappedResult, OutputEvent, Rewinding, SessionFork
from belljar.outputs.export_formats import ExportFormat
from belljar.questions.models import InboxQuestion

if TYPE_CHECKING:
    from belljar.engine.attachment_messages import AttachedSession

MAX_ITEMS = 200
"""The most items of one page of a list."""
STREAM_CHARS = 20_000
"""So much text of a running cell goes through a stream; then the number of its lines, and the last of them."""
TAIL_LINES = 50
MAX_COMPLETED_CHARS = 100_000
"""The most code that names are looked for in."""
MAX_MATCHES = 200
MAX_PART_BYTES = 4 * 1024 * 1024
"""The largest part of a file that is read at once."""
MAX_FORKS = 256
"""The most forks of one call."""
MAX_PIECES = 10_000
"""The most pieces of one map."""
MAX_WAIT_S = 300.0
"""How long one call waits for an execution at most; its caller may call again."""
BATCH_BYTES = 64 * 1024
BATCH_INTERVAL_S = 0.05


Asks = Literal["client", "inbox", "nobody"]
"""Who answers the questions of a cell: the caller, by `reply`, or people at the inbox; else people or nobody."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who asks: an owner sees their own sessions, an operator those of all owners."""

    principal: str
    is_operator: bool = False
    name: str = ""
    """What the journal calls them when they act in a session of somebody else."""
    via: Literal["client", "console", "terminal"] = "console"
    """Where they answer questions; a client, which acts for its owner, is told in its own words what it cannot have."""

    def may_see(self, owner: str) -> bool:
        """Return whether a session of this owner is visible to them."""
        return self.is_operator or owner == self.principal


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


def time_cursor(made_at: float, identifier: str) -> str:
    """Return the cursor for the sessions or runs that were made before this one."""
    return cursor_of(f"{made_at!r} {identifier}")


def time_place(cursor: str) -> tuple[float, str]:
    """Return the place of such a cursor; lists have the greatest first, which is what was made last."""
    made_at, _, identifier = place_of(cursor).partition(" ")
    try:
        return float(made_at), identifier
    except ValueError:
        raise InvalidArgument("the cursor is none that this list gave", hint="Pass `next` unchanged") from None


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to list."""

    state: str = ""
    owner: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class MapOptions:
    """How the pieces of a map are run; see `Engine.map`."""

    environment: str = ""
    at_once: int = 16
    timeout_s: float | None = None
    in_order: bool = False
    keeps: bool = False
    reseed: bool = False
    retries_lost: bool = False


USUAL_MAP = MapOptions()


class Engine(Protocol):
    """All that is shown of sessions and may be done with them. Every method raises what `errors.py` has."""

    # Looking

    async def health(self, access: Access) -> Health:
        """Return whether sessions can be started, and what is open."""
        ...

    async def servers(self, access: Access) -> list[Server]:
        """Return this server, and for operators the others of its data directory."""
        ...

    async def console_link(self, access: Access) -> ConsoleLink:
        """Return where the console is, with a link that signs in once, for operators at a terminal of the server."""
        ...

    async def usage(self, access: Access) -> UsageHistory:
        """Return what the sessions that the caller may see used over the last 15 minutes."""
        ...

    async def sessions(self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50) -> SessionPage:
        """List sessions, newest first."""
        ...

    async def search(self, access: Access, text: str, cursor: str = "", limit: int = 50) -> FoundPage:
        """Return the cells whose code or output has all words of a text, those of all sessions, the latest first.

        Words are beginnings of words, in any case; what stands in double quotes has to occur as it is.
        """
        ...

    async def live_sessions(self, access: Access, *, asleep: bool = False) -> list[LiveSession]:
        """Return the sessions that are open now, as `list_sessions` tells their owners; with `asleep` the caller's
        own too that are only on disk.
        """
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

    async def result(self, access: Access, execution_id: str, since: int = 0) -> ExecutionResult:
        """Return the result that the client of an execution got, or what there is of it so far.

        With `since`, of its output only what came after that event.
        """
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

    async def notebook(self, access: Access, session_id: str, form: ExportFormat) -> bytes:
        """Return all executions of a session as a file."""
        ...

    async def files(
        self, access: Access, session_id: str, path: str = "", after: str = "", *, recursive: bool = False
    ) -> FileListing:
        """List what is right in a folder of a session, or all files in and below it."""
        ...

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """Return a part of a file of a session, `length` bytes or less."""
        ...

    async def complete(self, access: Access, session_id: str, code: str, cursor: int) -> NameCompletion:
        """Return the names that fit at a place in code; none while the session is busy or not live."""
        ...

    async def variables(self, access: Access, session_id: str, offset: int = 0, limit: int = 500) -> VariableList:
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
        where: str = "",
        summaries: int = 0,
    ) -> TableRows:
        """Return rows of a variable; `order` is POSITION:asc or POSITION:desc of a column. `Busy` while a cell runs.

        `where` is POSITION:TEXT, or any:TEXT for any column of the part: what its cells contain, or a comparison such
        as `>= 10`. With `summaries` it is told what the columns hold.
        """
        ...

    async def packages(self, access: Access, session_id: str) -> PackageList:
        """Return the packages that a session's code can import."""
        ...

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """Return the questions that wait for a person, or those that were answered."""
        ...

    async def runs(
        self, access: Access, state: str = "", text: str = "", cursor: str = "", limit: int = 50
    ) -> EntryPage[RunEntry]:
        """List runs of workflows, newest first; none where there are no workflows."""
        ...

    async def run(self, access: Access, run_id: str, node: str = "", offset: int = 0, limit: int = 50) -> RunDetail:
        """Return one run with a part of its steps; with `node`, of those that are rounds of it."""
        ...

    # What happens

    def server_events(self, access: Access, after: str = "") -> AsyncGenerator[ServerEvent]:
        """Yield what happens to sessions after a place; without one, from now on."""
        ...

    def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """Yield the cells of a session and their output after a place, as they come; without one, from the first."""
        ...

    async def attach(self, access: Access, session_id: str = "", environment: str = "") -> "AttachedSession":
        """Attach to a session that is open, as a front end of a person who runs cells in it and answers them.

        Without a session, open one for it: a Jupyter kernel's, which its caller ends. Attaching keeps it in use.
        """
        ...

    # Acting

    async def create(
        self, access: Access, environment: str = "", reason: str = "", gpus: int | None = None
    ) -> SessionEntry:
        """Make a session of the caller's own; its kernel starts with its first cell. `gpus` None: the usual number."""
        ...

    def open_session(
        self,
        access: Access,
        environment: str = "",
        reason: str = "",
        gpus: int | None = None,
        patience_s: float | None = None,
    ) -> AsyncGenerator[ProgressStep]:
        """Make a session of the caller's own and start its kernel; nothing of it stays if that fails or is left.

        An environment that is being made is waited for `patience_s` long; then the first cell starts the kernel.
        """
        ...

    async def rename(self, access: Access, session_id: str, reason: str) -> SessionEntry:
        """Change the reason of a session, by which lists name it; one that sleeps sleeps on."""
        ...

    async def submit(
        self,
        access: Access,
        session_id: str,
        code: str,
        *,
        timeout_s: float | None = None,
        filename: str = "",
        key: str = "",
        asks: Asks = "inbox",
        client: str = "",
        keeps_files: bool = False,
        wait_s: float = 0,
    ) -> Submitted:
        """Queue a cell under the caller's name; without a session, in a new one of the caller's own.

        With `wait_s`, wait for it so long as `wait` does: a short cell is told with one request.

        Calls with one `key` run once. `client` is the name of the program that it came through. With `keeps_files`,
        figures and long data: URIs that it shows become files of the session.
        """
        ...

    async def wait(
        self,
        access: Access,
        execution_id: str,
        *,
        since: int | None = None,
        asked: int | None = None,
        wait_s: float = MAX_WAIT_S,
    ) -> ExecutionProgress:
        """Wait until an execution has ended, or `wait_s` have passed, `MAX_WAIT_S` at most.

        With `since`, only until it has output after that event, or other progress; with `asked`, only until its client
        has a question to answer whose number is greater.
        """
        ...

    async def reply(
        self,
        access: Access,
        execution_id: str,
        number: int,
        action: Literal["accept", "decline", "cancel"],
        values: dict[str, JsonValue],
    ) -> None:
        """Answer a question of an execution as its client; nothing happens if another one waits by now, or none."""
        ...

    def install(self, access: Access, session_id: str, packages: list[str]) -> AsyncGenerator[ProgressStep]:
        """Install packages for a session, and import them in it to prove that they work."""
        ...

    async def queue_install(self, access: Access, session_id: str, packages: list[str]) -> str:
        """Queue a cell under the caller's name that installs packages; return its execution id."""
        ...

    async def interrupt(
        self, access: Access, session_id: str = "", *, execution_id: str = "", why: str = "", waits: bool = True
    ) -> list[str]:
        """Stop an execution, or all that run or wait in a session; return those that are stopped.

        Without `waits`, do not wait for their end; then what is in this process is stopped before the first suspension.
        `why` says on whose behalf.
        """
        ...

    async def fork(
        self, access: Access, session_id: str, at: str | int = "", *, reseed: bool = False, count: int = 1
    ) -> SessionFork:
        """Fork a session as it is, or was before execution `at`; the fork belongs to the owner of its origin.

        `at` is an id, or a number counted back from the last one, which is 1. `reseed` gives it other random numbers.
        With a `count`, make so many from one state, or as many as there is room for, and say why they are fewer.
        """
        ...

    def map(
        self,
        access: Access,
        pieces: Sequence[Piece],
        session_id: str = "",
        options: MapOptions = USUAL_MAP,
    ) -> AsyncGenerator[MappedResult]:
        """Run each piece in a fork of its own of a session as it is now, or in a new session; yield the results.

        At most `at_once` run together, and fewer where there is less room. A fork is gone with its piece, unless
        `keeps` is set. What has a key runs once: one that ran before is told, and one that ran when its server ended is
        told as lost, or with `retries_lost` runs again. When the caller leaves, what runs goes on to its end, and
        nothing further begins.
        """
        ...

    async def rewind(self, access: Access, session_id: str, to: str | int) -> Rewinding:
        """Rewind a session to before an execution, given by its id or as the number of executions to undo."""
        ...

    async def end(self, access: Access, session_id: str) -> None:
        """End a session and delete all of it."""
        ...

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """Write a file into the folder of a session."""
        ...

    async def rename_file(self, access: Access, session_id: str, name: str, to: str) -> None:
        """Give a file of a session another name; never over a file that is there."""
        ...

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """Delete a file of a session."""
        ...

    async def answer(
        self,
        access: Access,
        question_id: str,
        action: Literal["accept", "decline"],
        values: dict[str, JsonValue],
        *,
        edited: str = "",
        said: str = "",
    ) -> InboxQuestion:
        """Answer a question that waits; `QuestionClosed` says who was first.

        `edited` is allowed in place of the code or arguments that were asked about, and `said` is told to the agent.
        """
        ...

    async def steer_run(self, access: Access, run_id: str, act: RunActs) -> None:
        """Go on with a run that failed, was stopped or interrupted, or stop one."""
        ...

    async def note_presence(self, access: Access) -> None:
        """Note that somebody who may answer questions is watching."""
        ...


# Engines elsewhere

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def _called(verb: _Verb) -> _Verb:
    """Return the method of a verb, with its types, that passes its name and arguments on."""
    signature, way = inspect.signature(verb), "_call" if inspect.iscoroutinefunction(verb) else "_stream"

    def method(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return getattr(bound.arguments.pop("self"), way)(verb.__name__, **bound.arguments)

    return cast("_Verb", method)


class CalledEngine:
    """An `Engine` elsewhere: each verb is one call, by its name, with all its arguments. How, its subclasses say."""

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        raise NotImplementedError

    def _stream(self, verb: str, access: Access, **arguments: Any) -> AsyncGenerator[Any]:
        raise NotImplementedError

    # A line for each verb of the contract, so that type checkers know them.

    health = _called(Engine.health)
    servers = _called(Engine.servers)
    console_link = _called(Engine.console_link)
    usage = _called(Engine.usage)
    sessions = _called(Engine.sessions)
    search = _called(Engine.search)
    live_sessions = _called(Engine.live_sessions)
    session = _called(Engine.session)
    executions = _called(Engine.executions)
    blocks = _called(Engine.blocks)
    execution = _called(Engine.execution)
    result = _called(Engine.result)
    output = _called(Engine.output)
    excerpt = _called(Engine.excerpt)
    event = _called(Engine.event)
    lines = _called(Engine.lines)
    display = _called(Engine.display)
    calls = _called(Engine.calls)
    decisions = _called(Engine.decisions)
    notebook = _called(Engine.notebook)
    files = _called(Engine.files)
    read_part = _called(Engine.read_part)
    complete = _called(Engine.complete)
    variables = _called(Engine.variables)
    rows = _called(Engine.rows)
    packages = _called(Engine.packages)
    questions = _called(Engine.questions)
    runs = _called(Engine.runs)
    run = _called(Engine.run)
    server_events = _called(Engine.server_events)
    follow = _called(Engine.follow)
    attach = _called(Engine.attach)
    create = _called(Engine.create)
    open_session = _called(Engine.open_session)
    rename = _called(Engine.rename)
    submit = _called(Engine.submit)
    wait = _called(Engine.wait)
    reply = _called(Engine.reply)
    install = _called(Engine.install)
    queue_install = _called(Engine.queue_install)
    interrupt = _called(Engine.interrupt)
    fork = _called(Engine.fork)
    map = _called(Engine.map)
    rewind = _called(Engine.rewind)
    end = _called(Engine.end)
    write_file = _called(Engine.write_file)
    rename_file = _called(Engine.rename_file)
    delete_file = _called(Engine.delete_file)
    answer = _called(Engine.answer)
    steer_run = _called(Engine.steer_run)
    note_presence = _called(Engine.note_presence)
