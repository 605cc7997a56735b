"""The engine of another process: each call is a request of the HTTP API, made by the table in `operations.py`.

Over the socket of a server of this user, who says for whom they ask. Knows nothing of what the server does with a call.
"""

import json
import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import httpx2
from pydantic import JsonValue, ValidationError

from belljar import ipc
from belljar.engine.contract import MAX_PART_BYTES, MAX_WAIT_S, STREAM_CHARS, Access, Asks, SessionFilter
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
    Server,
    ServerEvent,
    SessionDetail,
    SessionEntry,
    SessionPage,
    Step,
    Submitted,
    TableRows,
    UsageHistory,
    VariableList,
)
from belljar.engine.operations import IN_PATH, JSON, OPERATIONS, PREFIX, ApiProblem, EventPage, Operation
from belljar.errors import (
    BelljarError,
    EngineError,
    ExecutionNotFound,
    FileMissing,
    InvalidArgument,
    SessionNotFound,
    named_error,
)
from belljar.models import ExecutionResult, OutputEvent, Rewinding, SessionFork
from belljar.outputs.export_formats import ExportFormat
from belljar.questions.models import InboxQuestion
from belljar.servers import SPEAKER_HEADERS

CONNECT_S: Final = 2.0
_VERSIONS: Final = "Servers and commands of one data directory are best of one version: restart the older ones"
_MOST_ID_CHARS: Final = 400
_ABSENCES: Final[dict[str, type[BelljarError]]] = {"session_id": SessionNotFound, "execution_id": ExecutionNotFound}
_BEYOND: Final = 416
"""The status for a range behind the end of a file, which is no error here."""


class ServerGone(EngineError):
    """A server hung up or does not answer."""

    code = "server-gone"


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
    ) -> AsyncGenerator[Step]:
        """See `Engine`."""
        wanted = {"environment": environment, "reason": reason, "gpus": gpus, "patience_s": patience_s}
        async for step in self._stream("open_session", access, Step, **wanted):
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

    async def install(self, access: Access, session_id: str, packages: list[str]) -> AsyncGenerator[Step]:
        """See `Engine`."""
        async for step in self._stream("install", access, Step, session_id=session_id, packages=packages):
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

    async def fork(self, access: Access, session_id: str, at: str | int = "", *, reseed: bool = False) -> SessionFork:
        """See `Engine`."""
        return await self._call("fork", access, session_id=session_id, at=at, reseed=reseed)

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


class RemoteEngine(CalledEngine):
    """The `Engine` of one server, by the socket in the folder of the server."""

    def __init__(self, socket: Path, patience_s: float | None = None) -> None:
        self._socket = socket
        self._patience_s = patience_s

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        operation = _operation(verb, arguments)
        async with self._send(operation, access, arguments) as response:
            content = await response.aread()
        if verb == "read_part":
            return _file_part(response, content if arguments["length"] else b"")
        if operation.answer is None:
            return content if operation.media != JSON else None
        try:
            # A newer server may tell more.
            found = operation.answer.model_validate_json(content, extra="ignore")
        except ValidationError as error:
            raise EngineError(
                f"a server answered {verb} in another form than this version knows", hint=_VERSIONS
            ) from error
        if isinstance(found, EventPage):
            return found.items, found.next is not None
        return getattr(found, operation.wrapped) if operation.wrapped else found

    async def _stream(self, verb: str, access: Access, kind: type[Any], **arguments: Any) -> AsyncGenerator[Any]:
        async with self._send(_operation(verb, arguments), access, arguments) as response:
            fields: dict[str, str] = {}
            async for line in _lines(response):
                name, _, value = line.partition(": ")
                if name in ("event", "id", "data"):
                    fields[name] = value
                elif not line and fields:
                    place = {"kind": fields.get("event", "")} | ({"id": fields["id"]} if "id" in fields else {})
                    data, fields = json.loads(fields.get("data", "{}")), {}
                    if place["kind"] == "error":
                        raise named_error(f"{data['code']}: {data['message']}", data["hint"])
                    try:
                        happened = kind.model_validate(data | place, extra="ignore")
                    except ValidationError:
                        continue  # this version does not know what a newer server tells
                    yield happened

    @asynccontextmanager
    async def _send(
        self, operation: Operation, access: Access, arguments: dict[str, Any]
    ) -> AsyncGenerator[httpx2.Response]:
        """Send a request over a connection of its own; what the server refuses is raised as the error that it names."""
        request = _request(operation, arguments)
        request["headers"] = _speaker(access) | request.get("headers", {})
        # No TLS is spoken, but without a context httpx reads all certificates of the host, which takes 46 ms.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            with ipc.reachable(self._socket) as address:
                async with (
                    httpx2.AsyncClient(
                        transport=httpx2.AsyncHTTPTransport(uds=address, verify=context),
                        timeout=httpx2.Timeout(self._patience_s, connect=CONNECT_S),
                        base_url="http://belljar",
                    ) as client,
                    client.stream(operation.method, **request) as response,
                ):
                    if response.status_code >= 400 and response.status_code != _BEYOND:
                        raise _refusal(response.status_code, await response.aread())
                    yield response
        except httpx2.InvalidURL as error:
            raise InvalidArgument(f"an argument of {operation.verb} is too long", hint="Pass a shorter one") from error
        except (httpx2.TransportError, OSError) as error:
            raise ServerGone("a server has hung up, or does not answer") from error


