"""The engine of another process: each call is a request of the HTTP API, made by the table in `operations.py`.

Over the socket of a server of this user, who says for whom they ask, or to a server of another machine that believes
what is signed. Knows nothing of what the server does with a call, and takes no more from it than an answer may have.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from belljar import ipc
from belljar.engine.contract import MAX_PART_BYTES, Access, CalledEngine, MapOptions, SessionFilter
from belljar.engine.models import FilePart
from belljar.engine.operations import (
    IN_PATH,
    JSON,
    OPERATIONS,
    PREFIX,
    ApiProblem,
    EventPage,
    Operation,
    ProblemDetail,
)
from belljar.errors import (
    BelljarError,
    EngineError,
    ExecutionNotFound,
    FileMissing,
    InvalidArgument,
    RunNotFound,
    SessionNotFound,
    named_error,
)
from belljar.models import Model
from belljar.request_headers import SPEAKER_HEADERS

if TYPE_CHECKING:
    from belljar.engine.remote_attachments import RemoteAttachment

CONNECT_S: Final = 2.0
_MOST_BYTES: Final = 400 * 1024 * 1024
"""Of an answer, or of one event of a stream: more than the output of an execution has by default, in base64."""
_BODY_S: Final = 30.0
"""Time for an answer to be complete that has begun, plus a second for every _BODY_RATE bytes that arrive."""
_BODY_RATE: Final = 16_384
_EVENT: Final = TypeAdapter(dict[str, Any])
_VERSIONS: Final = "Servers and commands of one data directory are best of one version: restart the older ones"
_MOST_ID_CHARS: Final = 400
_ABSENCES: Final[dict[str, type[BelljarError]]] = {
    "session_id": SessionNotFound,
    "execution_id": ExecutionNotFound,
    "run_id": RunNotFound,
}
_BEYOND: Final = 416
"""The status for a range behind the end of a file, which is no error here."""


class ServerGone(EngineError):
    """A server hung up or does not answer."""

    code = "server-gone"


class ServerSilent(ServerGone):
    """A server has a request, and gave no answer in time that can be read: it may have done what it was asked."""

    code = "server-silent"


Sign = Callable[[bytes, bytes, Sequence[tuple[bytes, bytes]]], list[tuple[bytes, bytes]]]
"""Returns the headers that let another machine believe a request, by its method, target and headers."""


class RemoteEngine(CalledEngine):
    """The `Engine` of one server, by the socket in the folder of the server, or by the URL of one of another machine.

    What is sent to a URL is signed, or has the `credentials` of a caller among its headers; its certificate has to be
    for `tls_name`, or for the URL's host.
    """

    def __init__(
        self,
        place: Path | str,
        patience_s: float | None = None,
        *,
        sign: Sign | None = None,
        tls: ssl.SSLContext | None = None,
        tls_name: str = "",
        credentials: dict[str, str] | None = None,
    ) -> None:
        self._place = place
        self._credentials = credentials
        self._patience_s = patience_s
        self._auth = _Signed(sign) if sign is not None else None
        self._tls = tls
        self._extensions = {"sni_hostname": tls_name} if tls_name else {}

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        operation = _operation(verb, arguments)
        limit_bytes = max(arguments["length"], 1) if verb == "read_part" else _MOST_BYTES
        async with self._send(operation, access, arguments) as response:
            content = await _read(response, verb, limit_bytes)
        try:
            if verb == "read_part":
                return _file_part(response, content if arguments["length"] else b"")
            if operation.answer is None:
                return content if operation.media != JSON else None
            # A newer server may tell more.
            found = operation.answer.model_validate_json(content, extra="ignore")
        except ValueError as error:
            raise _misunderstood(verb) from error
        if isinstance(found, EventPage):
            return found.items, found.next is not None
        return getattr(found, operation.returned) if operation.returned else found

    async def _stream(self, verb: str, access: Access, **arguments: Any) -> AsyncGenerator[Any]:
        operation = _operation(verb, arguments)
        async with self._send(operation, access, arguments) as response:
            fields: dict[str, str] = {}
            async for line in lines_of(response, verb):
                name, _, value = line.partition(": ")
                if name in ("event", "id", "data"):
                    fields[name] = value
                elif not line and fields:
                    told, fields = fields, {}
                    if (happened := _event(operation, told)) is not None:
                        yield happened

    async def attach(self, access: Access, session_id: str = "", environment: str = "") -> "RemoteAttachment":
        """See `Engine`. It is a stream and messages beside it, over a client of its own."""
        from belljar.engine.remote_attachments import RemoteAttachment  # few attach

        headers = self._credentials or _speaker(access)
        attached = RemoteAttachment(self._client(), headers, self._extensions)
        await attached.open(session_id, environment)
        return attached

    @asynccontextmanager
    async def _client(self) -> AsyncGenerator[httpx2.AsyncClient]:
        # Without a context httpx would read all certificates of the host, which takes 46 ms.
        context = self._tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with ipc.reachable(self._place) if isinstance(self._place, Path) else nullcontext() as address:
            async with httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(uds=address, verify=context),
                timeout=httpx2.Timeout(self._patience_s, connect=CONNECT_S),
                base_url="http://belljar" if isinstance(self._place, Path) else self._place,
                auth=self._auth,
            ) as client:
                yield client

    @asynccontextmanager
    async def _send(
        self, operation: Operation, access: Access, arguments: dict[str, Any]
    ) -> AsyncGenerator[httpx2.Response]:
        """Send a request over a connection of its own; what the server refuses is raised as the error that it names."""
        request = _request(operation, arguments)
        request["headers"] = (self._credentials or _speaker(access)) | request.get("headers", {})
        # httpx waits so long for each piece of a head, and a head may come in a hundred thousand.
        patience_s = self._patience_s and self._patience_s + CONNECT_S + len(request.get("content", b"")) / _BODY_RATE
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(self._client())
                asked = client.stream(operation.method, **request, extensions=self._extensions)
                async with asyncio.timeout(patience_s):
                    response = await stack.enter_async_context(asked)
                if response.status_code >= 400 and response.status_code != _BEYOND:
                    raise _refusal(response.status_code, await _read(response, operation.verb, _MOST_BYTES))
                yield response
        except httpx2.InvalidURL as error:
            raise InvalidArgument(f"an argument of {operation.verb} is too long", hint="Pass a shorter one") from error
        except (httpx2.ReadTimeout, TimeoutError) as error:
            raise _silent(f"a server has not answered {operation.verb} for {self._patience_s:g} s") from error
        except httpx2.DecodingError as error:
            raise _misunderstood(operation.verb) from error
        except (httpx2.TransportError, OSError) as error:
            raise ServerGone("a server has hung up, or does not answer") from error


class _Signed(httpx2.Auth):
    """Signs each request as it is sent."""

    def __init__(self, sign: Sign) -> None:
        self._sign = sign

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """See httpx."""
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        for name, value in self._sign(request.method.encode(), request.url.raw_path, headers):
            request.headers[name.decode()] = value.decode()
        yield request


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
    for name in ("wanted", "options"):
        if isinstance(several := left.pop(name, None), (SessionFilter, MapOptions)):
            left |= asdict(several)
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
        request["params"] = {
            name: _in_query(left.pop(argument)) for name, argument in named.items() if argument in left
        }
    if operation.body is not None:
        for name in _ABSENCES:
            left.pop(name, None)  # empty, or in the path
        # In ASCII: a lone surrogate gets there, and the server says what is wrong with it.
        request["content"] = json.dumps(left, default=BaseModel.model_dump).encode()
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


def _in_query(value: object) -> object:
    return int(value) if isinstance(value, bool) else _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    """Return a text for a URL, or refuse one that none can have."""
    if not _is_unicode(value):
        raise InvalidArgument(f"{value[:64]!r} is not valid Unicode", hint="Leave the lone surrogates out")
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


def _event(operation: Operation, fields: dict[str, str]) -> Model | None:
    """Return what happened by an event of a stream; None for what this version does not know of a newer server."""
    try:
        data = fields.get("data", "{}")
        if fields.get("event") == "error":
            detail = ProblemDetail.model_validate_json(data, extra="ignore")
            raise named_error(f"{detail.code}: {detail.message}", detail.hint)
        place = {"kind": fields.get("event", "")} | ({"id": fields["id"]} if "id" in fields else {})
        found = _EVENT.validate_json(data) | place
    except ValidationError as error:
        raise _misunderstood(operation.verb) from error
    try:
        return cast("type[Model]", operation.item).model_validate(found, extra="ignore")
    except ValidationError:
        return None


def _silent(fact: str) -> ServerSilent:
    return ServerSilent(fact, hint="It may still do it, or have done it: look before you repeat it")


def _misunderstood(verb: str) -> ServerSilent:
    return ServerSilent(f"a server answered {verb} in another form than this version knows", hint=_VERSIONS)


def _too_long(verb: str, limit_bytes: int) -> ServerSilent:
    return _silent(f"a server's answer to {verb} is longer than {limit_bytes:,} bytes, the most that is read")


async def _read(response: httpx2.Response, verb: str, limit_bytes: int) -> bytes:
    """Return the body of an answer, which has to come at a least rate, as those of requests have to."""
    found, loop = bytearray(), asyncio.get_running_loop()
    begun_at = loop.time()
    try:
        async with asyncio.timeout(_BODY_S) as deadline:
            async for part in response.aiter_bytes():
                found += part
                if len(found) > limit_bytes:
                    raise _too_long(verb, limit_bytes)
                deadline.reschedule(begun_at + _BODY_S + len(found) / _BODY_RATE)
    except TimeoutError as error:
        raise _silent(f"a server's answer to {verb} stood still after {len(found):,} bytes") from error
    return bytes(found)


async def lines_of(response: httpx2.Response, verb: str) -> AsyncGenerator[str]:
    """Yield the lines of a stream. httpx would end them at U+2028 and the like too, which JSON may have in texts."""
    begun: list[bytes] = []
    size_bytes = 0
    async for chunk in response.aiter_bytes():
        whole, newline, rest = chunk.rpartition(b"\n")
        size_bytes += len(chunk)
        if size_bytes > _MOST_BYTES:
            raise _too_long(verb, _MOST_BYTES)
        begun.append(whole if newline else rest)
        if newline:
            for line in b"".join(begun).split(b"\n"):
                yield line.decode(errors="replace")
            begun, size_bytes = [rest], len(rest)
