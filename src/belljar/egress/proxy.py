"""The host's end of a session's network: an HTTP proxy on a UNIX socket that reaches the allowed hosts only.

It takes CONNECT and absolute-form http: requests. Names are resolved only here, every address of a name is judged, and
the connection goes to a judged address, so a name cannot resolve to another one in between. The client may be hostile
code: heads, times and numbers are bounded. A plain request is written anew for the host it names, so that a `Host`
header cannot lead elsewhere. It is the only one on its connection: what a client sends after its body is never read.
The proxy does not look at what is inside a tunnel.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import h11

from belljar import metrics
from belljar.egress.rules import Rule, authority, parse_port, plain_host
from belljar.egress.session_sockets import SessionSocket, open_socket_server
from belljar.ipc import Conversations

_EXTRA_CONNECTIONS = 16
"""Connections beyond the limit that still get a refusal as an answer; more are hung up on."""

log = logging.getLogger(__name__)

Judge = Callable[[str, Rule], str]
"""Returns why not to connect to an address under a rule; empty when it is fine."""

# Not the loop's own threads, because names that resolve slowly must not delay the server's other work.
_resolver = ThreadPoolExecutor(4, thread_name_prefix="egress-names")


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


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """What one session may use of the proxy."""

    connections: int = 64
    head_bytes: int = 32_768
    head_s: float = 15
    connect_s: float = 10
    idle_s: float = 300


class Proxy:
    """The proxy of one session; made by `open_proxy`."""

    def __init__(self, session_id: str, rules: Sequence[Rule], judge: Judge, limits: ProxyLimits) -> None:
        self.traffic = Traffic()
        self._session_id = session_id
        self._rules = rules
        self._judge = judge
        self._limits = limits
        # Some connections beyond the limit are accepted only to get that answer.
        self._conversations = Conversations(limits.connections + _EXTRA_CONNECTIONS)
        self._facts_by_place: dict[str, str] = {}

    @property
    def refused(self) -> list[str]:
        """The refusal of each host and port that the rules forbid, one for each."""
        return [*self._facts_by_place.values()]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        if self._conversations.is_full:
            writer.transport.abort()
            return
        self._conversations.start(self._serve(reader, writer))

    async def aclose(self) -> None:
        """End every connection."""
        await self._conversations.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except ProxyRefusal as refused:
            self._note(refused)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._limits.head_s):
                    writer.write(refused.answer())
                    await writer.drain()
                    await _read_rest(reader, writer)
        except (OSError, TimeoutError, EOFError):
            pass
        finally:
            # Not a graceful close, because a client that never reads would hold it open.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._conversations) > self._limits.connections:
            raise ProxyRefusal(
                503, "too many connections", f"This session has {self._limits.connections} open, the most there may be."
            )
        async with asyncio.timeout(self._limits.head_s):
            head = await read_head(reader, self._limits.head_bytes)
        request = parse_head(head)
        rule = self._find_rule(request)
        upstream_reader, upstream_writer = await self._connect(request, rule)
        self.traffic.connections += 1
        for each in (writer, upstream_writer):
            # With this limit `drain` returns only when nothing is buffered here, so an abort loses nothing.
            each.transport.set_write_buffer_limits(high=0)
        try:
            if isinstance(request, Tunnel):
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                outgoing = None
            else:
                upstream_writer.write(request.head)
                outgoing = request.body
            await pump(
                (reader, upstream_writer),
                (upstream_reader, writer),
                outgoing=outgoing,
                traffic=self.traffic,
                idle_s=self._limits.idle_s,
            )
        finally:
            upstream_writer.transport.abort()

    def _find_rule(self, request: ProxyRequest | Tunnel) -> Rule:
        for rule in self._rules:
            if rule.allows(request.host, request.port):
                return rule
        place = authority(request.host, request.port)
        allowed = ", ".join(map(str, self._rules)) or "none"
        raise ProxyRefusal(
            403,
            f"egress to {place} is not allowed: no entry of the setting egress covers it",
            f'The operator allows it with "{place}" in the setting egress. Allowed now: {allowed}.',
            place=place,
        )

    async def _connect(
        self, request: ProxyRequest | Tunnel, rule: Rule
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first of the judged addresses that answers."""
        place = authority(request.host, request.port)
        reason = "it has no address"
        for address in await self._addresses(request, rule, place):
            try:
                async with asyncio.timeout(self._limits.connect_s):
                    return await asyncio.open_connection(address, request.port)
            except TimeoutError:
                reason = f"no answer in {self._limits.connect_s:g} s"
            except OSError as error:
                reason = error.strerror or type(error).__name__
        raise ProxyRefusal(502, f"{place} could not be reached: {reason}", "It is allowed; try again.")

    async def _addresses(self, request: ProxyRequest | Tunnel, rule: Rule, place: str) -> list[str]:
        host = request.host
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_s):
                found = await loop.run_in_executor(_resolver, _look_up, host, request.port)
        except TimeoutError:
            raise ProxyRefusal(504, f"the name {host} was not resolved in time", "It is allowed; try again.") from None
        except (OSError, ValueError):
            raise ProxyRefusal(
                502, f"the name {host} is not known", "It is allowed, but the host cannot resolve it."
            ) from None
        for address in found:
            # Every address must pass, because a name that mixes public and private addresses is suspicious.
            if reason := self._judge(address, rule):
                raise ProxyRefusal(
                    403,
                    f"egress to {place} is not allowed: it resolves to {reason}",
                    "The operator may allow private addresses with egress_allow_private; others are never reached.",
                    place=place,
                )
        return found

    def _note(self, refused: ProxyRefusal) -> None:
        """Log each refused host and port once, because a cell that tries for ever must not fill the log."""
        self.traffic.refusals += 1
        metrics.refusals.add("egress")
        if refused.place and refused.place not in self._facts_by_place and len(self._facts_by_place) < 100:
            self._facts_by_place[refused.place] = refused.fact
            log.warning("session %s: %s", self._session_id, refused.fact, extra={"session_id": self._session_id})


@asynccontextmanager
async def open_proxy(
    folder: Path,
    name: str,
    *,
    session_id: str,
    rules: Sequence[Rule],
    judge: Judge,
    limits: ProxyLimits | None = None,
    session_socket: SessionSocket | None = None,
    purpose: str = "egress",
) -> AsyncGenerator[Proxy]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends.

    `purpose` is the word for this traffic in the log.
    """
    limits = limits or ProxyLimits()
    proxy = Proxy(session_id, rules, judge, limits)
    try:
        async with open_socket_server(
            folder, name, proxy.accept, limit=limits.head_bytes, session_socket=session_socket
        ):
            yield proxy
    finally:
        await proxy.aclose()
        if proxy.traffic.connections or proxy.traffic.refusals:
            log.info("session %s: %s %s", session_id, purpose, proxy.traffic, extra={"session_id": session_id})


async def _read_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what the client still sends, up to a bound, because a reset could discard our answer before it is read."""
    writer.write_eof()
    for _ in range(64):
        if not await reader.read(65_536):
            return


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(ip_address(str(address[0]))) for *_, address in found))
