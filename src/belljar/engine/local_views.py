"""What the engine shows of this process's sessions: the registry for what is live, the journal for everything else.

Every method checks first what its caller may see. `local.py` adds what they may do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from belljar.distribution import own_version
from belljar.engine.contract import (
    MAX_COMPLETED_CHARS,
    MAX_MATCHES,
    MAX_PART_BYTES,
    STREAM_CHARS,
    Access,
    SessionFilter,
    cursor_of,
    place_of,
    time_cursor,
    time_place,
)
from belljar.engine.entries import Entries, read_execution, telling_line
from belljar.engine.history import ExecutionRow, HistoryReader, SessionQuery, parsed_place
from belljar.engine.models import (
    MAX_LISTED,
    UNFINISHED,
    CallEntry,
    ConsoleLink,
    EntryPage,
    ExecutionEntry,
    FileEntryInfo,
    FileListing,
    FilePart,
    FoundCell,
    FoundPage,
    FoundPiece,
    Health,
    LiveSession,
    NameCompletion,
    OutputLines,
    PackageList,
    Server,
    SessionDetail,
    SessionEntry,
    SessionPage,
    TableRows,
    UsageHistory,
    VariableList,
)
from belljar.engine.packages import list_packages
from belljar.engine.runs import MAX_STEPS_SHOWN, RunDetail, RunEntry, RunSource
from belljar.engine.usage import INTERVAL_S, UsageSampler
from belljar.engine.variables import list_variables, table_part, table_rows
from belljar.errors import (
    Busy,
    ExecutionNotFound,
    FileMissing,
    InvalidArgument,
    OperatorNeeded,
    RunNotFound,
    SessionNotFound,
)
from belljar.files.workspace import FileEntry, Workspace
from belljar.journal.search_index import FoundRow, TextQuery
from belljar.journal.session_records import SessionRecord
from belljar.logs import pseudonym
from belljar.models import OutputEvent, iso_ms
from belljar.outputs.displays import display_uri, read_display
from belljar.outputs.export_formats import ExportFormat, export
from belljar.policy.decision_log import read_decisions
from belljar.questions.models import InboxQuestion
from belljar.sandboxes.limits.table import LIMITS
from belljar.servers import HTTP_SOCKET
from belljar.sessions.history import bounded_notebook
from belljar.sessions.kernel_questions import ask_between_cells
from belljar.sessions.registry import Registry

_LIVE = ("running", "idle", "fresh")
_STATES = ("waiting", *_LIVE, "asleep", "gone")
MAX_TEXT = 200
_LISTED_FILES = 500
_LISTED_BELOW = 2_000


class LocalViews:
    """What an `Engine` shows of the sessions of one registry. `run` is the name of its server in the data directory."""

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
        self.make_console_link: Callable[[], ConsoleLink] | None = None
        """Makes a link to the console; None where the server has none."""
        self.find_runs: Callable[[], RunSource] | None = None
        """Returns what has the runs of workflows; None where there are none."""
        self._history = HistoryReader(data_directory / "journal.sqlite", registry.journal.commit)
        self._usage = UsageSampler(registry.all, registry.changes)
        self._entries = Entries(registry, self._usage)

    def start(self) -> None:
        """Begin to sample memory and processor time."""
        self._usage.start()

    async def aclose(self) -> None:
        """End its threads and its task; may be called twice."""
        await self._usage.aclose()
        await self._history.aclose()

    async def health(self, access: Access) -> Health:
        """See `Engine`. Owners see no numbers that are about others."""
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
            limits=self._limits(),
            version=own_version(),
            servers=await self.servers(access),
        )

    def _limits(self) -> dict[str, float | None]:
        settings = self._registry.settings
        return {
            **{limit.setting: getattr(settings, limit.setting) for limit in LIMITS if limit.is_shown},
            "execution_timeout_s": settings.execution_timeout_s,
            "session_idle_s": settings.session_idle_s,
        }

    async def servers(self, access: Access) -> list[Server]:
        """See `Engine`."""
        own = Server(
            name=self._run,
            pid=int(self._run.partition("-")[0]),
            version=own_version(),
            sessions=sum(access.may_see(session.principal) for session in self._registry.all()),
        )
        if not access.is_operator:
            return [own]
        runs = self._data_directory / "runs"
        names = await asyncio.to_thread(lambda: sorted(path.parent.name for path in runs.glob(f"*/{HTTP_SOCKET}")))
        others = [name for name in names if name != self._run]
        return [own, *(Server(name=name, pid=int(name.partition("-")[0]), sessions=0) for name in others)]

    async def console_link(self, access: Access) -> ConsoleLink:
        """See `Engine`."""
        if not access.is_operator or access.via != "terminal":
            raise OperatorNeeded("only the user of the server gets a link to its console, at a terminal of its machine")
        return self.make_console_link() if self.make_console_link is not None else ConsoleLink()

    async def usage(self, access: Access) -> UsageHistory:
        """See `Engine`."""
        return UsageHistory(
            interval_s=INTERVAL_S, gauges=self._usage.gauges(access.may_see, is_operator=access.is_operator)
        )

    async def sessions(self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50) -> SessionPage:
        """See `Engine`."""
        after = self._place()
        if wanted.state and wanted.state not in _STATES:
            raise InvalidArgument(f"state {wanted.state[:64]!r} is none of {', '.join(_STATES)}")
        owner = wanted.owner if access.is_operator else access.principal
        query = SessionQuery(
            owner=owner,
            run=self._run,
            states=_journal_states(wanted.state),
            text=wanted.text[:MAX_TEXT],
            before=time_place(cursor) if cursor else None,
        )
        rows = await self._history.sessions(query, limit + 1)
        shown = rows[:limit]
        ends = await self._history.ends([row.id for row in shown])
        entries: list[SessionEntry] = []
        for row, entry in zip(shown, self._entries.sessions(shown), strict=True):
            first, last = ends.get(row.id, ("", ""))
            lines = {"first_line": telling_line(first), "last_line": telling_line(last)}
            entries.append(entry.model_copy(update={"cursor": time_cursor(row.created_at, row.id), **lines}))
        if wanted.state in (*_LIVE, "waiting"):
            entries = [entry for entry in entries if entry.state == wanted.state]
        following = time_cursor(shown[-1].created_at, shown[-1].id) if len(rows) > limit else None
        return SessionPage(items=entries, next=following, after=after)

    async def search(self, access: Access, text: str, cursor: str = "", limit: int = 50) -> FoundPage:
        """See `Engine`."""
        before = time_place(cursor) if cursor else None
        place = (round(before[0] * 1_000_000), before[1]) if before else None
        query = TextQuery(text, self._run, place, limit + 1)
        owner = None if access.is_operator else access.principal
        rows, unread = await self._history.search(owner, query)
        names = await self._names({row.session_id for row in rows})
        found = [_found_cell(row, names.get(row.session_id, "")) for row in rows]
        following = found[limit - 1].cursor if len(found) > limit else None
        return FoundPage(items=found[:limit], next=following, unread=unread)

    async def _names(self, session_ids: Collection[str]) -> dict[str, str]:
        """Return what lists call these sessions: by their reason, or by what their first cell does."""
        found = await self._history.names(session_ids)
        return {session_id: reason or telling_line(code) for session_id, (reason, code) in found.items()}

    def _place(self) -> str:
        """Return the place of what happens from now on."""
        return f"{self._run}:{self._registry.changes.number}"

    async def live_sessions(self, access: Access, *, asleep: bool = False) -> list[LiveSession]:
        """See `Engine`."""
        seen = [session for session in self._registry.all() if access.may_see(session.principal)]
        found = [(session.principal, await asyncio.to_thread(session.info)) for session in seen]
        if asleep:
            found += [(access.principal, info) for info in self._registry.asleep(access.principal)]
        return [LiveSession(principal=owner, **info.model_dump()) for owner, info in found]

    async def session(self, access: Access, session_id: str) -> SessionDetail:
        """See `Engine`."""
        row = await self._row(access, session_id, is_counted=True)
        live, settings = self._registry.find_open(session_id), self._registry.settings
        entry = self._entries.session(row)
        first, last = (await self._history.ends([row.id])).get(row.id, ("", ""))
        entry = entry.model_copy(update={"first_line": telling_line(first), "last_line": telling_line(last)})
        return SessionDetail(
            **entry.model_dump(),
            sandbox=settings.sandbox,
            kernel=live.session_kernel.kernel.name if live and live.session_kernel.kernel else "",
            limits=self._limits(),
            variables=[*live.session_kernel.variables] if live else [*row.variables],
            unkept=[*row.unkept],
            origin=row.origin,
            origin_execution=row.origin_execution,
            forks=await self._history.forks(session_id),
        )

    async def executions(
        self, access: Access, session_id: str, cursor: str = "", limit: int = 50
    ) -> EntryPage[ExecutionEntry]:
        """See `Engine`."""
        await self._row(access, session_id)
        before = parsed_place(place_of(cursor)) if cursor else None
        rows = await self._history.executions(session_id, before=before, limit=limit + 1)
        shown = rows[:limit]
        following = cursor_of(str(shown[-1].place)) if len(rows) > limit else None
        return EntryPage(items=[self._entries.execution(row) for row in shown], next=following)

    async def blocks(self, access: Access, session_id: str, size: int) -> list[str]:
        """See `Engine`."""
        await self._row(access, session_id)
        return [cursor_of(str(place)) for place in await self._history.places(session_id, size)]

    async def execution(self, access: Access, execution_id: str) -> ExecutionEntry:
        """See `Engine`."""
        return self._entries.execution(await self._execution_row(access, execution_id))

    async def output(
        self, access: Access, execution_id: str, since: int = 0, limit: int = 500
    ) -> tuple[list[OutputEvent], bool]:
        """See `Engine`."""
        await self._execution_row(access, execution_id)
        return await self._history.output(execution_id, since, limit)

    async def excerpt(
        self, access: Access, execution_id: str, upto: int = 0, chars: int = STREAM_CHARS
    ) -> list[OutputEvent]:
        """See `Engine`."""
        await self._execution_row(access, execution_id)
        return await self._history.excerpt(execution_id, upto, chars)

    async def event(self, access: Access, execution_id: str, sequence: int) -> OutputEvent:
        """See `Engine`."""
        await self._execution_row(access, execution_id)
        event = await self._history.event(execution_id, sequence)
        if event is None:
            raise ExecutionNotFound(f"execution {execution_id} has no output event {sequence}")
        return event

    async def lines(self, access: Access, execution_id: str, first: int, count: int, search: str = "") -> OutputLines:
        """See `Engine`."""
        row = await self._execution_row(access, execution_id)
        is_complete = self._entries.execution(row).status not in UNFINISHED
        page = await self._history.lines(row, first, count, search[:MAX_TEXT], is_complete=is_complete)
        return OutputLines(
            first=first, lines=page.lines, total=page.total, is_complete=is_complete, matches=page.matches
        )

    async def display(self, access: Access, execution_id: str, name: str) -> bytes:
        """See `Engine`."""
        row = await self._execution_row(access, execution_id)
        folder = self._data_directory / "sessions" / row.session_id / "displays"
        content = await asyncio.to_thread(read_display, folder, display_uri(execution_id, name))
        if content is None:
            raise FileMissing(f"execution {execution_id} has no display {name[:64]!r}")
        return content

    async def calls(self, access: Access, execution_id: str) -> list[CallEntry]:
        """See `Engine`."""
        await self._execution_row(access, execution_id)
        return await self._history.calls(execution_id)

    async def decisions(self, access: Access, *, execution_id: str = "", limit: int = 50) -> list[dict[str, JsonValue]]:
        """See `Engine`. The log has pseudonyms in place of owners."""
        if execution_id:
            await self._execution_row(access, execution_id)
        visible_to = None if access.is_operator else pseudonym(access.principal)
        return await asyncio.to_thread(read_decisions, self._data_directory, visible_to, execution_id, limit)

    async def notebook(self, access: Access, session_id: str, form: ExportFormat) -> bytes:
        """See `Engine`."""
        await self._row(access, session_id)
        self._registry.journal.commit()
        return await asyncio.to_thread(_notebook_file, self._data_directory, session_id, form)

    async def files(
        self, access: Access, session_id: str, path: str = "", after: str = "", *, recursive: bool = False
    ) -> FileListing:
        """See `Engine`."""
        workspace = await self._workspace(access, session_id)
        if recursive:
            found = await asyncio.to_thread(workspace.list_page, path, after, _LISTED_BELOW)
            following = found.entries[-1].name if found.rest else None
            return FileListing(items=[*map(_file_info, found.entries)], next=following, rest=found.rest)
        try:
            listing = await asyncio.to_thread(workspace.list_folder, path, after, _LISTED_FILES)
        except FileMissing:
            if path:
                raise
            return FileListing(items=[])  # nothing has run yet
        folders = [folder.name for folder in listing.folders]
        return FileListing(items=[*map(_file_info, listing.files)], folders=folders, next=listing.next_after)

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """See `Engine`."""
        workspace = await self._workspace(access, session_id)
        return await asyncio.to_thread(_read_part, workspace, name, offset, min(length, MAX_PART_BYTES))

    async def complete(self, access: Access, session_id: str, code: str, cursor: int) -> NameCompletion:
        """See `Engine`. Neither wakes the session nor counts as its use."""
        await self._row(access, session_id)
        session = self._registry.find_open(session_id)
        if session is None or len(code) > MAX_COMPLETED_CHARS or cursor > len(code):
            return NameCompletion()
        found = await ask_between_cells(session, lambda kernel: kernel.complete(code, cursor))
        if found is None:
            return NameCompletion()
        return NameCompletion(matches=found.matches[:MAX_MATCHES], start=found.start, end=found.end)

    async def variables(self, access: Access, session_id: str, offset: int = 0, limit: int = 500) -> VariableList:
        """See `Engine`."""
        row, live = await self._row(access, session_id), self._registry.find_open(session_id)
        names = live.session_kernel.variables if live else row.variables
        return await list_variables(live, row.state, [*names], max(0, offset), min(max(1, limit), MAX_LISTED))

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
        """See `Engine`."""
        await self._row(access, session_id)
        part = table_part(offset, limit, first_column, columns, order, where, summaries=bool(summaries))
        return await table_rows(self._registry.find_open(session_id), name, part)

    async def packages(self, access: Access, session_id: str) -> PackageList:
        """See `Engine`."""
        row = await self._row(access, session_id)
        folders, name = self._registry.folders_and_environment(session_id, row.principal)
        environment = self._registry.starter.environments.find_ready(name)
        return await asyncio.to_thread(list_packages, name, folders.layer, environment)

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """See `Engine`."""
        inbox, whose = self._registry.inbox, owner_asked_for(access)
        if state not in ("waiting", "ended"):
            raise InvalidArgument(f"state {state[:64]!r} is neither waiting nor ended")
        found = inbox.waiting(whose) if state == "waiting" else inbox.ended(whose)
        names = await self._names({one.session_id for one in found} - {""})
        return [one.model_copy(update={"session_name": names.get(one.session_id, "")}) for one in found]

    async def runs(
        self, access: Access, state: str = "", text: str = "", cursor: str = "", limit: int = 50
    ) -> EntryPage[RunEntry]:
        """See `Engine`."""
        before = time_place(cursor) if cursor else None
        if self.find_runs is None:
            return EntryPage(items=[])
        found = await self.find_runs().runs(owner_asked_for(access), state, text[:MAX_TEXT], before, limit + 1)
        following = found[limit - 1].cursor if len(found) > limit else None
        return EntryPage(items=found[:limit], next=following)

    async def run(self, access: Access, run_id: str, node: str = "", offset: int = 0, limit: int = 50) -> RunDetail:
        """See `Engine`."""
        most = min(max(1, limit), MAX_STEPS_SHOWN)
        return await self._runs(run_id).run(owner_asked_for(access), run_id, node, max(0, offset), most)

    def _runs(self, run_id: str) -> RunSource:
        if self.find_runs is None:
            raise RunNotFound(f"run {run_id[:64]!r} does not exist: this server has no workflows")
        return self.find_runs()

    # Access

    async def _row(self, access: Access, session_id: str, *, is_counted: bool = False) -> SessionRecord:
        row = await self._history.session(session_id, is_counted=is_counted)
        is_at_another_server = row is not None and row.state == "live" and row.run != self._run
        live = self._registry.find_open(session_id) if self._registry.journal.is_failing else None
        if row is None and live is not None and access.may_see(live.principal):
            raise unwritten(f"session {session_id[:64]!r} is open")
        if row is None or not access.may_see(row.principal) or is_at_another_server:
            raise SessionNotFound(f"session {session_id[:64]!r} does not exist")
        return row

    async def _execution_row(self, access: Access, execution_id: str) -> ExecutionRow:
        row = await read_execution(self._history, execution_id, self._entries.running)
        is_at_another_server = row is not None and row.live_run not in ("", self._run)
        if row is None and self._registry.journal.is_failing:
            raise unwritten(f"execution {execution_id[:64]!r} may have been submitted just now")
        if row is None or not access.may_see(row.principal) or is_at_another_server:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} does not exist")
        return row

    async def _workspace(self, access: Access, session_id: str) -> Workspace:
        row = await self._row(access, session_id)
        folders, _ = self._registry.folders_and_environment(session_id, row.principal)
        return Workspace(folders.workspace)


def unwritten(fact: str) -> Busy:
    """Return the error for what the journal does not have yet, because its file cannot be written (a full disk)."""
    return Busy(
        f"{fact}, and the journal, from which this is read, cannot be written now",
        hint="Try again in 30 seconds; the server's operator finds the reason in its log",
    )


def _found_cell(row: FoundRow, name: str) -> FoundCell:
    submitted_at = row.number / 1_000_000
    return FoundCell(
        execution_id=row.execution_id,
        session_id=row.session_id,
        session_name=name,
        owner=row.owner,
        submitted_at=iso_ms(submitted_at),
        is_undone=row.is_undone,
        code=[FoundPiece(text=piece.text, is_match=piece.is_match) for piece in row.code],
        output=[FoundPiece(text=piece.text, is_match=piece.is_match) for piece in row.output],
        cursor=time_cursor(submitted_at, row.execution_id),
    )


def _file_info(entry: FileEntry) -> FileEntryInfo:
    modified_at = iso_ms(entry.mtime_ns / 1e9)
    return FileEntryInfo(name=entry.name, size=entry.size, modified_at=modified_at, mime_type=entry.mime_type)


def _read_part(workspace: Workspace, name: str, offset: int, length: int) -> FilePart:
    file, status = workspace.open_read(name)
    with file:
        if length:
            file.seek(offset)
        content = file.read(length)
    return FilePart(content=content, size=status.st_size, version=f"{status.st_mtime_ns:x}")


def owner_asked_for(access: Access) -> str | None:
    """Return whose questions somebody may answer; None for those of all owners."""
    return None if access.is_operator else access.principal


def _notebook_file(data_directory: Path, session_id: str, form: ExportFormat) -> bytes:
    """Return a notebook, bounded as `session://…/notebook` is. Any thread may call it: it opens its own connection."""
    read = partial(read_display, data_directory / "sessions" / session_id / "displays")
    return export(bounded_notebook(data_directory, session_id, read), form).encode(errors="replace")


def _journal_states(state: str) -> tuple[Literal["unborn", "live", "asleep", "gone"], ...]:
    if state == "asleep":
        return ("asleep",)
    if state == "gone":
        return ("gone",)
    # The session of a run that waits for a person may sleep meanwhile.
    return ("live",) if state in _LIVE else ("live", "asleep")
