"""The host's end of a session's network: an HTTP proxy on a UNIX socket that reaches the allowed hosts only.

It takes CONNECT and absolute-form http: requests. Names are resolved only here, every address of a name is judged, and
the connection goes to a judged address, so a name cannot resolve to another one in between. The client may be hostile
code: heads, times and numbers are bounded. The proxy does not look at what is inside a tunnel.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from belljar import measures
from belljar.egress.proxy_requests import ProxyRefusal, ProxyRequest, Traffic, Tunnel, parse_head, pump, read_head
from belljar.egress.rules import Rule, authority
from belljar.egress.session_sockets import SessionSocket, open_socket_server
from belljar.ipc import Conversations

_EXTRA_CONNECTIONS = 16
"""Connections beyond the limit that still get a refusal as an answer; more are hung up on."""

log = logging.getLogger(__name__)

Judge = Callable[[str, Rule], str]
"""Returns why not to connect to an address under a rule; empty when it is fine."""

# Not the loop's own threads, because names that resolve slowly must not delay the server's other work.
_resolver = ThreadPoolExecutor(4, thread_name_prefix="egress-names")


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
        measures.refusals.add("egress")
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
