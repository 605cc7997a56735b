"""The engine of all servers of a data directory, over their sockets: for `belljar console`, where none has an address.

Each call goes to the server that has the session. What is on disk only any of them can answer. Knows nothing of what a
server does with a call.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import JsonValue

from belljar import ipc
from belljar.attachments.messages import EngineRequest
from belljar.control import MAX_MESSAGE_BYTES, TIMEOUT_S, server_sockets
from belljar.engine.contract import STREAM_CHARS, Access, SessionFilter, cursor_of
from belljar.engine.models import (
    CallEntry,
    EntryPage,
    ExecutionEntry,
    FileListing,
    FilePart,
    Followed,
    Health,
    NameCompletion,
    OutputLines,
    Server,
    ServerEvent,
    SessionDetail,
    SessionEntry,
    SessionPage,
    UsageHistory,
)
from belljar.engine.operator_socket import STREAMS, EngineCall, EngineReply, answer_form, sent_arguments
from belljar.engine.packages import PackageList
from belljar.engine.variables import TableRows, VariableList
from belljar.errors import (
    BelljarError,
    EngineError,
    ExecutionNotFound,
    QuestionClosed,
    QuestionNotFound,
    SessionNotFound,
    named_error,
)
from belljar.executions.inbox import InboxQuestion
from belljar.models import ExecutionResult, OutputEvent, Rewinding, SessionFork
from belljar.outputs.export_formats import ExportFormat

_T = TypeVar("_T")
_LOOK_S: Final = 2.0


class ServerGone(EngineError):
    """A server hung up or does not answer."""

    code = "server-gone"


class RemoteEngine:
    """An `Engine` of every server that uses a data directory."""

    def __init__(self, data_directory: Path) -> None:
        self._data_directory = data_directory

    # The servers

    async def _sockets(self) -> list[Path]:
        return await asyncio.to_thread(server_sockets, self._data_directory)

    async def _all(self, access: Access, method: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Return the answers of all servers that answer, by the names of the servers."""
        paths = await self._sockets()
        answers = await asyncio.gather(
            *(_ask(path, access, method, arguments) for path in paths), return_exceptions=True
        )
        found = [(path.parent.name, answer) for path, answer in zip(paths, answers, strict=True)]
        refusals = [answer for _, answer in found if isinstance(answer, BaseException)]
        good = [(name, answer) for name, answer in found if not isinstance(answer, BaseException)]
        if not good:
            raise next((one for one in refusals if not isinstance(one, ServerGone)), None) or _nobody()
        return good

    async def _first(
        self,
        absence: type[BelljarError] | tuple[type[BelljarError], ...],
        access: Access,
        method: str,
        **arguments: Any,
    ) -> Any:
        """Return the answer of the server that has what is meant, or raise that none has it."""
        missing: BelljarError | None = None
        for path in await self._sockets():
            try:
                return await _ask(path, access, method, arguments)
            except ServerGone:
                continue
            except absence as error:
                missing = error
        raise missing or _nobody()

    async def _of_session(self, access: Access, method: str, session_id: str, **arguments: Any) -> Any:
        return await self._first(SessionNotFound, access, method, session_id=session_id, **arguments)

    async def _of_execution(self, access: Access, method: str, execution_id: str, **arguments: Any) -> Any:
        return await self._first(ExecutionNotFound, access, method, execution_id=execution_id, **arguments)

    # Looking

    async def health(self, access: Access) -> Health:
        """See `Engine`. Of several servers the checks have the name of each before them."""
        answers: list[tuple[str, Health]] = await self._all(access, "health")
        checks = {f"{name} {check}": state for name, health in answers for check, state in health.checks.items()}
        gauges: dict[str, float] = {}
        for _, health in answers:
            for gauge, value in health.gauges.items():
                gauges[gauge] = gauges.get(gauge, 0) + value
        own = [server for name, health in answers for server in health.servers if server.name == name]
        silent = [path.parent.name for path in await self._sockets() if path.parent.name not in dict(answers)]
        others = [Server(name=name, pid=_pid(name), sessions=0, is_answering=False) for name in silent]
        is_ready = all(health.status == "ready" for _, health in answers)
        return Health(
            status="ready" if is_ready else "not ready",
            checks=checks,
            gauges=gauges,
            limits=answers[0][1].limits,
            version=answers[0][1].version,
            servers=[*own, *others],
        )

    async def usage(self, access: Access) -> UsageHistory:
        """See `Engine`. What servers of later start have not measured counts as nothing."""
        answers: list[tuple[str, UsageHistory]] = await self._all(access, "usage")
        names = {name: None for _, usage in answers for name in usage.gauges}
        sums = {name: _summed([usage.gauges.get(name, []) for _, usage in answers]) for name in names}
        return UsageHistory(interval_s=answers[0][1].interval_s, gauges=sums)

    async def sessions(self, access: Access, wanted: SessionFilter, cursor: str = "", limit: int = 50) -> SessionPage:
        """See `Engine`. Cursors are places in time, so they mean the same to every server."""
        pages: list[tuple[str, SessionPage]] = await self._all(
            access, "sessions", wanted=wanted, cursor=cursor, limit=limit
        )
        # Those that sleep are told by every server.
        entries = {entry.session_id: entry for _, page in pages for entry in page.items}
        ordered = sorted(entries.values(), key=lambda entry: (entry.created_at, entry.session_id), reverse=True)
        shown = ordered[:limit]
        has_more = len(ordered) > limit or any(page.next for _, page in pages)
        ends = [page.next for _, page in pages if page.next]
        after = ",".join(page.after for _, page in pages)
        if has_more and len(pages) == 1:
            return SessionPage(items=shown, next=ends[0] if ends else None, after=after)
        return SessionPage(items=shown, next=_place(shown[-1]) if has_more and shown else None, after=after)

    async def session(self, access: Access, session_id: str) -> SessionDetail:
        """See `Engine`."""
        return await self._of_session(access, "session", session_id)

    async def executions(
        self, access: Access, session_id: str, cursor: str = "", limit: int = 50
    ) -> EntryPage[ExecutionEntry]:
        """See `Engine`."""
        return await self._of_session(access, "executions", session_id, cursor=cursor, limit=limit)

    async def blocks(self, access: Access, session_id: str, size: int) -> list[str]:
        """See `Engine`."""
        return await self._of_session(access, "blocks", session_id, size=size)

    async def execution(self, access: Access, execution_id: str) -> ExecutionEntry:
        """See `Engine`."""
        return await self._of_execution(access, "execution", execution_id)

    async def result(self, access: Access, execution_id: str) -> ExecutionResult:
        """See `Engine`."""
        return await self._of_execution(access, "result", execution_id)

    async def output(
        self, access: Access, execution_id: str, since: int = 0, limit: int = 500
    ) -> tuple[list[OutputEvent], bool]:
        """See `Engine`."""
        return await self._of_execution(access, "output", execution_id, since=since, limit=limit)

    async def excerpt(
        self, access: Access, execution_id: str, upto: int = 0, chars: int = STREAM_CHARS
    ) -> list[OutputEvent]:
        """See `Engine`."""
        return await self._of_execution(access, "excerpt", execution_id, upto=upto, chars=chars)

    async def event(self, access: Access, execution_id: str, sequence: int) -> OutputEvent:
        """See `Engine`."""
        return await self._of_execution(access, "event", execution_id, sequence=sequence)

    async def lines(self, access: Access, execution_id: str, first: int, count: int, search: str = "") -> OutputLines:
        """See `Engine`."""
        return await self._of_execution(access, "lines", execution_id, first=first, count=count, search=search)

    async def display(self, access: Access, execution_id: str, name: str) -> bytes:
        """See `Engine`."""
        return await self._of_execution(access, "display", execution_id, name=name)

    async def calls(self, access: Access, execution_id: str) -> list[CallEntry]:
        """See `Engine`."""
        return await self._of_execution(access, "calls", execution_id)

    async def decisions(self, access: Access, *, execution_id: str = "", limit: int = 50) -> list[dict[str, JsonValue]]:
        """See `Engine`. The log is one file for all servers."""
        return await self._first(ExecutionNotFound, access, "decisions", execution_id=execution_id, limit=limit)

    async def notebook(self, access: Access, session_id: str, form: ExportFormat) -> bytes:
        """See `Engine`."""
        return await self._of_session(access, "notebook", session_id, form=form)

    async def files(self, access: Access, session_id: str, path: str = "", after: str = "") -> FileListing:
        """See `Engine`."""
        return await self._of_session(access, "files", session_id, path=path, after=after)

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """See `Engine`."""
        return await self._of_session(access, "read_part", session_id, name=name, offset=offset, length=length)

    async def complete(self, access: Access, session_id: str, code: str, cursor: int) -> NameCompletion:
        """See `Engine`."""
        return await self._of_session(access, "complete", session_id, code=code, cursor=cursor)

    async def variables(self, access: Access, session_id: str, offset: int = 0, limit: int = 500) -> VariableList:
        """See `Engine`."""
        return await self._of_session(access, "variables", session_id, offset=offset, limit=limit)

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
        return await self._of_session(access, "rows", session_id, name=name, **window)

    async def packages(self, access: Access, session_id: str) -> PackageList:
        """See `Engine`."""
        return await self._of_session(access, "packages", session_id)

    async def questions(self, access: Access, state: str = "waiting") -> list[InboxQuestion]:
        """See `Engine`."""
        answers = await self._all(access, "questions", state=state)
        found: dict[str, InboxQuestion] = {one.id: one for _, answer in answers for one in answer}
        return [*found.values()]

    # What happens

    async def server_events(self, access: Access, after: str = "") -> AsyncGenerator[ServerEvent]:
        """See `Engine`. A place has the place of every server in it; servers that start later join, from the start."""
        places: dict[str, str] = {}
        for part in after.split(","):
            name, _, number = part.rpartition(":")
            places |= {name: number} if name else {}
        queue: asyncio.Queue[ServerEvent] = asyncio.Queue(1_000)
        listening: dict[str, asyncio.Task[None]] = {}

        async def listen(path: Path, place: str) -> None:
            with suppress(ServerGone):
                async for item in _stream(path, access, "server_events", {"after": place}):
                    await queue.put(item)

        async def look() -> None:
            is_from_now = not after
            while True:
                for path in await self._sockets():
                    name = path.parent.name
                    if name not in listening or listening[name].done():
                        place = "" if is_from_now else f"{name}:{places.get(name, '0')}"
                        listening[name] = asyncio.ensure_future(listen(path, place))
                is_from_now = False
                await asyncio.sleep(_LOOK_S)

        looking = asyncio.ensure_future(look())
        try:
            while True:
                item = await queue.get()
                name, _, number = item.id.rpartition(":")
                places[name] = number
                place = ",".join(f"{one}:{at}" for one, at in places.items())
                yield item.model_copy(update={"id": place})
        finally:
            tasks = [looking, *listening.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """See `Engine`. Ends when the session's server goes; a reader that comes back finds the next one."""
        missing: BelljarError | None = None
        for path in await self._sockets():
            try:
                async for item in _stream(path, access, "follow", {"session_id": session_id, "after": after}):
                    after = item.id or after
                    yield item
            except SessionNotFound as error:
                missing = error
            except ServerGone:
                missing = missing or _nobody()
            else:
                return
        raise missing or _nobody()

    # Acting

    async def create(self, access: Access, environment: str = "", reason: str = "") -> SessionEntry:
        """See `Engine`. The first server that answers opens it."""
        return await self._first(ServerGone, access, "create", environment=environment, reason=reason)

    async def run_cell(
        self, access: Access, session_id: str, code: str, timeout_s: float | None = None, key: str = ""
    ) -> str:
        """See `Engine`."""
        return await self._of_session(access, "run_cell", session_id, code=code, timeout_s=timeout_s, key=key)

    async def install(self, access: Access, session_id: str, requirements: list[str]) -> str:
        """See `Engine`."""
        return await self._of_session(access, "install", session_id, requirements=requirements)

    async def interrupt(self, access: Access, session_id: str) -> list[str]:
        """See `Engine`."""
        return await self._of_session(access, "interrupt", session_id)

    async def fork(self, access: Access, session_id: str, at: str = "") -> SessionFork:
        """See `Engine`."""
        return await self._of_session(access, "fork", session_id, at=at)

    async def rewind(self, access: Access, session_id: str, to: str) -> Rewinding:
        """See `Engine`."""
        return await self._of_session(access, "rewind", session_id, to=to)

    async def end(self, access: Access, session_id: str) -> None:
        """See `Engine`."""
        await self._of_session(access, "end", session_id)

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """See `Engine`."""
        await self._of_session(access, "write_file", session_id, name=name, content=content)

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """See `Engine`."""
        await self._of_session(access, "delete_file", session_id, name=name)

    async def answer(
        self, access: Access, question_id: str, action: Literal["accept", "decline"], values: dict[str, JsonValue]
    ) -> InboxQuestion:
        """See `Engine`."""
        # A server that has not put the question knows of it from the journal, and says that another one waits for it.
        absence = (QuestionNotFound, QuestionClosed)
        return await self._first(absence, access, "answer", question_id=question_id, action=action, values=values)

    async def note_presence(self, access: Access) -> None:
        """See `Engine`."""
        await self._all(access, "note_presence")


def _nobody() -> EngineError:
    return EngineError("no running server answers", hint="Start one with `belljar serve`")


def _summed(series: list[list[float]]) -> list[float]:
    """Return the sums of values that all end now."""
    ends = zip_longest(*(reversed(values) for values in series), fillvalue=0.0)
    return [round(sum(values), 1) for values in ends][::-1]


def _pid(name: str) -> int:
    number = name.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _place(entry: SessionEntry) -> str:
    return cursor_of(f"{datetime.fromisoformat(entry.created_at).timestamp()!r} {entry.session_id}")


# One connection


async def _connect(path: Path, access: Access, method: str, arguments: dict[str, Any]) -> ipc.MessageStream:
    call = EngineCall(
        method=method,
        principal=access.principal,
        is_operator=access.is_operator,
        name=access.name,
        arguments=sent_arguments(arguments),
    )
    stream = await _call_with_timeout(lambda: ipc.open_stream(path, limit_bytes=MAX_MESSAGE_BYTES))
    try:
        await _call_with_timeout(lambda: stream.send(EngineRequest().model_dump()))
        await _call_with_timeout(lambda: stream.send(call.model_dump()))
    except BaseException:
        stream.close()
        raise
    return stream


async def _call_with_timeout(act: Callable[[], Awaitable[_T]]) -> _T:
    """Do one thing with a server that must not take long, or raise that it is gone."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await act()
    except (OSError, TimeoutError) as error:
        raise ServerGone("a server has hung up, or does not answer") from error


async def _receive(stream: ipc.MessageStream) -> EngineReply:
    try:
        reply = await stream.receive(EngineReply.model_validate_json)
    except (OSError, ipc.Malformed) as error:
        raise ServerGone("a server has hung up") from error
    if reply.error:
        raise named_error(reply.error, reply.hint)
    return reply


async def _ask(path: Path, access: Access, method: str, arguments: dict[str, Any]) -> Any:
    stream = await _connect(path, access, method, arguments)
    form = answer_form(method)
    try:
        reply = await _receive(stream)
        return form.validate_json(json.dumps(reply.value)) if form is not None else None
    finally:
        stream.close()


async def _stream(path: Path, access: Access, method: str, arguments: dict[str, Any]) -> AsyncGenerator[Any]:
    stream = await _connect(path, access, method, arguments)
    try:
        while not (reply := await _receive(stream)).is_end:
            yield STREAMS[method].model_validate(reply.value)
    finally:
        stream.close()
