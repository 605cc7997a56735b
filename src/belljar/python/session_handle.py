"""A session as Python code holds it: one class, whether the engine is in this process or a server.

Code that raises is a result; what belljar refuses is raised as the error it names.
"""

import contextlib
import io
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self, overload

import anyio

from belljar.engine.contract import MAX_PART_BYTES, MAX_PIECES, MAX_WAIT_S, Access, Engine
from belljar.engine.models import ClientQuestion, ExecutionProgress, Piece
from belljar.errors import (
    BelljarError,
    EngineError,
    ExecutionNotFound,
    InvalidArgument,
    SessionNotFound,
    UsageError,
    named_error,
)
from belljar.files.file_types import file_reference
from belljar.files.names import SANDBOX_ROOT, split
from belljar.models import (
    ExecutionResult,
    FileReference,
    MappedResult,
    OutputEvent,
    Rewinding,
    SessionFork,
    SessionInfo,
)
from belljar.outputs.forms import PICTURES
from belljar.questions.schema import typed_prompt, values_of
from belljar.settings.keys import LOCAL_PRINCIPAL

if TYPE_CHECKING:
    from belljar.environments.installs import InstallOutcome

OnInput = Callable[[str], Awaitable[str | None]]
"""Gets the prompt of an `input()`, gives the answer; None declines, and `input()` raises EOFError.

Tools that a cell calls may ask too: a yes or no, the text of one field, or a JSON object of several."""

_CALLER: Final = Access(LOCAL_PRINCIPAL, via="client")
"""Who asks an engine of this process; a server knows its callers by their keys."""
_FIRST_WAIT_S: Final = 2.0
_EVENTS_AT_ONCE: Final = 100
_END_S: Final = 5.0
_KEY_BYTES: Final = 250
_MOST_MAP_CHARS: Final = 16 * 1024 * 1024
_DISPLAY: Final = re.compile(r"execution://([^/]+)/displays/([^/]+)")


