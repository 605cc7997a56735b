"""The Python API: an engine in this process, and sessions in it.

`open_session` is the short way to one session; `open_engine` holds several. The same shape against a running server is
in `client/`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from belljar.environments.installs import InstallOutcome
from belljar.errors import ExecutionNotFound, SessionNotFound
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.executions.transcript import file_reference
from belljar.files.workspace import PAGED_LIMIT
from belljar.handles import (
    Asker,
    Askers,
    ExecutionHandle,
    OnInput,
    OutputStream,
    SessionBase,
    SessionHandle,
    accepted,
    as_list,
)
from belljar.journal.journal import Journal
from belljar.models import ExecutionResult, FileReference, OutputEvent, Rewinding, SessionFork, SessionInfo
from belljar.questions.models import QuestionReply
from belljar.questions.schema import typed_prompt, values_of
from belljar.runtime import Runtime
from belljar.sessions.packages import install_packages
from belljar.sessions.queue import interrupt_all
from belljar.sessions.session import Session
from belljar.settings import Settings, given_flags, load_settings
from belljar.settings.keys import LOCAL_PRINCIPAL
from belljar.surfaces.server_socket import open_reachable_runtime

MAX_DOWNLOAD_BYTES = 1 << 30
_BATCH = 100
_LONG_S = 3600.0


@asynccontextmanager
async def open_session(
    environment: str = "", settings: Settings | None = None, **flags: object
) -> AsyncGenerator[SessionHandle]:
    """Open one session in an engine of its own; `flags` are settings, such as `sandbox="process"`."""
    chosen = {"environment": environment} if environment else {}
    async with open_engine(settings, **flags, **chosen) as engine, engine.open_session() as session:
        yield session


@asynccontextmanager
async def open_engine(settings: Settings | None = None, **flags: object) -> AsyncGenerator["Engine"]:
    """Open an engine for several sessions, which end with it; other settings are found as the command finds them."""
    given = given_flags(flags)
    if settings is None or given:
        settings = load_settings({**(dict(settings) if settings else {}), **given})
    # Sessions are not kept alive, because no later engine would know of them.
    async with open_reachable_runtime(settings.model_copy(update={"keep_alive": False})) as runtime:
        yield Engine(runtime)


class Engine:
    """A running engine; made by `open_engine`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @asynccontextmanager
    async def open_session(self, environment: str = "", *, gpus: int | None = None) -> AsyncGenerator[SessionHandle]:
        """Open a session with its kernel started; it and its files are gone when the block ends.

        `gpus` is how many it has; without it, as many as the setting `session_gpus` says.
        """
        await self._runtime.sessions.make_room(LOCAL_PRINCIPAL)
        session = self._runtime.sessions.create(LOCAL_PRINCIPAL, environment=environment, gpus=gpus)
        sessions_of_block: list[LocalSession] = []
        handle = LocalSession(self._runtime, session.id, sessions_of_block)
        try:
            with session.in_use():
                await session.start()
            yield handle
        finally:
            for each in [*sessions_of_block]:
                await each.aclose()

    async def session(self, session_id: str) -> SessionHandle:
        """Return a session that is open or sleeps, by its id. It ends when it is closed, or with the engine."""
        session = await self._runtime.sessions.reach(session_id, LOCAL_PRINCIPAL)
        return LocalSession(self._runtime, session.id, [])

    async def sessions(self) -> list[SessionInfo]:
        """Return the sessions that are open or sleep."""
        sessions = self._runtime.sessions
        open_ones = [await asyncio.to_thread(session.info) for session in sessions.of(LOCAL_PRINCIPAL)]
        return [*open_ones, *sessions.asleep(LOCAL_PRINCIPAL)]

    def execution(self, execution_id: str) -> ExecutionHandle:
        """Return an execution by its id, also one of an earlier engine with the same data directory."""
        return LocalExecution(self._runtime, execution_id)


