"""An engine elsewhere: every verb is one call, made by its name. How it is made is up to who extends it."""

from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import JsonValue

from belljar.engine.contract import MAX_WAIT_S, STREAM_CHARS, Access, Asks, SessionFilter
from belljar.engine.models import (
    CallEntry,
    ConsoleLink,
    EntryPage,
    ExecutionEntry,
    ExecutionProgress,
    FileListing,
    FilePart,
    Followed,
    Health,
    LiveSession,
    NameCompletion,
    OutputLines,
    PackageList,
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
from belljar.models import ExecutionResult, OutputEvent, Rewinding, SessionFork
from belljar.outputs.export_formats import ExportFormat
from belljar.questions.models import InboxQuestion


class CalledEngine:
    """An `Engine` whose verbs all go through `_call`, by their names; see `Engine` for what they do."""

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        raise NotImplementedError

    def _stream(self, verb: str, access: Access, kind: type[Any], **arguments: Any) -> AsyncGenerator[Any]:
        raise NotImplementedError

    async def health(self, access: Access) -> Health:
        """See `Engine`."""
        return await self._call("health", access)

    async def servers(self, access: Access) -> list[Server]:
        """See `Engine`."""
        return await self._call("servers", access)

    async def console_link(self, access: Access) -> ConsoleLink:
        """See `Engine`."""
        return await self._call("console_link", access)

    async def usage(self, access: Access) -> UsageHistory:
        """See `Engine`."""
        return await self._call("usage", access)

    async def sessions(self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50) -> SessionPage:
        """See `Engine`."""
        return await self._call("sessions", access, wanted=wanted, cursor=cursor, limit=limit)

    async def live_sessions(self, access: Access, *, asleep: bool = False) -> list[LiveSession]:
        """See `Engine`."""
        return await self._call("live_sessions", access, asleep=int(asleep))

    async def session(self, access: Access, session_id: str) -> SessionDetail:
        """See `Engine`."""
        return await self._call("session", access, session_id=session_id)

    async def executions(
        self, access: Access, session_id: str, cursor: str = "", limit: int = 50
    ) -> EntryPage[ExecutionEntry]:
        """See `Engine`."""
        return await self._call("executions", access, session_id=session_id, cursor=cursor, limit=limit)

    async def blocks(self, access: Access, session_id: str, size: int) -> list[str]:
        """See `Engine`."""
        return await self._call("blocks", access, session_id=session_id, size=size)

    async def execution(self, access: Access, execution_id: str) -> ExecutionEntry:
        """See `Engine`."""
        return await self._call("execution", access, execution_id=execution_id)

    async def result(self, access: Access, execution_id: str, since: int = 0) -> ExecutionResult:
        """See `Engine`."""
        return await self._call("result", access, execution_id=execution_id, since=since)

    async def output(
        self, access: Access, execution_id: str, since: int = 0, limit: int = 500
    ) -> tuple[list[OutputEvent], bool]:
        """See `Engine`."""
        return await self._call("output", access, execution_id=execution_id, since=since, limit=limit)

    async def excerpt(
        self, access: Access, execution_id: str, upto: int = 0, chars: int = STREAM_CHARS
    ) -> list[OutputEvent]:
        """See `Engine`."""
        return await self._call("excerpt", access, execution_id=execution_id, upto=upto, chars=chars)

    async def event(self, access: Access, execution_id: str, sequence: int) -> OutputEvent:
        """See `Engine`."""
        return await self._call("event", access, execution_id=execution_id, sequence=sequence)

    async def lines(self, access: Access, execution_id: str, first: int, count: int, search: str = "") -> OutputLines:
        """See `Engine`."""
        return await self._call("lines", access, execution_id=execution_id, first=first, count=count, search=search)

    async def display(self, access: Access, execution_id: str, name: str) -> bytes:
        """See `Engine`."""
        return await self._call("display", access, execution_id=execution_id, name=name)

    async def calls(self, access: Access, execution_id: str) -> list[CallEntry]:
        """See `Engine`."""
        return await self._call("calls", access, execution_id=execution_id)

    async def decisions(self, access: Access, *, execution_id: str = "", limit: int = 50) -> list[dict[str, JsonValue]]:
        """See `Engine`."""
        if execution_id:
            return await self._call("decisions", access, execution_id=execution_id)
        return await self._call("decisions", access, limit=limit)

    async def notebook(self, access: Access, session_id: str, form: ExportFormat) -> bytes:
        """See `Engine`."""
        return await self._call("notebook", access, session_id=session_id, form=form)

    async def files(
        self, access: Access, session_id: str, path: str = "", after: str = "", *, recursive: bool = False
    ) -> FileListing:
        """See `Engine`."""
        below = int(recursive)
        return await self._call("files", access, session_id=session_id, path=path, after=after, recursive=below)

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """See `Engine`."""
        return await self._call("read_part", access, session_id=session_id, name=name, offset=offset, length=length)

    async def complete(self, access: Access, session_id: str, code: str, cursor: int) -> NameCompletion:
        """See `Engine`."""
        return await self._call("complete", access, session_id=session_id, code=code, cursor=cursor)

    async def variables(self, access: Access, session_id: str, offset: int = 0, limit: int = 500) -> VariableList:
        """See `Engine`."""
        return await self._call("variables", access, session_id=session_id, offset=offset, limit=limit)

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
        """See `Engine`."""
        window = {"offset": offset, "limit": limit, "first_column": first_column, "columns": columns, "order": order}
        return await self._call("rows", access, session_id=session_id, name=name, **window)

    async def packages(self, access: Access, session_id: str) -> PackageList:
        """See `Engine`."""
        return await self._call("packages", access, session_id=session_id)

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """See `Engine`."""
        return await self._call("questions", access, state=state)

    async def server_events(self, access: Access, after: str = "") -> AsyncGenerator[ServerEvent]:
        """See `Engine`."""
        async for item in self._stream("server_events", access, ServerEvent, after=after):
            yield item

    async def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """See `Engine`. Ends when the session's server goes; a reader that comes back finds the next one."""
        async for item in self._stream("follow", access, Followed, session_id=session_id, after=after):
            yield item

    async def create(
        self, access: Access, environment: str = "", reason: str = "", gpus: int | None = None
    ) -> SessionEntry:
        """See `Engine`."""
        return await self._call("create", access, environment=environment, reason=reason, gpus=gpus)

    async def open_session(
        self,
        access: Access,
        environment: str = "",
        reason: str = "",
        gpus: int | None = None,
        patience_s: float | None = None,
    ) -> AsyncGenerator[ProgressStep]:
        """See `Engine`."""
        wanted = {"environment": environment, "reason": reason, "gpus": gpus, "patience_s": patience_s}
        async for step in self._stream("open_session", access, ProgressStep, **wanted):
            yield step

    async def rename(self, access: Access, session_id: str, reason: str) -> SessionEntry:
        """See `Engine`."""
        return await self._call("rename", access, session_id=session_id, reason=reason)

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
        cell = {"code": code, "timeout_s": timeout_s, "filename": filename, "asks": asks, "client": client}
        cell |= {"keeps_files": keeps_files, "wait_s": wait_s}
        return await self._call("submit", access, session_id=session_id, key=key, **cell)

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
        return await self._call("wait", access, execution_id=execution_id, since=since, asked=asked, wait_s=wait_s)

    async def reply(
        self,
        access: Access,
        execution_id: str,
        number: int,
        action: Literal["accept", "decline", "cancel"],
        values: dict[str, JsonValue],
    ) -> None:
        """See `Engine`."""
        answer = {"number": number, "action": action, "values": values}
        await self._call("reply", access, execution_id=execution_id, **answer)

    async def install(self, access: Access, session_id: str, packages: list[str]) -> AsyncGenerator[ProgressStep]:
        """See `Engine`."""
        async for step in self._stream("install", access, ProgressStep, session_id=session_id, packages=packages):
            yield step

    async def queue_install(self, access: Access, session_id: str, packages: list[str]) -> str:
        """See `Engine`."""
        return await self._call("queue_install", access, session_id=session_id, packages=packages)

    async def interrupt(
        self, access: Access, session_id: str = "", *, execution_id: str = "", why: str = "", waits: bool = True
    ) -> list[str]:
        """See `Engine`."""
        wanted = {"session_id": session_id, "execution_id": execution_id, "why": why, "waits": waits}
        return await self._call("interrupt", access, **wanted)

    async def fork(
        self, access: Access, session_id: str, at: str | int = "", *, reseed: bool = False, count: int = 1
    ) -> SessionFork:
        """See `Engine`."""
        return await self._call("fork", access, session_id=session_id, at=at, reseed=reseed, count=count)

    async def rewind(self, access: Access, session_id: str, to: str | int) -> Rewinding:
        """See `Engine`."""
        return await self._call("rewind", access, session_id=session_id, to=to)

    async def end(self, access: Access, session_id: str) -> None:
        """See `Engine`."""
        await self._call("end", access, session_id=session_id)

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """See `Engine`."""
        await self._call("write_file", access, session_id=session_id, name=name, content=content)

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """See `Engine`."""
        await self._call("delete_file", access, session_id=session_id, name=name)

    async def answer(
        self, access: Access, question_id: str, action: Literal["accept", "decline"], values: dict[str, JsonValue]
    ) -> InboxQuestion:
        """See `Engine`."""
        return await self._call("answer", access, question_id=question_id, action=action, values=values)

    async def note_presence(self, access: Access) -> None:
        """See `Engine`."""
        await self._call("note_presence", access)