class SessionOpener:
    """Opens sessions on an engine, and finds those that are there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def open_session(self, environment: str = "", *, gpus: int | None = None) -> AsyncGenerator["SessionHandle"]:
        """Open a session with its kernel started; it, its forks and their files are gone when the block ends.

        `gpus` is how many it has; without it, as many as the setting `session_gpus` says.
        """
        session_id = ""
        async with aclosing(self._engine.open_session(_CALLER, environment, gpus=gpus)) as steps:
            async for step in steps:
                session_id = step.session.session_id if step.session is not None else ""
        handles: list[SessionHandle] = []
        try:
            yield SessionHandle(self._engine, session_id, handles)
        finally:
            # Those that cannot be ended now end by themselves when nothing has used them for a while.
            with anyio.move_on_after(_END_S, shield=True):
                for each in [*handles]:
                    with contextlib.suppress(BelljarError):
                        await each.aclose()

    async def session(self, session_id: str) -> "SessionHandle":
        """Return a session that is open or sleeps, by its id. It ends when it is closed, not with a block."""
        if session_id not in [info.session_id for info in await self.sessions()]:
            raise SessionNotFound(f"there is no session {session_id[:64]!r} of yours", hint="See sessions()")
        return SessionHandle(self._engine, session_id, [])

    async def sessions(self) -> list[SessionInfo]:
        """Return the sessions of the caller that are open or sleep."""
        return [*await self._engine.live_sessions(_CALLER, asleep=True)]

    def map(
        self,
        codes: Iterable[str],
        environment: str = "",
        *,
        keys: Iterable[str] | None = None,
        at_once: int = 16,
        timeout_s: float | None = None,
        in_order: bool = False,
        keep: bool = False,
        retry_lost: bool = False,
    ) -> AsyncGenerator[MappedResult]:
        """Run each code in a new session of its own, and yield the results as they come; see `SessionHandle.map`."""
        options = MapCall(at_once, timeout_s, in_order=in_order, keeps=keep, retries_lost=retry_lost)
        return mapped(self._engine, codes, keys, options, environment=environment)

    def execution(self, execution_id: str) -> "ExecutionHandle":
        """Return an execution of the caller by its id, also one from before a restart."""
        return ExecutionHandle(self._engine, execution_id)


class SessionHandle:
    """A session: variables, imports and files stay from cell to cell, until its `async with` block ends."""

    def __init__(
        self, engine: Engine, session_id: str, handles: "list[SessionHandle]", forked: SessionFork | None = None
    ) -> None:
        self._engine = engine
        self._id = session_id
        self._forked = forked
        self._askers = _Askers()
        self._handles = handles
        """All that end with one block: the session that it opened and the forks of it."""
        handles.append(self)

    @property
    def id(self) -> str:
        """The session's id."""
        return self._id

    # Cells

    async def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        on_input: OnInput | None = None,
        filename: str = "",
        idempotency_key: str = "",
    ) -> ExecutionResult:
        """Run a cell to its end. Cells of one session take turns; one whose caller stops waiting goes on.

        Past `timeout_s` it is interrupted, and its variables are kept. `on_input` answers its `input()`. With
        `filename` its code is also kept as a file of the session. Calls with one `idempotency_key` run once.
        """
        submitted = await self._engine.submit(
            _CALLER,
            self._id,
            code,
            timeout_s=timeout_s,
            filename=filename,
            key=idempotency_key,
            asks="nobody" if on_input is None else "client",
            wait_s=_FIRST_WAIT_S,
        )
        with self._askers.of_cell(on_input) as asker:
            progress = submitted.progress
            while progress is None or progress.result is None:
                asked = await _answer(self._engine, submitted.execution_id, progress, asker)
                progress = await self._engine.wait(_CALLER, submitted.execution_id, asked=asked)
        return _accepted(progress.result)

    async def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> "ExecutionHandle":
        """Start a cell and return at once; its arguments are those of `execute`. Its `input()` is not answered."""
        submitted = await self._engine.submit(
            _CALLER, self._id, code, timeout_s=timeout_s, filename=filename, key=idempotency_key, asks="nobody"
        )
        return ExecutionHandle(self._engine, submitted.execution_id)

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None) -> "OutputStream":
        """Run a cell and give its output while it runs; it starts with the first event asked for."""
        return OutputStream(self._events(code, timeout_s, on_input))

    async def _events(
        self, code: str, timeout_s: float | None, on_input: OnInput | None
    ) -> AsyncGenerator[OutputEvent | ExecutionResult]:
        asks = "nobody" if on_input is None else "client"
        submitted = await self._engine.submit(_CALLER, self._id, code, timeout_s=timeout_s, asks=asks)
        with self._askers.of_cell(on_input) as asker:
            async for event in _output_of(self._engine, submitted.execution_id, 0, asker):
                yield event
        yield _accepted(await self._engine.result(_CALLER, submitted.execution_id))

    async def interrupt(self) -> list[str]:
        """Stop what runs or waits, and tell the ids of those executions; variables are kept if the code lets them."""
        stopped = self._engine.interrupt(_CALLER, self._id)
        # A question that is put now belongs to a cell that is being stopped.
        self._askers.withdraw()
        return await stopped

    # Files

    async def upload(self, name: str, content: bytes | str) -> FileReference:
        """Write a file into the session's folder."""
        data = content.encode() if isinstance(content, str) else content
        await self._engine.write_file(_CALLER, self._id, name, data)
        return file_reference(self._id, "/".join(split(name, SANDBOX_ROOT)), len(data))

    async def download(self, name: str) -> bytes:
        """Read a file of the session's folder."""
        part = await self._engine.read_part(_CALLER, self._id, name, 0, MAX_PART_BYTES)
        if len(part.content) >= part.size:
            return part.content
        content = bytearray(part.content)
        version = part.version
        while len(content) < part.size:
            part = await self._engine.read_part(_CALLER, self._id, name, len(content), MAX_PART_BYTES)
            if part.version != version or not part.content:
                raise UsageError(f"{name[:120]!r} changed while it was read", hint="Read it when nothing writes it")
            content += part.content
        return bytes(content)

    async def files(self) -> list[FileReference]:
        """List the files in the session's folder, by name."""
        found: list[FileReference] = []
        after: str | None = ""
        while after is not None:
            listing = await self._engine.files(_CALLER, self._id, "", after, recursive=True)
            found += [file_reference(self._id, file.name, file.size) for file in listing.items]
            after = listing.next
        return found

    async def display(self, uri: str) -> bytes:
        """Return what stands behind the `uri` of a display: a picture, a page."""
        named = _DISPLAY.fullmatch(uri)
        if named is None:
            raise ExecutionNotFound(f"there is no display {uri[:120]!r}")
        return await self._engine.display(_CALLER, named[1], named[2])

    async def figures(self, result: ExecutionResult) -> list[bytes]:
        """Return the pictures of a result, in order, as the bytes of PNG or JPEG files."""
        shown = [each for display in result.displays for each in (display, *display.also)[:1]]
        return [await self.display(each.uri) for each in shown if each.mime in PICTURES and each.uri]

    async def images(self, result: ExecutionResult) -> list[Any]:
        """Return the pictures of a result as images of Pillow, which has to be installed here."""
        pillow = _require("PIL.Image", "pillow")
        return [pillow.open(io.BytesIO(content)) for content in await self.figures(result)]

    async def frame(self, expression: str) -> Any:
        """Return a table of the session as a DataFrame of pandas, which has to be installed on both sides.

        `expression` is a variable, or anything else that pandas makes a table of. It is evaluated in a cell of its own.
        """
        pandas = _require("pandas", "pandas")
        name = f".belljar-{secrets.token_hex(8)}.json"
        try:
            compile(expression, "expression", "eval")
        except (SyntaxError, ValueError) as error:
            raise InvalidArgument(f"{expression[:120]!r} is no Python expression", hint="Pass a variable") from error
        made = await self.execute(_TABLE.format(expression=f"(\n{expression}\n)", name=name))
        if not made.success:
            raise UsageError(f"no table can be made of {expression[:120]!r}: {made.error}", hint="Pass a DataFrame")
        try:
            # JSON and not a pickle, because what comes out of a session must not be able to run anything here.
            content = await self.download(name)
            return pandas.read_json(io.BytesIO(content), orient="table", precise_float=True)
        except ValueError as error:
            raise UsageError(f"the table of {expression[:120]!r} cannot be read: {error}") from error
        finally:
            await self.execute(f"import os as _belljar_os; _belljar_os.remove({name!r}); del _belljar_os")

    # Packages and other states

    async def install(self, packages: Sequence[str]) -> "list[InstallOutcome]":
        """Install packages for this session: each one's version, or what kept it away."""
        from belljar.environments.installs import InstallOutcome

        # A single name may be a string, which is not taken for a list of its letters.
        wanted = [packages] if isinstance(packages, str) else [*packages]
        outcomes: list[Any] = []
        async with aclosing(self._engine.install(_CALLER, self._id, wanted)) as steps:
            async for step in steps:
                outcomes = step.installation.packages if step.installation is not None else []
        return [InstallOutcome(**outcome) for outcome in outcomes]

    @property
    def forked(self) -> SessionFork | None:
        """Return what came along and what did not, if it is a fork of another session."""
        return self._forked

    @overload
    async def fork(self, *, at: str | int = "", reseed: bool = False, count: None = None) -> "SessionHandle": ...

    @overload
    async def fork(self, *, at: str | int = "", reseed: bool = False, count: int) -> "list[SessionHandle]": ...

    async def fork(
        self, *, at: str | int = "", reseed: bool = False, count: int | None = None
    ) -> "SessionHandle | list[SessionHandle]":
        """Fork the session: return one of its own that goes on from this state, or from before execution `at`.

        `at` is an execution's id, or its number counted back from the last one, which is 1. With a `count` return a
        list of so many, made side by side from one state, or of as many as there is room for: `forked.unmade` of each
        says why. They end with the same `async with` block as this one, or when they are closed.
        """
        forked = await self._engine.fork(_CALLER, self._id, at, reseed=reseed, count=1 if count is None else count)
        if count is None:
            return SessionHandle(self._engine, forked.session_id, self._handles, forked)
        each = [forked.model_copy(update={"session_id": one}) for one in forked.session_ids or [forked.session_id]]
        return [SessionHandle(self._engine, one.session_id, self._handles, one) for one in each]

    def map(
        self,
        codes: Iterable[str],
        *,
        keys: Iterable[str] | None = None,
        at_once: int = 16,
        timeout_s: float | None = None,
        in_order: bool = False,
        keep: bool = False,
        reseed: bool = False,
        retry_lost: bool = False,
    ) -> AsyncGenerator[MappedResult]:
        """Run each code in a fork of its own of this session, as it is now, and yield the results as they come.

        At most `at_once` run together. Forks are gone with their code, unless `keep` is set; then `session_id` of each
        result names one. With `keys`, one for each code, none runs twice, also if this program or the server is killed
        and the map made again: then what ran is told, and what ran when the server ended is told as lost, or with
        `retry_lost` runs again. With `reseed` each draws other random numbers. Whoever leaves the loop early lets those
        that have begun go on to their end.
        """
        options = MapCall(at_once, timeout_s, in_order=in_order, keeps=keep, reseed=reseed, retries_lost=retry_lost)
        return mapped(self._engine, codes, keys, options, session_id=self._id)

    async def rewind(self, to: str | int) -> Rewinding:
        """Undo executions, back to before the one with this id, or this many of the last."""
        return await self._engine.rewind(_CALLER, self._id, to)

    async def rename(self, reason: str) -> None:
        """Change what the session is for, by which lists and the console name it; empty for no name."""
        await self._engine.rename(_CALLER, self._id, reason)

    async def aclose(self) -> None:
        """End the session and delete its files before its block ends; may be called twice."""
        with contextlib.suppress(SessionNotFound):  # it may have expired meanwhile
            await self._engine.end(_CALLER, self._id)
        if self in self._handles:
            self._handles.remove(self)


