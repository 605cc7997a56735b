"""A session as Python code holds it: one class, whether the engine is in this process or a server.

`SyncSession` has the same methods without `async`. Code that raises is a result; what belljar refuses is raised as the
error it names.
"""

import contextlib
import io
import re
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, overload

import anyio

from belljar.engine.contract import MAX_PART_BYTES, Engine, MapOptions
from belljar.errors import BelljarError, ExecutionNotFound, InvalidArgument, SessionNotFound, UsageError
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
from belljar.python.execution_handle import (
    CALLER,
    Answer,
    Askers,
    Blocking,
    ExecutionHandle,
    OnInput,
    OutputStream,
    SyncExecution,
    SyncStream,
    accepted,
    answer_question,
    in_thread,
    iterated,
    output_of,
    waited,
)
from belljar.python.mapping import mapped

if TYPE_CHECKING:
    from belljar.environments.installs import InstallOutcome

_FIRST_WAIT_S: Final = 2.0
_END_S: Final = 5.0
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
        async with aclosing(self._engine.open_session(CALLER, environment, gpus=gpus)) as steps:
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
        return [*await self._engine.live_sessions(CALLER, asleep=True)]

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
        options = MapOptions(environment, at_once, timeout_s, in_order, keep, retries_lost=retry_lost)
        return mapped(self._engine, codes, keys, options)

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
        self._askers = Askers()
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
            CALLER,
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
                asked = await answer_question(self._engine, submitted.execution_id, progress, asker)
                progress = await self._engine.wait(CALLER, submitted.execution_id, asked=asked)
        return accepted(progress.result)

    async def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> "ExecutionHandle":
        """Start a cell and return at once; its arguments are those of `execute`. Its `input()` is not answered."""
        submitted = await self._engine.submit(
            CALLER, self._id, code, timeout_s=timeout_s, filename=filename, key=idempotency_key, asks="nobody"
        )
        return ExecutionHandle(self._engine, submitted.execution_id)

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None) -> "OutputStream":
        """Run a cell and give its output while it runs; it starts with the first event asked for."""
        return OutputStream(self._events(code, timeout_s, on_input))

    async def _events(
        self, code: str, timeout_s: float | None, on_input: OnInput | None
    ) -> AsyncGenerator[OutputEvent | ExecutionResult]:
        asks = "nobody" if on_input is None else "client"
        submitted = await self._engine.submit(CALLER, self._id, code, timeout_s=timeout_s, asks=asks)
        with self._askers.of_cell(on_input) as asker:
            async for event in output_of(self._engine, submitted.execution_id, 0, asker):
                yield event
        yield accepted(await self._engine.result(CALLER, submitted.execution_id))

    async def interrupt(self) -> list[str]:
        """Stop what runs or waits, and tell the ids of those executions; variables are kept if the code lets them."""
        stopped = self._engine.interrupt(CALLER, self._id)
        # A question that is put now belongs to a cell that is being stopped.
        self._askers.withdraw()
        return await stopped

    # Files

    async def upload(self, name: str, content: bytes | str) -> FileReference:
        """Write a file into the session's folder."""
        data = content.encode() if isinstance(content, str) else content
        await self._engine.write_file(CALLER, self._id, name, data)
        return file_reference(self._id, "/".join(split(name, SANDBOX_ROOT)), len(data))

    async def download(self, name: str) -> bytes:
        """Read a file of the session's folder."""
        part = await self._engine.read_part(CALLER, self._id, name, 0, MAX_PART_BYTES)
        if len(part.content) >= part.size:
            return part.content
        content = bytearray(part.content)
        version = part.version
        while len(content) < part.size:
            part = await self._engine.read_part(CALLER, self._id, name, len(content), MAX_PART_BYTES)
            if part.version != version or not part.content:
                raise UsageError(f"{name[:120]!r} changed while it was read", hint="Read it when nothing writes it")
            content += part.content
        return bytes(content)

    async def files(self) -> list[FileReference]:
        """List the files in the session's folder, by name."""
        found: list[FileReference] = []
        after: str | None = ""
        while after is not None:
            listing = await self._engine.files(CALLER, self._id, "", after, recursive=True)
            found += [file_reference(self._id, file.name, file.size) for file in listing.items]
            after = listing.next
        return found

    async def display(self, uri: str) -> bytes:
        """Return what stands behind the `uri` of a display: a picture, a page."""
        named = _DISPLAY.fullmatch(uri)
        if named is None:
            raise ExecutionNotFound(f"there is no display {uri[:120]!r}")
        return await self._engine.display(CALLER, named[1], named[2])

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
        async with aclosing(self._engine.install(CALLER, self._id, wanted)) as steps:
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
        forked = await self._engine.fork(CALLER, self._id, at, reseed=reseed, count=1 if count is None else count)
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
        options = MapOptions("", at_once, timeout_s, in_order, keep, reseed, retry_lost)
        return mapped(self._engine, codes, keys, options, self._id)

    async def rewind(self, to: str | int) -> Rewinding:
        """Undo executions, back to before the one with this id, or this many of the last."""
        return await self._engine.rewind(CALLER, self._id, to)

    async def rename(self, reason: str) -> None:
        """Change what the session is for, by which lists and the console name it; empty for no name."""
        await self._engine.rename(CALLER, self._id, reason)

    async def aclose(self) -> None:
        """End the session and delete its files before its block ends; may be called twice."""
        with contextlib.suppress(SessionNotFound):  # it may have expired meanwhile
            await self._engine.end(CALLER, self._id)
        if self in self._handles:
            self._handles.remove(self)


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


