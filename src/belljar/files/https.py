"""Fetches one https: URL, sends a file to one or posts to one, without opening the host's private network.

A host is resolved once for each redirect, all its addresses are checked, and the connection goes to a checked address,
so that a name cannot resolve to another one in between. An HTTP client library would log URLs, and with them signatures
in query strings; h11 implements the protocol and logs nothing. Errors name the host and no more of the URL.
"""

import functools
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from socket import SOCK_STREAM
from typing import BinaryIO, TypeVar
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import anyio
import h11
from anyio.abc import ByteStream

from belljar.egress.rules import Address, Rule, plain_host, refusal
from belljar.errors import FileMissing, InvalidArgument, TooLarge
from belljar.files.openat import unwritable

MAX_REDIRECTS = 5
DEADLINE_S = 30.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# The others ask for another method, and so for a request without the file.
_SENDING_REDIRECTS = frozenset({307, 308})
_SENT = frozenset({200, 201, 204})
_SEND_BYTES = 256 * 1024
_WRITE_BYTES = 1024 * 1024
# What a slow connection may take for a file, beyond `DEADLINE_S`.
_SLOWEST_BYTES_S = 256 * 1024
_RECEIVE_BYTES = 65_536
_CONNECT_S = 10.0
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_:.-]{0,252}")
_UNRESERVED = "/%:@!$&'()*+,;=~?"


@dataclass(frozen=True, slots=True)
class _Target:
    """The destination of one request. `host` is ASCII; `resource` is path and query."""

    host: str
    port: int
    resource: str
    is_plain: bool = False
    """Whether it is reached without TLS: at this machine only, where the operator named the URL."""

    def __str__(self) -> str:
        return f"{'http' if self.is_plain else 'https'}://{self.authority}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (80 if self.is_plain else 443) else f"{host}:{self.port}"


Done = TypeVar("Done")
Keep = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reach:
    """Which hosts may be connected to: those of `rules`, or any public one; never metadata services."""

    rules: Sequence[Rule] | None = None
    """Rules of the egress setting; None where any public host may be reached."""
    allow_private: bool = False
    allow_own: bool = False
    """Whether a URL may name this machine itself by a loopback name, then also without TLS: the operator wrote it."""

    def refusal(self, host: str, port: int) -> str:
        """Return why a host may not be connected to, whatever its addresses are; empty if it may."""
        plain = plain_host(host)
        if self.rules is None or any(rule.allows(plain, port) for rule in self.rules):
            return ""
        return "it is no host that the setting egress allows"

    def refusal_of_address(self, address: Address, target: _Target) -> str:
        """Return why an address that the target's host has may not be connected to; empty if it may."""
        is_own = self.allow_own and is_loopback_name(target.host)
        if is_own and not address.is_loopback:
            return "an address off this machine"
        return refusal(address, target.port, allow_private=self.allow_private or is_own)


def is_loopback_name(host: str) -> bool:
    """Return whether a host is this machine by its name alone."""
    plain = plain_host(f"[{host}]" if ":" in host else host)
    return plain in ("localhost", "::1") or (plain.startswith("127.") and plain.replace(".", "").isdecimal())


PUBLIC = Reach()


async def fetch_https(
    url: str,
    max_bytes: int,
    *,
    reach: Reach = PUBLIC,
    ssl_context: ssl.SSLContext | None = None,
    deadline_s: float = DEADLINE_S,
) -> bytes:
    """Fetch `url`, following redirects, and return the body."""
    body = bytearray()

    async def keep(data: bytes) -> None:
        body.extend(data)

    await _fetch(url, keep, max_bytes, reach, ssl_context, deadline_s)
    return bytes(body)