class ExecutionHandle:
    """One run of a cell, which goes on whether or not anyone waits for it. Nobody answers its questions."""

    def __init__(self, engine: Engine, execution_id: str) -> None:
        self._engine = engine
        self._id = execution_id

    @property
    def id(self) -> str:
        """The execution's id, by which a later program or connection finds it again."""
        return self._id

    async def wait(self, wait_s: float | None = None) -> ExecutionResult:
        """Return its result when it has ended; after `wait_s` seconds what there is, with the status `running`."""
        deadline = anyio.current_time() + (float("inf") if wait_s is None else wait_s)
        nobody, asked = _Asker(None), 0
        while True:
            left = max(0.0, deadline - anyio.current_time())
            progress = await self._engine.wait(_CALLER, self._id, asked=asked, wait_s=min(left, MAX_WAIT_S))
            if progress.result is not None:
                return _accepted(progress.result)
            asked = await _answer(self._engine, self._id, progress, nobody)
            if left <= 0:
                return _accepted(await self._engine.result(_CALLER, self._id))

    def events(self, since: int = 0) -> AsyncGenerator[OutputEvent]:
        """Yield its output from after event `since` to its end, also what came before this call."""
        return _output_of(self._engine, self._id, since, _Asker(None))

    async def interrupt(self) -> None:
        """Stop it; variables are kept if the code lets them."""
        await self._engine.interrupt(_CALLER, execution_id=self._id)


