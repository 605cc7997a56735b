"""Where the machines of a fleet are: the addresses that an operator's file lists, or that a DNS name has.

Whoever starts machines (a person, Ray, Kubernetes) keeps that list, and nothing else of a fleet depends on it. What
cannot be read changes nothing: the addresses that were known stay, and the log says once what is wrong.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from belljar.errors import SettingsError
from belljar.http.app import parse_bind
from belljar.http.auth import is_loopback
from belljar.settings import Settings, variable

MOST_HOSTS: Final = 128
"""Each asks each other once a second, so more would cost more than they bring."""
_GONE: Final = "gone"
_FILE_BYTES: Final = 64 * 1024
_DNS_S: Final = 2.0
_DNS_WAIT_S: Final = 5.0
_LINE_CHARS: Final = 80

log = logging.getLogger(__name__)


class UnreadableList(ValueError):
    """The list of a fleet's machines cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of the list."""

    url: str
    """Without a path or a slash at its end."""
    is_gone: bool = False
    """Whether whoever keeps the list knows that the machine is dead."""
    name: str = ""
    """That its certificate has to be for; empty where that is the URL's host."""


def check_fleet(settings: Settings) -> bool:
    """Return whether this server is one of a fleet; raise SettingsError where the settings cannot make it one."""
    given = {name: bool(getattr(settings, name)) for name in ("fleet_peers", "fleet_address")}
    given["fleet_key"] = bool(settings.fleet_key.get_secret_value())
    if not any(given.values()):
        return False
    if missing := [name for name, is_given in given.items() if not is_given]:
        raise SettingsError(
            f"a fleet is set up in part, without {' and '.join(missing)}",
            hint=f"Set {' and '.join(map(variable, missing))}, or none of {', '.join(given)}",
        )
    if not settings.http:
        raise SettingsError(
            "fleet_peers is set, and a server over stdio has one client",
            hint="Add --http HOST:PORT, or leave fleet_peers out",
        )
    if settings.sandbox == "process":
        raise SettingsError(
            'sandbox = "process" cannot be used in a fleet, because code of a session could read fleet_key',
            hint="Use the sandbox namespace, or leave fleet_peers out",
        )
    host, port = parse_bind(settings.fleet_address)
    if not port:
        raise SettingsError(
            f"fleet_address {settings.fleet_address} has port 0, and the other machines have to know it",
            hint="Choose a port from 1 to 65535",
        )
    if not (is_loopback(host) or settings.tls_certificate or settings.trust_network):
        raise SettingsError(
            f"fleet_address {settings.fleet_address} can be reached from other machines, and without TLS whoever is "
            "between them reads what they say",
            hint=f"Set {variable('tls_certificate')} and {variable('tls_key')}, or {variable('trust_network')}=true in "
            "a network that nobody else is in",
        )
    return True


def parse_list(content: bytes, *, trusts_network: bool) -> list[Listed]:
    """Return the machines that the content of a file lists, each once; raise `UnreadableList` for any other content."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise UnreadableList("it is no text") from None
    found: dict[str, Listed] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[1:] not in ([], [_GONE]):
            raise UnreadableList(f"line {number} has {line[:_LINE_CHARS]!r}, and not a URL with nothing or gone behind")
        url = checked_url(words[0], f"line {number}", trusts_network=trusts_network)
        # Of one that is listed twice, the line that says more counts.
        found[url] = Listed(url, is_gone=len(words) > 1 or (url in found and found[url].is_gone))
        if len(found) > MOST_HOSTS:
            raise UnreadableList(f"it lists more than {MOST_HOSTS} machines")
    return [*found.values()]


def checked_url(text: str, place: str, *, trusts_network: bool) -> str:
    """Return the address of a machine in one form; raise `UnreadableList` for what is none that may be used."""
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        parts, port, host = urlsplit(""), None, ""
    is_plain = not (parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in ("http", "https") or not (host and port and is_plain):
        raise UnreadableList(f"{place} has {text[:_LINE_CHARS]!r}, which is no address like https://10.0.0.5:8100")
    if parts.scheme == "http" and not (trusts_network or is_loopback(host)):
        raise UnreadableList(
            f"{place} has {text[:_LINE_CHARS]!r}, and off loopback machines speak https, or trust_network is on"
        )
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class Addresses:
    """The machines that a fleet has, as `fleet_peers` tells at the moment."""

    def __init__(self, settings: Settings) -> None:
        self._kind, _, self.where = settings.fleet_peers.partition(":")
        self._trusts_network = settings.trust_network
        self._scheme = "https" if settings.tls_certificate else "http"
        self._known: list[Listed] = []
        self._signature: tuple[int, ...] = ()
        self._asked_at = float("-inf")
        self.problem = ""
        """Why the list cannot be read now; empty when it can."""

    async def read(self) -> list[Listed]:
        """Return the machines, this one among them: those of before where the list cannot be read now."""
        try:
            if self._kind == "file":
                await asyncio.to_thread(self._read_file)
            elif time.monotonic() - self._asked_at > _DNS_S:
                self._known = await self._resolve()
                self._asked_at = time.monotonic()
            problem = ""
        except UnreadableList as error:
            problem = str(error)
        if problem and problem != self.problem:
            alone = "the machines of before are kept" if self._known else "this server serves alone"
            log.error("fleet_peers %s: %s; %s", self.where, problem, alone)
        elif self.problem and not problem:
            log.info("fleet_peers %s can be read again", self.where)
        self.problem = problem
        return self._known

    def _read_file(self) -> None:
        path = Path(self.where)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                signature = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
                if signature == self._signature and not self.problem:
                    return
                content = file.read(_FILE_BYTES + 1)
        except OSError as error:
            raise UnreadableList(f"it cannot be read: {error.strerror}") from None
        if len(content) > _FILE_BYTES:
            raise UnreadableList(f"it is larger than {_FILE_BYTES:,} bytes")
        self._known = parse_list(content, trusts_network=self._trusts_network)
        self._signature = signature

    async def _resolve(self) -> list[Listed]:
        """Return an address for each answer of the resolver; a certificate has to be for the name."""
        name, _, port = self.where.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_DNS_WAIT_S):
                answers = await loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "strerror", None) or "no answer"
            raise UnreadableList(f"the name has no address: {reason}") from None
        hosts = sorted({str(address[0]) for *_, address in answers})
        if len(hosts) > MOST_HOSTS:
            raise UnreadableList(f"the name has more than {MOST_HOSTS} addresses")
        urls = [f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
        return [Listed(checked_url(url, "it", trusts_network=self._trusts_network), name=name) for url in urls]


async def numbers_of(urls: Iterable[str]) -> dict[str, list[str]]:
    """Return the IP addresses of each machine, as far as its name has any at the moment."""
    loop, urls = asyncio.get_running_loop(), [*urls]

    async def resolve(url: str) -> list[str]:
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(_DNS_WAIT_S):
                found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            return []
        return sorted({str(address[0]) for *_, address in found})

    return dict(zip(urls, await asyncio.gather(*map(resolve, urls)), strict=True))