# Without `async`


class SyncSession(Blocking[SessionHandle]):
    """A session: variables, imports and files stay from cell to cell, until its `with` block ends.

    Made by `belljar.session()`. Its methods may be called from any thread.
    """

    interrupt = waited(SessionHandle.interrupt)
    upload = waited(SessionHandle.upload)
    download = waited(SessionHandle.download)
    files = waited(SessionHandle.files)
    display = waited(SessionHandle.display)
    figures = waited(SessionHandle.figures)
    images = waited(SessionHandle.images)
    frame = waited(SessionHandle.frame)
    install = waited(SessionHandle.install)
    rewind = waited(SessionHandle.rewind)
    rename = waited(SessionHandle.rename)
    close = waited(SessionHandle.aclose)
    map = iterated(SessionHandle.map)

    @property
    def id(self) -> str:
        """The session's id."""
        return self.handle.id

    def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        on_input: Answer | None = None,
        filename: str = "",
        idempotency_key: str = "",
    ) -> ExecutionResult:
        """Run a cell to its end, and return its result. Code that raises is a result too, with `success` false.

        Past `timeout_s` it is interrupted, and its variables are kept. `on_input` answers its `input()`. With
        `filename` its code is also kept as a file of the session. Calls with one `idempotency_key` run once.
        """
        execute = partial(self.handle.execute, code, timeout_s=timeout_s, on_input=in_thread(on_input))
        return self.portal.call(partial(execute, filename=filename, idempotency_key=idempotency_key))

    def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> "SyncExecution":
        """Start a cell and return at once; its arguments are those of `execute`. Its `input()` is not answered."""
        submit = partial(self.handle.submit, code, timeout_s=timeout_s)
        submitted = self.portal.call(partial(submit, filename=filename, idempotency_key=idempotency_key))
        return SyncExecution(self.portal, submitted)

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: Answer | None = None) -> "SyncStream":
        """Run a cell and give its output while it runs; it starts with the first event asked for."""
        return SyncStream(self.portal, self.handle.stream(code, timeout_s=timeout_s, on_input=in_thread(on_input)))

    @property
    def forked(self) -> SessionFork | None:
        """Return what came along and what did not, if it is a fork of another session."""
        return self.handle.forked

    @overload
    def fork(self, *, at: str | int = "", reseed: bool = False, count: None = None) -> "SyncSession": ...

    @overload
    def fork(self, *, at: str | int = "", reseed: bool = False, count: int) -> "list[SyncSession]": ...

    def fork(
        self, *, at: str | int = "", reseed: bool = False, count: int | None = None
    ) -> "SyncSession | list[SyncSession]":
        """Return a session of its own that goes on from the state of this one, or from before execution `at`.

        With a `count` return a list of so many, or of as many as there is room for: `forked.unmade` of each says why.
        They end with the same `with` block as this one, or when they are closed.
        """
        forks = self.portal.call(partial(self.handle.fork, at=at, reseed=reseed, count=1 if count is None else count))
        sessions = [SyncSession(self.portal, handle) for handle in forks]
        return sessions[0] if count is None else sessions