def _operation(verb: str, arguments: dict[str, Any]) -> Operation:
    """Return the line of the table for a verb: of several, the first whose path takes these arguments."""
    lines, given = [one for one in OPERATIONS if one.verb == verb], {name for name in arguments if arguments[name]}
    return next((one for one in lines if given.issuperset(one.names_in_path)), lines[0])


def _speaker(access: Access) -> dict[str, str]:
    via = "terminal" if access.via == "terminal" else "console"
    said = (access.principal, "1" if access.is_operator else "0", access.name, via)
    return {name: quote(value, safe="") for name, value in zip(SPEAKER_HEADERS, said, strict=True)}


def _request(operation: Operation, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the request for these arguments of a verb, as httpx takes it."""
    left = dict(arguments)
    if isinstance(wanted := left.pop("wanted", None), SessionFilter):
        left |= asdict(wanted)
    request: dict[str, Any] = {
        "url": PREFIX + IN_PATH.sub(lambda part: _in_path(part, left.pop(part[1])), operation.path)
    }
    match operation.verb:
        case "read_part":
            first, length = left.pop("offset"), min(max(left.pop("length"), 1), MAX_PART_BYTES)
            request["headers"] = {"Range": f"bytes={first}-{first + length - 1}"}
        case "rows":
            first = left.pop("first_column")
            left["columns"] = f"{first}:{first + left['columns']}"
        case "write_file":
            request["content"] = left.pop("content")
        case "submit":
            request["headers"] = {"Idempotency-Key": _checked_key(key)} if (key := left.pop("key")) else {}
        case _:
            pass
    if operation.query:
        named = {name: known.argument or name for name, known in operation.query.items()}
        request["params"] = {name: _text(left.pop(argument)) for name, argument in named.items() if argument in left}
    if operation.body is not None:
        for name in _ABSENCES:
            left.pop(name, None)  # empty, or in the path
        # In ASCII: a lone surrogate gets there, and the server says what is wrong with it.
        request["content"] = json.dumps(left).encode()
    return request


def _in_path(part: re.Match[str], value: object) -> str:
    """Return an argument as part of a path.

    What cannot be one segment is refused as what does not exist, because with a slash in it, it would be another path:
    the id of a session must not reach a file of one. Dots are hidden, because clients resolve `..` before they send.
    """
    text = str(value)
    if ":path" not in part[0] and not (0 < len(text) <= _MOST_ID_CHARS and "/" not in text and _is_unicode(text)):
        absence = _ABSENCES.get(part[1], FileMissing)
        raise absence(f"{part[1].removesuffix('_id')} {text[:64]!r} does not exist")
    return quote(_text(text), safe="/").replace(".", "%2E")


def _text(value: str) -> str:
    """Return a text for a URL, or refuse one that none can have."""
    if not _is_unicode(str(value)):
        raise InvalidArgument(f"{str(value)[:64]!r} is not valid Unicode", hint="Leave the lone surrogates out")
    return value


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _checked_key(key: str) -> str:
    """Return an idempotency key as a header has it."""
    if not (key.isascii() and key.isprintable()):
        raise InvalidArgument(
            f"the key {key[:64]!r} cannot be sent", hint="Pass printable ASCII characters, such as a UUID"
        )
    return key


def _file_part(response: httpx2.Response, content: bytes) -> FilePart:
    size, _, version = response.headers.get("ETag", "").strip('"').partition("-")
    return FilePart(content=b"" if response.status_code == _BEYOND else content, size=int(size, 16), version=version)


def _refusal(status: int, content: bytes) -> BelljarError:
    try:
        detail = ApiProblem.model_validate_json(content, extra="ignore").error
    except ValidationError:
        return EngineError(f"a server answered with {status}", hint=f"Its log has the reason. {_VERSIONS}")
    return named_error(f"{detail.code}: {detail.message}", detail.hint)


async def _lines(response: httpx2.Response) -> AsyncGenerator[str]:
    """Yield the lines of a stream. httpx would end them at U+2028 and the like too, which JSON may have in texts."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()