async def _output_of(engine: Engine, execution_id: str, since: int, asker: "_Asker") -> AsyncGenerator[OutputEvent]:
    """Yield the output of an execution after event `since` to its end, and answer its questions meanwhile."""
    asked = 0
    while True:
        # Read before the events, so that output which comes in between is found in the next round.
        progress = await engine.wait(_CALLER, execution_id, since=since, asked=asked)
        has_more = True
        while has_more:
            events, has_more = await engine.output(_CALLER, execution_id, since, _EVENTS_AT_ONCE)
            for event in events:
                since = event.sequence
                yield event
        if progress.result is not None:
            return
        asked = await _answer(engine, execution_id, progress, asker)  # behind what it printed before it asked


async def _answer(engine: Engine, execution_id: str, progress: ExecutionProgress | None, asker: "_Asker") -> int:
    """Answer the question of an execution, if it has one; return its number, to wait for a later one."""
    question: ClientQuestion | None = progress.question if progress is not None else None
    if question is None:
        return 0
    values = None
    try:
        values = values_of(question.fields, await asker.ask(typed_prompt(question.message, question.fields)))
    finally:
        # Also where the caller's function fails, because the cell would wait for an answer that never comes.
        await engine.reply(
            _CALLER, execution_id, question.number, "decline" if values is None else "accept", values or {}
        )
    return question.number


