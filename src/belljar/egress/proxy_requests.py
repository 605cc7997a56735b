"""Requests to the proxy: read strictly, refused with a reason, and their bytes carried and counted.

A plain request is written anew for the host it names, so that a `Host` header cannot lead elsewhere. It is the only one
on its connection: what a client sends after its body is never read.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from belljar.egress.rules import parse_port, plain_host

# Most clients show only the reason phrase of a refused CONNECT, so the fact is in the reason phrase and in the body.


class ProxyRefusal(Exception):
    """A refusal: a status, the fact, and the next action. `place` is the host and port that the rules forbid."""

    def __init__(self, status: int, fact: str, hint: str, *, place: str = "") -> None:
        super().__init__(fact)
        self.status = status
        self.fact = fact
        self.hint = hint
        self.place = place

    def answer(self) -> bytes:
        """Return the HTTP response."""
        body = f"belljar: {self.fact}.\n{self.hint}\n".encode("ascii", "backslashreplace")
        reason = f"belljar: {self.fact}".encode("ascii", "backslashreplace")
        return (
            b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=us-ascii\r\nContent-Length: %d\r\n"
            b"Proxy-Connection: close\r\nConnection: close\r\n\r\n%s" % (self.status, reason, len(body), body)
        )


@dataclass(slots=True)
class Traffic:
    """What went through a session's proxy since it started; bytes of bodies and tunnels."""

    connections: int = 0
    refusals: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.connections} connections, {self.sent_bytes} bytes out, {self.received_bytes} bytes in, "
            f"{self.refusals} refused"
        )


CHUNK_BYTES = 65_536
# Headers that are for the client and the proxy only, or that contradict one request a connection.
_HOP_BY_HOP = frozenset(
    {b"host", b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"upgrade"}
)

Body = Callable[[asyncio.StreamReader], AsyncGenerator[bytes]]


@dataclass(frozen=True, slots=True)
class Tunnel:
    """A CONNECT request."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A plain http: request: its rewritten head, and what reads its body from the client."""

    host: str
    port: int
    head: bytes
    body: Body


async def read_head(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Return the request up to its empty line, and no byte more."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise ProxyRefusal(431, "the request's head is too large", f"The limit is {limit} bytes.") from None
    return head


def parse_head(head: bytes) -> Tunnel | ProxyRequest:
    """Return what is asked for; refuse what is not a request to a proxy."""
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(head)
        request = connection.next_event()
    except h11.RemoteProtocolError:
        request = None
    if not isinstance(request, h11.Request):
        raise ProxyRefusal(400, "this is not an HTTP request", "Only HTTP goes through this proxy.")
    target = request.target.decode("ascii", "replace")
    if request.method == b"CONNECT":
        host, _, port = target.rpartition(":")
        return Tunnel(*_place(host, port))
    return _plain(request, connection, target)


def _place(host: str, port: str) -> tuple[str, int]:
    name, number = plain_host(host), parse_port(port)
    if not name or number is None or "@" in host:
        raise ProxyRefusal(400, "the request names no host and port", "Use HOST:PORT, like api.example.com:443.")
    return name, number


def _plain(request: h11.Request, connection: h11.Connection, target: str) -> ProxyRequest:
    try:
        split = urlsplit(target)
        # Not `hostname`, which hides a user name. Brackets stay, because `plain_host` judges them.
        host, colon, port = split.netloc.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = split.netloc, "80"
    except ValueError:
        raise ProxyRefusal(400, "the request's URL cannot be read", "Use http://HOST/PATH.") from None
    if split.scheme.lower() != "http" or not split.netloc:
        raise ProxyRefusal(400, "the request is not for a proxy", "Use CONNECT, or an absolute http: URL.")
    name, number = _place(host, port)
    resource = (split.path or "/") + (f"?{split.query}" if split.query else "")
    kept = [(header, value) for header, value in request.headers if header not in _HOP_BY_HOP]
    shown = f"[{name}]" if ":" in name else name
    place = (shown if number == 80 else f"{shown}:{number}").encode("ascii")
    headers = [(b"Host", place), *kept, (b"Connection", b"close")]
    sender = h11.Connection(h11.CLIENT)
    try:
        head = sender.send(h11.Request(method=request.method, target=resource, headers=headers)) or b""
    except h11.LocalProtocolError:
        raise ProxyRefusal(400, "the request cannot be passed on", "Its head breaks the rules of HTTP.") from None
    return ProxyRequest(name, number, head, lambda reader: _body(connection, sender, reader))


async def _body(
    receiver: h11.Connection, sender: h11.Connection, reader: asyncio.StreamReader
) -> AsyncGenerator[bytes]:
    """Yield the body as the receiver frames it, and nothing after it."""
    while True:
        try:
            event = receiver.next_event()
        except h11.RemoteProtocolError:
            raise ConnectionError("malformed body") from None
        if event is h11.NEED_DATA:
            receiver.receive_data(await reader.read(CHUNK_BYTES))
        elif isinstance(event, h11.Data):
            yield sender.send(event) or b""
        else:
            if isinstance(event, h11.EndOfMessage) and (end := sender.send(h11.EndOfMessage())):
                yield end
            return


async def _everything(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while chunk := await reader.read(CHUNK_BYTES):
        yield chunk


async def pump(
    outward: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    inward: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    *,
    outgoing: Body | None,
    traffic: Traffic,
    idle_s: float,
) -> None:
    """Carry bytes both ways until both sides are done, or both are silent for `idle_s`."""

    loop = asyncio.get_running_loop()

    async def carry_out() -> None:
        async with aclosing((outgoing or _everything)(outward[0])) as chunks:
            async for chunk in chunks:
                traffic.sent_bytes += len(chunk)
                await _pass_on(chunk, outward[1])
        # A plain request says "close" in its head, and some servers take an early end of the stream for a lost client.
        if outgoing is None:
            outward[1].write_eof()

    async def carry_in() -> None:
        async with aclosing(_everything(inward[0])) as chunks:
            async for chunk in chunks:
                traffic.received_bytes += len(chunk)
                await _pass_on(chunk, inward[1])
        inward[1].write_eof()

    async def _pass_on(chunk: bytes, writer: asyncio.StreamWriter) -> None:
        patience.reschedule(loop.time() + idle_s)
        writer.write(chunk)
        await writer.drain()
        patience.reschedule(loop.time() + idle_s)

    async with asyncio.timeout(idle_s) as patience:
        ways = [loop.create_task(carry_out()), loop.create_task(carry_in())]
        try:
            # A plain exchange is over when the answer ends, whether or not the client has sent all of its body.
            await asyncio.wait(ways[1:]) if outgoing else await asyncio.gather(*ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