async def fetch_https_into(
    file: BinaryIO, url: str, max_bytes: int, *, reach: Reach, ssl_context: ssl.SSLContext | None = None
) -> int:
    """Fetch `url` into a file, so that no body is held in memory, and return its size."""
    gathered = bytearray()

    def write() -> None:
        try:
            file.write(gathered)
            file.flush()
        except OSError as error:
            raise unwritable("what was fetched", len(gathered), error) from error
        gathered.clear()

    async def keep(data: bytes) -> None:
        gathered.extend(data)
        if len(gathered) >= _WRITE_BYTES:
            await anyio.to_thread.run_sync(write)

    size = await _fetch(url, keep, max_bytes, reach, ssl_context, DEADLINE_S)
    await anyio.to_thread.run_sync(write)
    return size


async def _fetch(
    url: str, keep: Keep, max_bytes: int, reach: Reach, ssl_context: ssl.SSLContext | None, deadline_s: float
) -> int:
    async def exchange(stream: ByteStream, target: _Target) -> int | _Redirect:
        return await _receive(stream, target, keep, max_bytes)

    return await _follow_redirects(url, exchange, reach, ssl_context, deadline_s)


async def send_https(
    url: str,
    file: BinaryIO,
    size: int,
    *,
    reach: Reach,
    ssl_context: ssl.SSLContext | None = None,
) -> int:
    """Send `size` bytes of a file to `url` by PUT, as blob stores take them; return the status of the answer."""

    async def exchange(stream: ByteStream, target: _Target) -> int | _Redirect:
        await anyio.to_thread.run_sync(file.seek, 0)
        return await _send(stream, target, file, size)

    return await _follow_redirects(url, exchange, reach, ssl_context, DEADLINE_S + size / _SLOWEST_BYTES_S)


async def post_https(
    url: str,
    body: bytes,
    headers: Sequence[tuple[str, str]],
    *,
    reach: Reach,
    deadline_s: float,
    ssl_context: ssl.SSLContext | None = None,
) -> tuple[int, str]:
    """Post `body` to `url`; return the status of the answer and its Retry-After. Nothing else of it is read.

    A redirect is not followed, it is the answer.
    """

    async def exchange(stream: ByteStream, target: _Target) -> tuple[int, str]:
        connection = h11.Connection(h11.CLIENT)
        length = ("Content-Length", str(len(body)))
        request = connection.send(_request("POST", target, [length, *headers])) or b""
        await stream.send(request + (connection.send(h11.Data(data=body)) or b""))
        connection.send(h11.EndOfMessage())
        status, answered = await _answer(connection, stream)
        return status, answered.get(b"retry-after", "")

    target = _parse(url, allow_plain=reach.allow_own)
    try:
        with anyio.fail_after(deadline_s):
            return await _exchange_with(target, exchange, ssl_context or _verifying_context(), reach)
    except TimeoutError:
        raise InvalidArgument(f"{target} did not answer within {deadline_s:g} s", hint="Try again") from None


async def try_connection(
    url: str, *, reach: Reach, deadline_s: float, ssl_context: ssl.SSLContext | None = None
) -> None:
    """Connect to the host of a URL, check its certificate, and send nothing."""

    async def leave(stream: ByteStream, target: _Target) -> None:
        """Do nothing with the connection."""

    target = _parse(url, allow_plain=reach.allow_own)
    try:
        with anyio.fail_after(deadline_s):
            await _exchange_with(target, leave, ssl_context or _verifying_context(), reach)
    except TimeoutError:
        raise InvalidArgument(f"{target} could not be reached within {deadline_s:g} s", hint="Try again") from None


Exchange = Callable[[ByteStream, "_Target"], Awaitable["Done | _Redirect"]]


async def _follow_redirects(
    url: str, exchange: "Exchange[Done]", reach: Reach, ssl_context: ssl.SSLContext | None, deadline_s: float
) -> Done:
    """Make one exchange with each host that redirects lead to, until one answers otherwise."""
    context = ssl_context or _verifying_context()
    target = _parse(url)
    try:
        with anyio.fail_after(deadline_s):
            for _ in range(MAX_REDIRECTS + 1):
                found = await _exchange_with(target, exchange, context, reach)
                if not isinstance(found, _Redirect):
                    return found
                url = _follow(url, found.location)
                target = _parse(url)
    except TimeoutError as error:
        raise InvalidArgument(
            f"{target} was not done with the file within {deadline_s:g} s",
            hint="Try again, or move the file in smaller parts",
        ) from error
    raise InvalidArgument(f"more than {MAX_REDIRECTS} redirects, the last to {target}", hint="Use the final URL")


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