_TABLE = """
import pandas as _belljar_pandas
_belljar_pandas.DataFrame({expression}).to_json({name!r}, orient="table", date_unit="ns")
del _belljar_pandas
"""


def _require(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"{package} is not installed here", hint=f"pip install {package}") from error


class OutputStream:
    """What a cell says, event by event, in order and whole. A slow reader loses nothing: it reads from the journal.

    Leaving the loop early leaves the cell running; `SessionHandle.interrupt` stops it.
    """

    def __init__(self, source: AsyncGenerator[OutputEvent | ExecutionResult]) -> None:
        self._source = source
        self._result: ExecutionResult | None = None

    @property
    def result(self) -> ExecutionResult:
        """The result, once the stream has ended."""
        if self._result is None:
            raise UsageError("the stream has not ended and has no result yet", hint="Iterate over it to its end first")
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputEvent:
        item = await anext(self._source)
        if isinstance(item, ExecutionResult):
            self._result = item
            await self._source.aclose()
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Stop reading."""
        await self._source.aclose()


@dataclass(frozen=True, slots=True)
class MapCall:
    """How the pieces of a map are run, as `Engine.map` takes it."""

    at_once: int = 16
    timeout_s: float | None = None
    in_order: bool = False
    keeps: bool = False
    reseed: bool = False
    retries_lost: bool = False


async def mapped(
    engine: Engine,
    codes: Iterable[str],
    keys: Iterable[str] | None,
    options: MapCall,
    *,
    session_id: str = "",
    environment: str = "",
) -> AsyncGenerator[MappedResult]:
    """Yield the results of a map; one of more pieces than an engine takes is several, one after the other."""
    if isinstance(codes, str):
        raise InvalidArgument("codes is one string", hint="Pass a list of them")
    given = [*codes]
    named = [*keys] if keys is not None else [""] * len(given)
    if len(named) != len(given):
        raise InvalidArgument(f"there are {len(named)} keys for {len(given)} codes", hint="Pass one for each")
    pieces = [Piece(code=code, key=key) for code, key in zip(given, named, strict=True)]
    first = 0
    while first < len(pieces):
        size, last = 0, first
        while last < len(pieces) and last - first < MAX_PIECES:
            size += 2 * len(pieces[last].code) + _KEY_BYTES
            if size > _MOST_MAP_CHARS and last > first:
                break
            last += 1
        told = engine.map(_CALLER, pieces[first:last], session_id, environment=environment, **asdict(options))
        missing = last - first
        async with aclosing(told) as results:
            async for result in results:
                missing -= 1
                yield result.model_copy(update={"index": result.index + first}) if first else result
        if missing:
            raise EngineError(
                f"the server ended the map before {missing} of its results were told",
                hint="Make it again: with the same keys, nothing runs twice",
            )
        first = last


class _Asker:
    """Puts the questions of one cell to its caller, until an interrupt withdraws them."""

    def __init__(self, on_input: OnInput | None) -> None:
        self._on_input = on_input
        self._scope = anyio.CancelScope()

    async def ask(self, prompt: str) -> str | None:
        """Return the answer; None when there is nobody to give it, or no need for it any more."""
        if self._on_input is None or self._scope.cancel_called:
            return None
        with anyio.CancelScope() as self._scope:
            return await self._on_input(prompt)
        return None

    def withdraw(self) -> None:
        """Withdraw the current question and all later ones, because the cell is being stopped."""
        self._scope.cancel()


class _Askers:
    """The askers of a session's cells that run or wait."""

    def __init__(self) -> None:
        self._askers: set[_Asker] = set()

    @contextmanager
    def of_cell(self, on_input: OnInput | None) -> Generator[_Asker]:
        """Yield an asker for the time that a cell is followed."""
        asker = _Asker(on_input)
        self._askers.add(asker)
        try:
            yield asker
        finally:
            self._askers.discard(asker)

    def withdraw(self) -> None:
        """Withdraw the questions of all cells, because every cell of the session is being stopped."""
        for asker in self._askers:
            asker.withdraw()


def _accepted(result: ExecutionResult) -> ExecutionResult:
    """Return the result of a cell that had its turn; for one that was refused, raise the error that it names."""
    if result.status == "rejected":
        raise named_error(result.error or "the cell was refused")
    return result
