"""Fetches one https: URL that a caller named, without giving the caller access to the host's private network.

A host is resolved once for each redirect, all its addresses are checked, and the connection goes to a checked address,
so that a name cannot resolve to another one in between. An HTTP client library would log URLs, and with them signatures
in query strings; h11 implements the protocol and logs nothing. Errors name the host and no more of the URL.
"""

import functools
import re
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from socket import SOCK_STREAM
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import anyio
import h11
from anyio.abc import ByteStream

from belljar.errors import InvalidArgument, TooLarge
from belljar.files.addresses import Address, refusal

MAX_REDIRECTS = 5
DEADLINE_S = 30.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
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

    def __str__(self) -> str:
        return f"https://{self.authority}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 443 else f"{host}:{self.port}"


async def fetch_https(
    url: str,
    max_bytes: int,
    *,
    allow_private: bool = False,
    ssl_context: ssl.SSLContext | None = None,
    deadline_s: float = DEADLINE_S,
) -> bytes:
    """Fetch `url`, following redirects, and return the body. `allow_private` never allows metadata services."""
    context = ssl_context or _verifying_context()
    target = _parse(url)
    try:
        with anyio.fail_after(deadline_s):
            for _ in range(MAX_REDIRECTS + 1):
                found = await _fetch_one(target, max_bytes, context, allow_private=allow_private)
                if isinstance(found, bytes):
                    return found
                url = _follow(url, found.location)
                target = _parse(url)
    except TimeoutError as error:
        raise InvalidArgument(
            f"{target} did not send the file within {deadline_s:g} s",
            hint="Try again, or upload the file in smaller parts",
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


def _parse(url: str) -> _Target:
    try:
        split = urlsplit(url)
        port = split.port or 443
        host = _ascii_host(split)
        path = quote(split.path, safe=_UNRESERVED) or "/"
        query = f"?{quote(split.query, safe=_UNRESERVED)}" if split.query else ""
    except ValueError:
        raise _unparsable() from None
    if split.scheme != "https":
        raise InvalidArgument(
            f"the url leads to the scheme {split.scheme[:20]!r}, and only https is fetched",
            hint="Use an https: URL, or upload the content as base64",
        )
    if not _HOST.fullmatch(host):
        raise InvalidArgument("the url names no host", hint="Use a complete https: URL")
    if "@" in split.netloc:
        raise InvalidArgument("the url contains a user name", hint="Use a signed URL without credentials in it")
    return _Target(host, port, path + query)


def _ascii_host(split: SplitResult) -> str:
    host = split.hostname or ""
    return host if host.isascii() else host.encode("idna").decode("ascii")


async def _fetch_one(
    target: _Target, max_bytes: int, context: ssl.SSLContext, *, allow_private: bool
) -> bytes | _Redirect:
    addresses = await _resolve(target)
    for address in addresses:
        if reason := refusal(address, allow_private=allow_private):
            raise InvalidArgument(
                f"{target} leads to {reason}, which is not fetched",
                hint="Use a public URL, or upload the content as text or base64",
            )
    try:
        stream = await _connect(target, addresses, context)
        try:
            return await _exchange(stream, target, max_bytes)
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
    return InvalidArgument(f"{target} could not be fetched: {reason}", hint="Check the URL, or try again")


async def _resolve(target: _Target) -> list[Address]:
    try:
        found = await anyio.getaddrinfo(target.host, target.port, type=SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise _failed(target, "the host is not known") from error
    return [ip_address(address) for *_, (address, _port) in found]


async def _connect(target: _Target, addresses: list[Address], context: ssl.SSLContext) -> ByteStream:
    """Open a verified connection to the first address that answers."""
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            with anyio.fail_after(_CONNECT_S):
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


async def _exchange(stream: ByteStream, target: _Target, max_bytes: int) -> bytes | _Redirect:
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(
        method="GET",
        target=target.resource,
        headers=[
            ("Host", target.authority),
            ("User-Agent", "belljar"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ],
    )
    await stream.send(connection.send(request) or b"")
    connection.send(h11.EndOfMessage())
    response = await _next_event(connection, stream)
    while isinstance(response, h11.InformationalResponse):
        response = await _next_event(connection, stream)
    if not isinstance(response, h11.Response):
        raise h11.RemoteProtocolError("no response")
    headers = {name.lower(): value.decode(errors="replace") for name, value in response.headers}
    if response.status_code in _REDIRECTS and b"location" in headers:
        return _Redirect(headers[b"location"])
    _check(target, response.status_code, headers, max_bytes)
    return await _read_body(connection, stream, target, max_bytes)


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


async def _read_body(connection: h11.Connection, stream: ByteStream, target: _Target, max_bytes: int) -> bytes:
    body = bytearray()
    while not isinstance(event := await _next_event(connection, stream), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            raise h11.RemoteProtocolError("not a body")
        body += event.data
        if len(body) > max_bytes:
            raise _too_large(target, f"more than {max_bytes}", max_bytes)
    return bytes(body)


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