@functools.cache
def _verifying_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _follow(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise _unparsable() from None


def _unparsable() -> InvalidArgument:
    # Raised `from None`, because the parser's own message may quote the URL.
    return InvalidArgument("the url cannot be parsed", hint="Use a complete https: URL")


def _parse(url: str, *, allow_plain: bool = False) -> _Target:
    try:
        split = urlsplit(url)
        is_plain = allow_plain and split.scheme == "http" and is_loopback_name(split.hostname or "")
        port = split.port or (80 if is_plain else 443)
        host = _ascii_host(split)
        path = quote(split.path, safe=_UNRESERVED) or "/"
        query = f"?{quote(split.query, safe=_UNRESERVED)}" if split.query else ""
    except ValueError:
        raise _unparsable() from None
    if split.scheme != "https" and not is_plain:
        raise InvalidArgument(
            f"the url leads to the scheme {split.scheme[:20]!r}, and only https is fetched",
            hint="Use an https: URL, or upload the content as base64",
        )
    if not _HOST.fullmatch(host):
        raise InvalidArgument("the url names no host", hint="Use a complete https: URL")
    if "@" in split.netloc:
        raise InvalidArgument("the url contains a user name", hint="Use a signed URL without credentials in it")
    return _Target(host, port, path + query, is_plain)


def _ascii_host(split: SplitResult) -> str:
    host = split.hostname or ""
    return host if host.isascii() else host.encode("idna").decode("ascii")


async def _exchange_with(
    target: _Target, exchange: Callable[[ByteStream, _Target], Awaitable[Done]], context: ssl.SSLContext, reach: Reach
) -> Done:
    if reason := reach.refusal(target.host, target.port):
        raise InvalidArgument(
            f"{target} is not reached: {reason}", hint=f"The operator can add {target.host}:{target.port} to egress"
        )
    addresses = await _resolve(target)
    for address in addresses:
        if reason := reach.refusal_of_address(address, target):
            raise InvalidArgument(
                f"{target} leads to {reason}, which is not fetched",
                hint="Use a public URL, or upload the content as text or base64",
            )
    try:
        stream = await _connect(target, addresses, context)
        try:
            return await exchange(stream, target)
        finally:
            await anyio.aclose_forcefully(stream)
    except ssl.SSLCertVerificationError as error:
        raise _failed(target, f"certificate not accepted: {error.verify_message}") from error
    except OSError as error:
        raise _failed(target, error.strerror or str(error) or type(error).__name__) from error
    except (anyio.BrokenResourceError, anyio.EndOfStream):
        raise _failed(target, "the connection broke off") from None
    except h11.ProtocolError:
        # h11 quotes the offending line, which may be a redirect with a signature.
        raise _failed(target, "it broke the rules of HTTP or stopped half-way") from None


def _failed(target: _Target, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{target} could not be reached: {reason}", hint="Check the URL, or try again")


async def _resolve(target: _Target) -> list[Address]:
    try:
        found = await anyio.getaddrinfo(target.host, target.port, type=SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise _failed(target, "the host is not known") from error
    return [ip_address(address) for *_, (address, _port) in found]


async def _connect(target: _Target, addresses: list[Address], context: ssl.SSLContext) -> ByteStream:
    """Open a connection to the first address that answers, verified but for a plain one to this machine."""
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            with anyio.fail_after(_CONNECT_S):
                if target.is_plain:
                    return await anyio.connect_tcp(str(address), target.port)
                return await anyio.connect_tcp(
                    str(address),
                    target.port,
                    ssl_context=context,
                    tls_hostname=target.host,
                    tls_standard_compatible=False,
                )
        except ssl.SSLError:
            raise
        except OSError as error:
            failure = error
    raise failure


async def _receive(stream: ByteStream, target: _Target, keep: Keep, max_bytes: int) -> int | _Redirect:
    connection = h11.Connection(h11.CLIENT)
    headers = [("Accept", "*/*"), ("Accept-Encoding", "identity")]
    await stream.send(connection.send(_request("GET", target, headers)) or b"")
    connection.send(h11.EndOfMessage())
    status, answered = await _answer(connection, stream)
    if status in _REDIRECTS and b"location" in answered:
        return _Redirect(answered[b"location"])
    _check(target, status, answered, max_bytes)
    return await _read_body(connection, stream, target, keep, max_bytes)


async def _send(stream: ByteStream, target: _Target, file: BinaryIO, size: int) -> int | _Redirect:
    connection = h11.Connection(h11.CLIENT)
    headers = [
        ("Content-Length", str(size)),
        ("Content-Type", "application/octet-stream"),
        # Azure's blob store wants to know; others ignore it.
        ("x-ms-blob-type", "BlockBlob"),
    ]
    await stream.send(connection.send(_request("PUT", target, headers)) or b"")
    left = size
    while left > 0:
        chunk = await anyio.to_thread.run_sync(file.read, min(_SEND_BYTES, left))
        if not chunk:
            raise FileMissing("the file became shorter while it was sent", hint="Send it when nothing writes to it")
        left -= len(chunk)
        await stream.send(connection.send(h11.Data(data=chunk)) or b"")
    await stream.send(connection.send(h11.EndOfMessage()) or b"")
    status, answered = await _answer(connection, stream)
    if status in _SENDING_REDIRECTS and b"location" in answered:
        return _Redirect(answered[b"location"])
    if status not in _SENT:
        raise InvalidArgument(
            f"{target} answered {status}",
            hint="Check that the URL is right, allows writing, and that its signature has not expired",
        )
    return status


def _request(method: str, target: _Target, headers: list[tuple[str, str]]) -> h11.Request:
    always = [("Host", target.authority), ("User-Agent", "belljar"), ("Connection", "close")]
    return h11.Request(method=method, target=target.resource, headers=[*always, *headers])


async def _answer(connection: h11.Connection, stream: ByteStream) -> tuple[int, dict[bytes, str]]:
    response = await _next_event(connection, stream)
    while isinstance(response, h11.InformationalResponse):
        response = await _next_event(connection, stream)
    if not isinstance(response, h11.Response):
        raise h11.RemoteProtocolError("no response")
    return response.status_code, {name.lower(): value.decode(errors="replace") for name, value in response.headers}


def _check(target: _Target, status: int, headers: dict[bytes, str], max_bytes: int) -> None:
    if status != 200:
        raise InvalidArgument(
            f"{target} answered {status}", hint="Check that the URL is right and its signature has not expired"
        )
    encoding = headers.get(b"content-encoding", "identity")
    if encoding != "identity":
        # Decoding would let a few bytes grow past any limit, and saving them as they are would surprise.
        raise InvalidArgument(
            f"{target} sent the file with Content-Encoding {encoding[:20]!r}",
            hint="Store the file without a content encoding",
        )
    length = headers.get(b"content-length", "")
    if length and int(length) > max_bytes:
        raise _too_large(target, length, max_bytes)


async def _read_body(
    connection: h11.Connection, stream: ByteStream, target: _Target, keep: Keep, max_bytes: int
) -> int:
    size = 0
    while not isinstance(event := await _next_event(connection, stream), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            raise h11.RemoteProtocolError("not a body")
        size += len(event.data)
        if size > max_bytes:
            raise _too_large(target, f"more than {max_bytes}", max_bytes)
        await keep(bytes(event.data))
    return size


def _too_large(target: _Target, size: str, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the file at {target} is {size} bytes, and the limit is {max_bytes}", hint="Upload it in smaller parts"
    )


async def _next_event(connection: h11.Connection, stream: ByteStream) -> object:
    while (event := connection.next_event()) is h11.NEED_DATA:
        try:
            connection.receive_data(await stream.receive(_RECEIVE_BYTES))
        except anyio.EndOfStream:
            connection.receive_data(b"")
    return event