class LocalExecution:
    """See `ExecutionHandle`."""

    def __init__(self, runtime: Runtime, execution_id: str) -> None:
        self._executions = runtime.sessions.executions
        self._journal = runtime.sessions.journal
        self._id = execution_id

    @property
    def id(self) -> str:
        """See `ExecutionHandle`."""
        return self._id

    async def wait(self, wait_s: float | None = None) -> ExecutionResult:
        """See `ExecutionHandle`."""
        execution = self._executions.find(self._id, LOCAL_PRINCIPAL)
        while execution is not None and not execution.is_finished:
            await execution.wait(_LONG_S if wait_s is None else wait_s)
            if wait_s is not None:
                break
        return accepted(self._executions.result(self._id, LOCAL_PRINCIPAL))

    async def events(self, since: int = 0) -> AsyncGenerator[OutputEvent]:
        """See `ExecutionHandle`."""
        self._executions.result(self._id, LOCAL_PRINCIPAL)  # raises for one that is not the caller's
        execution = self._executions.find(self._id, LOCAL_PRINCIPAL)
        async for event in _output_of(self._journal, self._id, execution, since):
            yield event

    async def interrupt(self) -> None:
        """See `ExecutionHandle`."""
        if (execution := self._executions.find(self._id, LOCAL_PRINCIPAL)) is None:
            self._executions.result(self._id, LOCAL_PRINCIPAL)  # raises for one that is not the caller's
            return
        await interrupt_all([execution])


