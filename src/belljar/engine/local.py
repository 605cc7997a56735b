"""The engine of this process's own sessions: what `local_views.py` shows, what happens, and what callers may do."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue

from belljar.engine.contract import MAX_FORKS, MAX_PIECES, MAX_WAIT_S, USUAL_MAP, Access, Asks, MapOptions
from belljar.engine.follow import SessionFollower
from belljar.engine.local_views import MAX_TEXT, LocalViews, owner_asked_for, unwritten
from belljar.engine.models import (
    ClientQuestion,
    ExecutionProgress,
    Followed,
    Installation,
    Piece,
    ProgressStep,
    ServerEvent,
    SessionEntry,
    Submitted,
)
from belljar.engine.packages import installing_cell
from belljar.engine.runs import RunActs
from belljar.environments.installs import as_fields, check_requirements
from belljar.errors import BelljarError, InvalidArgument, SessionNotFound
from belljar.executions.cell import Cell, make_cell
from belljar.executions.execution import Execution
from belljar.models import ExecutionResult, MappedResult, Rewinding, SessionFork, iso_ms
from belljar.questions.models import InboxQuestion, QuestionReply
from belljar.sessions.packages import install_packages
from belljar.sessions.queue import interrupt_all
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session
from belljar.settings.environments import KERNEL_PREFIX

if TYPE_CHECKING:
    from belljar.engine.attachments import LocalAttachment

_WAIT_S = 3600.0


class LocalEngine(LocalViews):
    """An `Engine` of the sessions of one registry."""

    def __init__(self, registry: Registry, data_directory: Path, run: str) -> None:
        super().__init__(registry, data_directory, run)
        self._pieces: set[asyncio.Task[Any]] = set()
        """The pieces of maps that have begun, and what ends maps."""

    async def aclose(self) -> None:
        """End its threads and tasks, and the pieces of maps; may be called twice."""
        for piece in [*self._pieces]:
            piece.cancel()
        await asyncio.gather(*self._pieces, return_exceptions=True)
        await super().aclose()

    # What happens

    async def server_events(self, access: Access, after: str = "") -> AsyncGenerator[ServerEvent]:
        """See `Engine`."""
        changes = self._registry.changes
        run, _, place = (after or self._place()).rpartition(":")
        number = int(place) if run == self._run and place.isdecimal() and len(place) < 18 else -1
        while True:
            if not changes.has(number):
                number = changes.number
                yield ServerEvent(id=self._place(), kind="reset")
            for change in changes.after(number):
                number = change.number
                if access.may_see(change.principal):
                    yield ServerEvent(
                        id=f"{self._run}:{number}",
                        kind=change.kind,
                        state=change.state,
                        session_id=change.session_id,
                        execution_id=change.execution_id,
                        at=iso_ms(change.at),
                    )
            await changes.wait(number, _WAIT_S)

    async def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """See `Engine`."""
        await self._row(access, session_id)
        follower = SessionFollower(
            session_id,
            self._history,
            self._registry.changes,
            self._entries.running,
            self._entries.execution,
            self._session_entry,
        )
        async with aclosing(follower.run(after)) as happened:
            async for item in happened:
                yield item

    async def _session_entry(self, session_id: str) -> SessionEntry | None:
        row = await self._history.session(session_id)
        return self._entries.session(row) if row is not None else None

    async def attach(self, access: Access, session_id: str = "", environment: str = "") -> "LocalAttachment":
        """See `Engine`."""
        from belljar.engine.attachments import LocalAttachment  # few attach

        reader = self._registry.executions.display_reader
        if session_id:
            session = self._registry.find_open(session_id)
            if session is None or not access.may_see(session.principal):
                raise SessionNotFound(
                    f"session {session_id[:64]!r} is not on this server",
                    hint="`belljar sessions` lists those there are",
                )
            return LocalAttachment(session, reader(session.id), access.name)
        owner = f"jupyter:{access.name}" if access.is_operator else access.principal
        session = await self._make(owner, environment, "a Jupyter kernel")
        try:
            with session.in_use():
                await session.start()
                return LocalAttachment(session, reader(session.id), "")
        except BaseException:
            await self._registry.clear(session.id, owner)
            raise

    # Acting

    async def create(
        self, access: Access, environment: str = "", reason: str = "", gpus: int | None = None
    ) -> SessionEntry:
        """See `Engine`."""
        session = await self._make(access.principal, environment, reason[:MAX_TEXT], gpus)
        self._registry.journal.commit()
        if self._registry.journal.is_failing:
            # Nobody could find it here, and each further try would make another one.
            await self._registry.clear(session.id, access.principal)
            raise unwritten("no session was made")
        return self._entries.session(await self._row(access, session.id, is_counted=True))

    async def open_session(
        self,
        access: Access,
        environment: str = "",
        reason: str = "",
        gpus: int | None = None,
        patience_s: float | None = None,
    ) -> AsyncGenerator[ProgressStep]:
        """See `Engine`."""
        session = await self._make(access.principal, environment, reason, gpus)

        async def start(tell: Callable[[str], None]) -> ProgressStep:
            said: list[str] = []

            def note(text: str) -> None:
                said.append(text)
                tell(text)

            with session.following_environment(note):
                starting = asyncio.ensure_future(session.start())
                try:
                    done, _ = await asyncio.wait([starting], timeout=patience_s)
                    if done or not said:
                        await starting
                finally:
                    starting.cancel()
            waits_for = "" if starting.done() else said[-1]
            notice = session.lease.notice() if access.via == "client" else None
            info = await asyncio.to_thread(session.info)
            return ProgressStep(kind="done", text=waits_for, session=info, notice=notice)

        is_told = False
        try:
            # Otherwise another caller's new session could make this one go, blank as it is.
            with session.in_use():
                async with aclosing(_steps(start)) as steps:
                    async for step in steps:
                        is_told = step.kind == "done"
                        yield step
        except BaseException:
            if not is_told:
                await self._registry.clear(session.id, access.principal)
            raise

    async def rename(self, access: Access, session_id: str, reason: str) -> SessionEntry:
        """See `Engine`."""
        kept = self._registry.rename(session_id, await self._owner(access, session_id), reason)
        self._note(access, session_id, f"renamed the session to {kept!r}" if kept else "removed the session's name")
        return self._entries.session(await self._row(access, session_id, is_counted=True))

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
        """See `Engine`."""
        registry, executions = self._registry, self._registry.executions
        owner = await self._owner(access, session_id) if session_id else access.principal
        cell = make_cell(
            registry.settings,
            code,
            timeout_s=timeout_s,
            allow_input=asks == "client" or (asks == "inbox" and registry.inbox.may_ask(owner)),
            filename=filename,
            author=access.name,
            client=client,
            keeps_uris=keeps_files,
            keeps_figures=keeps_files,
        )
        async with executions.turn_to_submit(key, owner) if key else nullcontext():
            if key and (known := executions.submitted(key, cell.code, owner)) is not None:
                record = registry.journal.find(known)
                of_session = record.session_id if record is not None else session_id
                if session_id not in ("", of_session):
                    raise InvalidArgument(
                        f"the key {key!r} was given for execution {known} of another session", hint="Pass a new key"
                    )
                return await self._submitted(access, known, of_session, wait_s)
            session = await (registry.reach(session_id, owner) if session_id else self._make(owner))
            try:
                if filename:
                    session.workspace.check_name(filename)
                execution = session.submit(cell, key)
            except BelljarError:
                if not session_id:  # made for this call, and the caller does not know it
                    await registry.clear(session.id, owner)
                raise
        if access.via != "client":  # a client waits next, and hears of nothing before the commit
            registry.journal.commit()
        return await self._submitted(access, execution.id, session.id, wait_s)

    async def _submitted(self, access: Access, execution_id: str, session_id: str, wait_s: float) -> Submitted:
        progress = await self.wait(access, execution_id, asked=0, wait_s=wait_s) if wait_s else None
        return Submitted(execution_id=execution_id, session_id=session_id, progress=progress)

    async def wait(
        self,
        access: Access,
        execution_id: str,
        *,
        since: int | None = None,
        asked: int | None = None,
        wait_s: float = MAX_WAIT_S,
    ) -> ExecutionProgress:
        """See `Engine`."""
        execution = self._live(access, execution_id)
        if execution is None:
            result = await self.result(access, execution_id)
            return ExecutionProgress(status=result.status, sequence=result.sequence, result=result)
        deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
        while not _has_news(execution, since, asked):
            left = deadline - time.monotonic()
            # What changed may be the progress of a tool call, which has no number.
            if left <= 0 or not await execution.wait_for_change(left) or since is not None:
                break
        self._registry.journal.commit()
        return _progress(execution)

    async def result(self, access: Access, execution_id: str, since: int = 0) -> ExecutionResult:
        """See `Engine`. What is live or ended lately is in memory."""
        if access.via != "client" and self._live(access, execution_id) is None:
            row = await self._execution_row(access, execution_id)
            if row.result is not None and not since:
                return row.result
        return self._registry.executions.result(execution_id, owner_asked_for(access), since)

    async def reply(
        self,
        access: Access,
        execution_id: str,
        number: int,
        action: Literal["accept", "decline", "cancel"],
        values: dict[str, JsonValue],
    ) -> None:
        """See `Engine`."""
        execution = self._live(access, execution_id)
        if execution is None:
            await self.result(access, execution_id)  # raises for one that is not the caller's
            return
        execution.reply(QuestionReply(action, values if action == "accept" else {}), number)

    async def install(self, access: Access, session_id: str, packages: list[str]) -> AsyncGenerator[ProgressStep]:
        """See `Engine`."""
        check_requirements(packages)
        session = await self._reach(access, session_id)

        async def work(tell: Callable[[str], None]) -> ProgressStep:
            async def tell_stage(stage: str) -> None:
                tell(stage)

            done = await install_packages(self._registry.starter, session, packages, on_stage=tell_stage)
            report = Installation(
                packages=[as_fields(outcome) for outcome in done.outcomes],
                restart_needed=done.restart_needed,
                pinned=done.pinned,
            )
            self._note(access, session_id, f"installed {', '.join(packages)[:MAX_TEXT]}")
            return ProgressStep(kind="done", installation=report)

        with session.in_use():
            async with aclosing(_steps(work)) as steps:
                async for step in steps:
                    yield step

    async def queue_install(self, access: Access, session_id: str, packages: list[str]) -> str:
        """See `Engine`."""
        row = await self._row(access, session_id)
        code = installing_cell(packages)
        if row.environment.startswith(KERNEL_PREFIX):
            await self._registry.starter.environments.for_packages(
                row.environment
            )  # refuses kernels that are not Python
        return (await self.submit(access, session_id, code)).execution_id

    async def interrupt(
        self, access: Access, session_id: str = "", *, execution_id: str = "", why: str = "", waits: bool = True
    ) -> list[str]:
        """See `Engine`. A session that sleeps runs nothing, and is not woken."""
        if execution_id:
            execution = self._live(access, execution_id)
            if execution is None:
                await self.result(access, execution_id)  # raises for one that is not the caller's
            running = [execution] if execution is not None and not execution.is_finished else []
        else:
            running = self._registry.running(session_id, await self._owner(access, session_id))
        for execution in running:
            execution.span.link()
        await interrupt_all(running, why or (f"by {access.name}" if access.name else ""), waits=waits)
        return [execution.id for execution in running]

    async def fork(
        self, access: Access, session_id: str, at: str | int = "", *, reseed: bool = False, count: int = 1
    ) -> SessionFork:
        """See `Engine`."""
        if not 1 <= count <= MAX_FORKS:
            raise InvalidArgument(f"count is {count}", hint=f"Pass a whole number from 1 to {MAX_FORKS}")
        owner = await self._owner(access, session_id)
        sessions, forked = await self._registry.fork_many(session_id, owner, at=at, reseed=reseed, count=count)
        if access.via == "client":
            forked.session_info, *_ = [session.lease.notice() for session in sessions]
        more = f" and {len(sessions) - 1} more" if len(sessions) > 1 else ""
        self._note(access, session_id, f"forked the session as {forked.session_id}{more}")
        return forked

    async def map(
        self,
        access: Access,
        pieces: Sequence[Piece],
        session_id: str = "",
        options: MapOptions = USUAL_MAP,
    ) -> AsyncGenerator[MappedResult]:
        """See `Engine`."""
        from belljar.engine.map import Map

        at_once = options.at_once
        for name, number, most in (("at_once", at_once, MAX_FORKS), ("the number of pieces", len(pieces), MAX_PIECES)):
            if not 1 <= number <= most:
                raise InvalidArgument(f"{name} is {number:,}", hint=f"Pass a whole number from 1 to {most:,}")
        owner = await self._owner(access, session_id) if session_id else access.principal
        settings, cells = self._registry.settings, list[tuple[Cell, str]]()
        for number, piece in enumerate(pieces):
            try:
                cells.append(
                    (make_cell(settings, piece.code, timeout_s=options.timeout_s, author=access.name), piece.key)
                )
            except InvalidArgument as error:
                raise InvalidArgument(f"piece {number}: {error.message}", hint=error.hint) from error
        mapped = Map(self._registry, owner, cells, options, self._pieces)
        async with aclosing(mapped.run(session_id)) as results:
            async for result in results:
                yield result

    async def rewind(self, access: Access, session_id: str, to: str | int) -> Rewinding:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        rewinding = await session.rewind(to)
        count = len(rewinding.undone)
        cells = "a cell" if count == 1 else f"{count} cells"
        self._note(access, session_id, f"rewound the session, which undid {cells},")
        return rewinding

    async def end(self, access: Access, session_id: str) -> None:
        """See `Engine`."""
        owner = await self._owner(access, session_id)
        await self._registry.clear(session_id, owner, f"was ended by {access.name}" if access.name else "was cleared")

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        with session.in_use():
            await session.write_file(name, content)
        self._note(access, session_id, f"put {name[:MAX_TEXT]!r} into the session folder")

    async def rename_file(self, access: Access, session_id: str, name: str, to: str) -> None:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        await asyncio.to_thread(session.workspace.rename, name, to)
        renamed = f"{name[:MAX_TEXT]!r} to {to[:MAX_TEXT]!r}"
        self._note(access, session_id, f"renamed {renamed} in the session folder")

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        await asyncio.to_thread(session.workspace.delete, name)
        self._note(access, session_id, f"deleted {name[:MAX_TEXT]!r} from the session folder")

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
        """See `Engine`."""
        inbox, whose = self._registry.inbox, owner_asked_for(access)
        by = access.name or access.principal
        given = {"by": by, "where": access.via, "edited": edited, "said": said}
        return await inbox.answer(question_id, whose, action=action, values=values, **given)

    async def steer_run(self, access: Access, run_id: str, act: RunActs) -> None:
        """See `Engine`."""
        by = access.name or access.principal
        await self._runs(run_id).steer(owner_asked_for(access), run_id, act, by)

    async def note_presence(self, access: Access) -> None:
        """See `Engine`."""
        self._registry.inbox.note_presence(owner_asked_for(access))

    # Steps that the verbs share

    async def _make(self, owner: str, environment: str = "", reason: str = "", gpus: int | None = None) -> Session:
        await self._registry.make_room(owner)
        return self._registry.create(owner, environment=environment, reason=reason, gpus=gpus)

    async def _owner(self, access: Access, session_id: str) -> str:
        """Return whose session it is that the caller means.

        A client may only mean one of its own. The registry finds it in memory, or says in a client's words where it is.
        """
        if access.via == "client":
            return access.principal
        live = self._registry.find_open(session_id)
        if live is not None and access.may_see(live.principal):
            return live.principal
        return (await self._row(access, session_id)).principal

    async def _reach(self, access: Access, session_id: str) -> Session:
        return await self._registry.reach(session_id, await self._owner(access, session_id))

    def _live(self, access: Access, execution_id: str) -> Execution | None:
        """Return an execution that the caller may see, if it runs, waits or ended lately."""
        return self._registry.executions.find(execution_id, owner_asked_for(access))

    def _note(self, access: Access, session_id: str, deed: str) -> None:
        """Have the session's agent told what somebody else did."""
        if access.name and (session := self._registry.find_open(session_id)) is not None:
            session.authors.note(f"{access.name} {deed}")


def _has_news(execution: Execution, since: int | None, asked: int | None) -> bool:
    if execution.is_finished or (since is not None and execution.sequence > since):
        return True
    return asked is not None and execution.question is not None and execution.question_number > asked


def _progress(execution: Execution) -> ExecutionProgress:
    if execution.is_finished:
        result = execution.result()
        return ExecutionProgress(status=result.status, sequence=execution.sequence, result=result)
    asked = execution.question
    question = asked and ClientQuestion(
        number=execution.question_number,
        message=asked.message,
        fields=asked.schema,
        url=asked.url,
        is_password=asked.is_password,
    )
    return ExecutionProgress(
        status="running" if execution.has_started else "queued",
        sequence=execution.sequence,
        progress=execution.latest_text(),
        question=question,
    )


async def _steps(work: Callable[[Callable[[str], None]], Awaitable[ProgressStep]]) -> AsyncGenerator[ProgressStep]:
    """Yield what `work` tells, and then what it returns; it is cancelled if nobody wants that any more."""
    told: asyncio.Queue[ProgressStep | None] = asyncio.Queue()
    task = asyncio.ensure_future(work(lambda text: told.put_nowait(ProgressStep(kind="stage", text=text))))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (step := await told.get()) is not None:
            yield step
        yield await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
