"""The monitor of this process's own sessions: the registry for what is live, the journal for everything else."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from belljar.attachments.local import between_cells
from belljar.control import server_sockets
from belljar.environments.selection import KERNEL_PREFIX
from belljar.errors import ExecutionNotFound, FileMissing, InvalidArgument, SessionNotFound
from belljar.executions.cell import make_cell
from belljar.files.workspace import Workspace
from belljar.journal.session_records import SessionRecord, iso_ms
from belljar.models import ExecutionResult, OutputEvent, Rewinding, SessionFork
from belljar.monitor.base import (
    MOST_COMPLETED_CHARS,
    MOST_MATCHES,
    UNFINISHED,
    Access,
    CallEntry,
    EntryPage,
    ExecutionEntry,
    FileEntryInfo,
    FileListing,
    FilePart,
    Followed,
    Happening,
    Health,
    InboxQuestion,
    NameCompletion,
    NotebookForm,
    OutputLines,
    Server,
    SessionDetail,
    SessionEntry,
    SessionFilter,
    UsageHistory,
    cursor_of,
    place_of,
)
from belljar.monitor.decisions import read_decisions
from belljar.monitor.entries import Entries
from belljar.monitor.follower import SessionFollower
from belljar.monitor.history import ExecutionRow, HistoryReader, SessionQuery, parsed_place
from belljar.monitor.notebooks import notebook_file
from belljar.monitor.packages import PackageList, installing_cell, listed_packages
from belljar.monitor.usage import INTERVAL_S, UsageSampler
from belljar.monitor.variables import MOST_LISTED, TableRows, VariableList, listed_variables, table_part, table_rows
from belljar.outputs.displays import display_uri, read_display
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session

_LIVE = ("running", "idle", "fresh")
_STATES = (*_LIVE, "asleep", "gone")
_MOST_TEXT = 200
_LISTED_FILES = 500
_WAIT_S = 3600.0
MOST_PART_BYTES = 4 * 1024 * 1024
"""The largest part of a file that is read at once."""


class LocalMonitor:
    """A `Monitor` of the sessions of one registry. `run` is the name of its server in the data directory."""

    def __init__(
        self,
        registry: Registry,
        data_directory: Path,
        run: str,
    ) -> None:
        self._registry = registry
        self._data_directory = data_directory
        self._run = run
        self.check: Callable[[], Awaitable[dict[str, str]]] | None = None
        """Says whether the server works; a surface that has such checks sets it."""
        self._history = HistoryReader(data_directory / "journal.sqlite")
        self._usage = UsageSampler(registry.all, registry.changes)
        self._entries = Entries(registry, self._usage)

    def start(self) -> None:
        """Begin to sample memory and processor time."""
        self._usage.start()

    async def aclose(self) -> None:
        """End its threads and its task; may be called twice."""
        await self._usage.aclose()
        await self._history.aclose()

    # Looking

    async def health(self, access: Access) -> Health:
        """See `Monitor`. Owners see no numbers that are about others."""
        checks = await self.check() if self.check is not None else {}
        sessions = self._registry.all()
        settings = self._registry.settings
        own = [session for session in sessions if access.may_see(session.principal)]
        gauges: dict[str, float] = {f"sessions_{state}": sum(one.state == state for one in own) for state in _LIVE}
        if access.is_operator:
            memory = [one.session_kernel.kernel.memory_mb() for one in sessions if one.session_kernel.kernel]
            gauges |= {
                "sessions_asleep": self._registry.records.count_asleep(),
                "sessions_limit": settings.max_sessions,
                "pool_ready": len(self._registry.pool),
                "pool_target": settings.pool_size,
                "memory_mb": round(sum(memory), 1),
                "checkpoints": sum(one.session_kernel.checkpoints.count for one in sessions),
            }
        return Health(
            status="not ready" if any(state != "ok" for state in checks.values()) else "ready",
            checks=checks,
            gauges=gauges,
            version=version("belljar"),
            servers=await self.servers(access),
        )

    async def servers(self, access: Access) -> list[Server]:
        """Return this server, and for operators the others of its data directory."""
        own = Server(
            name=self._run,
            pid=int(self._run.partition("-")[0]),
            version=version("belljar"),
            sessions=sum(access.may_see(session.principal) for session in self._registry.all()),
        )
        if not access.is_operator:
            return [own]
        names = [path.parent.name for path in await asyncio.to_thread(server_sockets, self._data_directory)]
        others = [name for name in names if name != self._run]
        return [own, *(Server(name=name, pid=int(name.partition("-")[0]), sessions=0) for name in others)]

    async def usage(self, access: Access) -> UsageHistory:
        """See `Monitor`."""
        return UsageHistory(interval_s=INTERVAL_S, gauges=self._usage.gauges(access.may_see))

    async def sessions(
        self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50
    ) -> EntryPage[SessionEntry]:
        """See `Monitor`."""
        if wanted.state and wanted.state not in _STATES:
            raise InvalidArgument(f"state {wanted.state[:64]!r} is none of {', '.join(_STATES)}")
        owner = wanted.owner if access.is_operator else access.principal
        query = SessionQuery(
            owner=owner,
            run=self._run,
            states=_journal_states(wanted.state),
            text=wanted.text[:_MOST_TEXT],
            before=_session_place(cursor) if cursor else None,
        )
        rows = await self._history.sessions(query, limit + 1)
        shown = rows[:limit]
        entries = [self._entries.session(row) for row in shown]
        if wanted.state in _LIVE:
            entries = [entry for entry in entries if entry.state == wanted.state]
        last = shown[-1] if len(rows) > limit else None
        return EntryPage(items=entries, next=cursor_of(f"{last.created_at!r} {last.id}") if last else None)

    async def session(self, access: Access, session_id: str) -> SessionDetail:
        """See `Monitor`."""
        row = await self._row(access, session_id, is_counted=True)
        live, settings = self._registry.look_up(session_id), self._registry.settings
        entry = self._entries.session(row)
        limits: dict[str, float | None] = {
            "memory_mb": settings.memory_mb,
            "cpus": settings.cpus,
            "disk_mb": settings.disk_mb,
            "max_processes": settings.max_processes,
            "execution_timeout_s": settings.execution_timeout_s,
            "session_idle_s": settings.session_idle_s,
        }
        return SessionDetail(
            **entry.model_dump(),
            sandbox=settings.sandbox,
            kernel=live.session_kernel.kernel.name if live and live.session_kernel.kernel else "",
            limits=limits,
            variables=[*live.session_kernel.variables] if live else [*row.variables],
            unkept=[*row.unkept],
            origin=row.origin,
            origin_execution=row.origin_execution,
            forks=await self._history.forks(session_id),
            rewindable=live.session_kernel.checkpoints.targets if live else [],
        )

    async def executions(
        self, access: Access, session_id: str, cursor: str = "", limit: int = 50
    ) -> EntryPage[ExecutionEntry]:
        """See `Monitor`."""
        await self._row(access, session_id)
        before = parsed_place(place_of(cursor)) if cursor else None
        rows = await self._history.executions(session_id, before=before, limit=limit + 1)
        shown = rows[:limit]
        following = cursor_of(str(shown[-1].place)) if len(rows) > limit else None
        return EntryPage(items=[self._entries.execution(row) for row in shown], next=following)

    async def blocks(self, access: Access, session_id: str, size: int) -> list[str]:
        """See `Monitor`."""
        await self._row(access, session_id)
        return [cursor_of(str(place)) for place in await self._history.places(session_id, size)]

    async def execution(self, access: Access, execution_id: str) -> ExecutionEntry:
        """See `Monitor`."""
        return self._entries.execution(await self._execution_row(access, execution_id))

    async def result(self, access: Access, execution_id: str) -> ExecutionResult:
        """See `Monitor`."""
        row = await self._execution_row(access, execution_id)
        if row.result is not None:
            return row.result
        live = self._entries.running(row)
        if live is None:
            raise ExecutionNotFound(f"execution {execution_id!r} ended with the server that ran it")
        return live.result()

    async def output(
        self, access: Access, execution_id: str, since: int = 0, limit: int = 500
    ) -> tuple[list[OutputEvent], bool]:
        """See `Monitor`."""
        await self._execution_row(access, execution_id)
        return await self._history.output(execution_id, since, limit)

    async def excerpt(self, access: Access, execution_id: str, upto: int = 0, chars: int = 20_000) -> list[OutputEvent]:
        """See `Monitor`."""
        await self._execution_row(access, execution_id)
        return await self._history.excerpt(execution_id, upto, chars)

    async def event(self, access: Access, execution_id: str, sequence: int) -> OutputEvent:
        """See `Monitor`."""
        await self._execution_row(access, execution_id)
        event = await self._history.event(execution_id, sequence)
        if event is None:
            raise ExecutionNotFound(f"execution {execution_id} has no output event {sequence}")
        return event

    async def lines(self, access: Access, execution_id: str, first: int, count: int, search: str = "") -> OutputLines:
        """See `Monitor`."""
        row = await self._execution_row(access, execution_id)
        is_complete = self._entries.execution(row).status not in UNFINISHED
        page = await self._history.lines(row, first, count, search, is_complete=is_complete)
        return OutputLines(
            first=first, lines=page.lines, total=page.total, is_complete=is_complete, matches=page.matches
        )

    async def display(self, access: Access, execution_id: str, name: str) -> bytes:
        """See `Monitor`."""
        row = await self._execution_row(access, execution_id)
        folder = self._data_directory / "sessions" / row.session_id / "displays"
        content = await asyncio.to_thread(read_display, folder, display_uri(execution_id, name))
        if content is None:
            raise FileMissing(f"execution {execution_id} has no display {name[:64]!r}")
        return content

    async def calls(self, access: Access, execution_id: str) -> list[CallEntry]:
        """See `Monitor`."""
        await self._execution_row(access, execution_id)
        return await self._history.calls(execution_id)

    async def decisions(self, access: Access, *, execution_id: str = "", limit: int = 50) -> list[dict[str, JsonValue]]:
        """See `Monitor`. The log has pseudonyms in place of owners."""
        if execution_id:
            await self._execution_row(access, execution_id)
        return await asyncio.to_thread(read_decisions, self._data_directory, access, execution_id, limit)

    async def notebook(self, access: Access, session_id: str, form: NotebookForm) -> bytes:
        """See `Monitor`."""
        await self._row(access, session_id)
        self._registry.journal.commit()
        return await asyncio.to_thread(notebook_file, self._data_directory, session_id, form)

    async def files(self, access: Access, session_id: str, path: str = "", after: str = "") -> FileListing:
        """See `Monitor`."""
        workspace = await self._workspace(access, session_id)
        try:
            listing = await asyncio.to_thread(workspace.list_folder, path, after, _LISTED_FILES)
        except FileMissing:
            if path:
                raise
            return FileListing(items=[])  # nothing has run yet
        items = [
            FileEntryInfo(
                name=entry.name,
                size=entry.size,
                modified_at=iso_ms(entry.mtime_ns / 1e9),
                mime_type=entry.mime_type,
            )
            for entry in listing.files
        ]
        folders = [folder.name for folder in listing.folders]
        return FileListing(items=items, folders=folders, next=listing.next_after)

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """See `Monitor`."""
        workspace = await self._workspace(access, session_id)
        return await asyncio.to_thread(_read_part, workspace, name, offset, min(length, MOST_PART_BYTES))

    async def complete(self, access: Access, session_id: str, code: str, cursor: int) -> NameCompletion:
        """See `Monitor`. Neither wakes the session nor counts as its use."""
        await self._row(access, session_id)
        session = self._registry.look_up(session_id)
        if session is None or len(code) > MOST_COMPLETED_CHARS or cursor > len(code):
            return NameCompletion()
        found = await between_cells(session, lambda kernel: kernel.complete(code, cursor))
        if found is None:
            return NameCompletion()
        return NameCompletion(matches=found.matches[:MOST_MATCHES], start=found.start, end=found.end)

    async def variables(self, access: Access, session_id: str, offset: int = 0, limit: int = 500) -> VariableList:
        """See `Monitor`."""
        row, live = await self._row(access, session_id), self._registry.look_up(session_id)
        names = live.session_kernel.variables if live else row.variables
        return await listed_variables(live, row.state, [*names], max(0, offset), min(max(1, limit), MOST_LISTED))

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
    ) -> TableRows:
        """See `Monitor`."""
        await self._row(access, session_id)
        part = table_part(offset, limit, first_column, columns, order)
        return await table_rows(self._registry.look_up(session_id), name, part)

    async def packages(self, access: Access, session_id: str) -> PackageList:
        """See `Monitor`."""
        row = await self._row(access, session_id)
        folders, name = self._registry.look(session_id, row.principal)
        environment = self._registry.environments.find_ready(name)
        return await asyncio.to_thread(listed_packages, name, folders.layer, environment)

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """See `Monitor`."""
        inbox, whose = self._registry.inbox, _whose(access)
        if state not in ("waiting", "ended"):
            raise InvalidArgument(f"state {state[:64]!r} is neither waiting nor ended")
        return inbox.waiting(whose) if state == "waiting" else inbox.ended(whose)

    # What happens

    async def happenings(self, access: Access, after: str = "") -> AsyncGenerator[Happening]:
        """See `Monitor`."""
        changes = self._registry.changes
        number = changes.number
        if after:
            run, _, place = after.rpartition(":")
            is_known = run == self._run and place.isdecimal() and len(place) < 18 and changes.has(int(place))
            if not is_known:
                yield Happening(id=f"{self._run}:{number}", kind="reset")
            else:
                number = int(place)
        while True:
            for change in changes.after(number):
                number = change.number
                if access.may_see(change.principal):
                    yield Happening(
                        id=f"{self._run}:{number}",
                        kind=change.kind,
                        state=change.state,
                        session_id=change.session_id,
                        execution_id=change.execution_id,
                        at=iso_ms(change.at),
                    )
            await changes.wait(number, _WAIT_S)

    async def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """See `Monitor`."""
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

    # Acting

    async def create(self, access: Access, environment: str = "", reason: str = "") -> SessionEntry:
        """See `Monitor`."""
        await self._registry.make_room(access.principal)
        session = self._registry.create(access.principal, environment=environment, reason=reason[:_MOST_TEXT])
        self._registry.journal.commit()
        return self._entries.session(await self._row(access, session.id, is_counted=True))

    async def run_cell(
        self, access: Access, session_id: str, code: str, timeout_s: float | None = None, key: str = ""
    ) -> str:
        """See `Monitor`."""
        session = await self._reach(access, session_id)
        may_ask = self._registry.inbox.may_ask(session.principal)
        cell = make_cell(self._registry.settings, code, timeout_s=timeout_s, allow_input=may_ask, author=access.name)
        known = self._registry.executions.submitted(key, cell.code, session.principal) if key else None
        if known is not None:
            record = self._registry.journal.find(known)
            if record is not None and record.session_id != session_id:
                raise InvalidArgument(
                    f"the key {key!r} was given for execution {known} of another session", hint="Pass a new key"
                )
            return known
        execution = session.submit(cell, key)
        self._registry.journal.commit()
        return execution.id

    async def install(self, access: Access, session_id: str, requirements: list[str]) -> str:
        """See `Monitor`."""
        row = await self._row(access, session_id)
        code = installing_cell(requirements)
        if row.environment.startswith(KERNEL_PREFIX):
            await self._registry.environments.for_packages(row.environment)  # refuses kernels that are not Python
        return await self.run_cell(access, session_id, code)

    async def interrupt(self, access: Access, session_id: str) -> list[str]:
        """See `Monitor`. A session that sleeps runs nothing, and is not woken."""
        await self._row(access, session_id)
        session = self._registry.look_up(session_id)
        if session is None:
            return []
        running = session.queue.running()
        for execution in reversed(running):
            execution.interrupt(*([f"by {access.name}"] if access.name else []))
        await asyncio.gather(*(execution.wait(execution.stop_s) for execution in running))
        return [execution.id for execution in running]

    async def fork(self, access: Access, session_id: str, at: str = "") -> SessionFork:
        """See `Monitor`."""
        row = await self._row(access, session_id)
        forked = (await self._registry.fork(session_id, row.principal, at=at))[1]
        if access.name and (session := self._registry.look_up(session_id)) is not None:
            session.authors.note(f"{access.name} forked the session as {forked.session_id}")
        return forked

    async def rewind(self, access: Access, session_id: str, to: str) -> Rewinding:
        """See `Monitor`."""
        session = await self._reach(access, session_id)
        rewinding = await session.rewind(to)
        if access.name:
            count = len(rewinding.undone)
            cells = "a cell" if count == 1 else f"{count} cells"
            session.authors.note(f"{access.name} rewound the session, which undid {cells},")
        return rewinding

    async def end(self, access: Access, session_id: str) -> None:
        """See `Monitor`."""
        row = await self._row(access, session_id)
        session = await self._registry.reach(session_id, row.principal)
        await self._registry.closer.close(session, f"was ended by {access.name}" if access.name else "was cleared")

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """See `Monitor`."""
        session = await self._reach(access, session_id)
        with session.held():
            await session.write_file(name, content)
        if access.name:
            session.authors.note(f"{access.name} put {name[:_MOST_TEXT]!r} into the session folder")

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """See `Monitor`."""
        session = await self._reach(access, session_id)
        await asyncio.to_thread(session.workspace.delete, name)
        if access.name:
            session.authors.note(f"{access.name} deleted {name[:_MOST_TEXT]!r} from the session folder")

    async def answer(
        self, access: Access, question_id: str, action: Literal["accept", "decline"], values: dict[str, JsonValue]
    ) -> InboxQuestion:
        """See `Monitor`."""
        inbox, whose = self._registry.inbox, _whose(access)
        by = access.name or access.principal
        await inbox.answer(question_id, whose, action=action, values=values, by=by, where="console")
        return inbox.find(question_id, whose)

    async def note_presence(self, access: Access) -> None:
        """See `Monitor`."""
        self._registry.inbox.note_presence(_whose(access))

    async def _session_entry(self, session_id: str) -> SessionEntry | None:
        row = await self._history.session(session_id)
        return self._entries.session(row) if row is not None else None

    # Access

    async def _row(self, access: Access, session_id: str, *, is_counted: bool = False) -> SessionRecord:
        row = await self._history.session(session_id, is_counted=is_counted)
        is_elsewhere = row is not None and row.state == "live" and row.run != self._run
        if row is None or not access.may_see(row.principal) or is_elsewhere:
            raise SessionNotFound(f"session {session_id[:64]!r} does not exist")
        return row

    async def _execution_row(self, access: Access, execution_id: str) -> ExecutionRow:
        row = await self._history.execution(execution_id)
        is_elsewhere = row is not None and row.live_run not in ("", self._run)
        if row is None or not access.may_see(row.principal) or is_elsewhere:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} does not exist")
        return row

    async def _reach(self, access: Access, session_id: str) -> Session:
        row = await self._row(access, session_id)
        return await self._registry.reach(session_id, row.principal)

    async def _workspace(self, access: Access, session_id: str) -> Workspace:
        row = await self._row(access, session_id)
        folders, _ = self._registry.look(session_id, row.principal)
        return Workspace(folders.workspace)


def _read_part(workspace: Workspace, name: str, offset: int, length: int) -> FilePart:
    file, status = workspace.open_read(name)
    with file:
        if length:
            file.seek(offset)
        content = file.read(length)
    return FilePart(content=content, size=status.st_size, version=f"{status.st_mtime_ns:x}")


def _whose(access: Access) -> str | None:
    """Return whose questions somebody may answer; None for those of all owners."""
    return None if access.is_operator else access.principal


def _journal_states(state: str) -> tuple[Literal["unborn", "live", "asleep", "gone"], ...]:
    if state == "asleep":
        return ("asleep",)
    if state == "gone":
        return ("gone",)
    return ("live",) if state else ("live", "asleep")


def _session_place(cursor: str) -> tuple[float, str]:
    created_at, _, session_id = place_of(cursor).partition(" ")
    try:
        return float(created_at), session_id
    except ValueError:
        raise InvalidArgument("the cursor is none that this list gave", hint="Pass `next` unchanged") from None