class LocalSession(SessionBase):
    """See `SessionHandle`."""

    def __init__(
        self,
        runtime: Runtime,
        session_id: str,
        sessions_of_block: "list[LocalSession]",
        forked: SessionFork | None = None,
    ) -> None:
        self._runtime = runtime
        self._id = session_id
        self._forked = forked
        self._askers = Askers()
        self._sessions_of_block = sessions_of_block
        """All sessions that end with one `async with` block: the one that it opened, and the forks of it."""
        sessions_of_block.append(self)

    @property
    def id(self) -> str:
        """See `SessionHandle`."""
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
        """See `SessionHandle`."""
        execution_id = await self._submit(code, timeout_s, on_input, filename, idempotency_key)
        execution = self._runtime.sessions.executions.find(execution_id, LOCAL_PRINCIPAL)
        if execution is None:
            return await LocalExecution(self._runtime, execution_id).wait()
        with self._askers.of_cell(on_input) as asker:
            while not execution.is_finished:
                await _answer(execution, asker)
                await execution.wait(_LONG_S)
        return accepted(execution.result())

    async def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> ExecutionHandle:
        """See `SessionHandle`."""
        return LocalExecution(self._runtime, await self._submit(code, timeout_s, None, filename, idempotency_key))

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None) -> OutputStream:
        """See `SessionHandle`."""
        return OutputStream(self._events(code, timeout_s, on_input))

    async def _events(
        self, code: str, timeout_s: float | None, on_input: OnInput | None
    ) -> AsyncGenerator[OutputEvent | ExecutionResult]:
        execution_id = await self._submit(code, timeout_s, on_input)
        execution = self._runtime.sessions.executions.find(execution_id, LOCAL_PRINCIPAL)
        if execution is None:
            raise ExecutionNotFound(f"execution {execution_id} is gone with its session")
        with self._askers.of_cell(on_input) as asker:
            async for event in _output_of(self._runtime.sessions.journal, execution_id, execution, asker=asker):
                yield event
        yield accepted(execution.result())

    async def _submit(
        self, code: str, timeout_s: float | None, on_input: OnInput | None, filename: str = "", key: str = ""
    ) -> str:
        """Return the id of a new execution, or of the one that was submitted under this key before."""
        session = await self._session()
        allow_input = on_input is not None
        cell = make_cell(session.settings, code, timeout_s=timeout_s, allow_input=allow_input, filename=filename)
        if filename:
            session.workspace.check_name(filename)
        if key and (known := self._runtime.sessions.executions.submitted(key, cell.code, LOCAL_PRINCIPAL)) is not None:
            return known
        return session.submit(cell, key).id

    async def interrupt(self) -> list[str]:
        """See `SessionHandle`."""
        session = await self._session()
        # The askers are cancelled when this call first waits: by then the executions are interrupted.
        self._askers.withdraw()
        return [execution.id for execution in await session.interrupt()]

    # Files

    async def upload(self, name: str, content: bytes | str) -> FileReference:
        """See `SessionHandle`."""
        session = await self._session()
        data = content.encode() if isinstance(content, str) else content
        await session.write_file(name, data)
        return file_reference(self._id, "/".join(session.workspace.check_name(name)), len(data))

    async def download(self, name: str) -> bytes:
        """See `SessionHandle`."""
        workspace = self._runtime.sessions.workspace(self._id, LOCAL_PRINCIPAL)
        return await asyncio.to_thread(workspace.read, name, MAX_DOWNLOAD_BYTES)

    async def files(self) -> list[FileReference]:
        """See `SessionHandle`."""
        workspace = self._runtime.sessions.workspace(self._id, LOCAL_PRINCIPAL)
        listing = await asyncio.to_thread(workspace.list, limit=PAGED_LIMIT)
        return [file_reference(self._id, entry.name, entry.size) for entry in listing.entries]

    async def display(self, uri: str) -> bytes:
        """See `SessionHandle`."""
        self._runtime.sessions.workspace(self._id, LOCAL_PRINCIPAL)
        content = await asyncio.to_thread(self._runtime.sessions.executions.display_reader(self._id), uri)
        if content is None:
            raise ExecutionNotFound(f"session {self._id} has no display {uri[:120]!r}")
        return content

    # Packages

    async def install(self, packages: Sequence[str]) -> list[InstallOutcome]:
        """See `SessionHandle`."""
        session = await self._session()
        with session.in_use():
            return (await install_packages(self._runtime.starter, session, as_list(packages))).outcomes

    # Other states

    @property
    def forked(self) -> SessionFork | None:
        """See `SessionHandle`."""
        return self._forked

    async def fork(self, *, at: str | int = "", reseed: bool = False) -> SessionHandle:
        """See `SessionHandle`."""
        _, forked = await self._runtime.sessions.fork(self._id, LOCAL_PRINCIPAL, at=at, reseed=reseed)
        return LocalSession(self._runtime, forked.session_id, self._sessions_of_block, forked)

    async def rewind(self, to: str | int) -> Rewinding:
        """See `SessionHandle`."""
        return await (await self._session()).rewind(to)

    async def rename(self, reason: str) -> None:
        """See `SessionHandle`."""
        self._runtime.sessions.rename(self._id, LOCAL_PRINCIPAL, reason)

    async def aclose(self) -> None:
        """See `SessionHandle`."""
        # The session may have expired, or ended with the engine, meanwhile.
        with contextlib.suppress(SessionNotFound):
            await self._runtime.sessions.clear(self._id, LOCAL_PRINCIPAL)
        if self in self._sessions_of_block:
            self._sessions_of_block.remove(self)

    async def _session(self) -> Session:
        return await self._runtime.sessions.reach(self._id, LOCAL_PRINCIPAL)


async def _output_of(
    journal: Journal, execution_id: str, execution: Execution | None, since: int = 0, asker: Asker | None = None
) -> AsyncGenerator[OutputEvent]:
    """Follow the output in the journal to its end; `execution` is None where it is not of this engine."""
    while True:
        # Read before the events, so that output which comes in between is found in the next round.
        is_finished = execution is None or execution.is_finished
        events = list(islice(journal.events(execution_id, since), _BATCH))
        for event in events:
            since = event.sequence
            yield event
        if events:
            continue
        if execution is None or is_finished:
            return
        if asker is None or not await _answer(execution, asker):
            await execution.wait_for_change(_LONG_S)


async def _answer(execution: Execution, asker: Asker) -> bool:
    """Answer a cell's question, and return whether it had one."""
    if (question := execution.question) is None:
        return False
    values, number = None, execution.question_number
    try:
        values = values_of(question.schema, await asker.ask(typed_prompt(question.message, question.schema)))
    finally:
        execution.reply(QuestionReply("decline") if values is None else QuestionReply("accept", values), number)
    return True
