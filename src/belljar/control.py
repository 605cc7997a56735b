"""The operator's window into a running server: a UNIX socket that only its own user can open.

One question, one answer: a list of all sessions. `belljar sessions` and `belljar top` ask every server they find.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.files.private import bind_socket
from belljar.models import SessionInfo

if TYPE_CHECKING:
    # Whoever only asks, as `belljar sessions` does, need not import the engine.
    from belljar.sessions.registry import Registry
    from belljar.sessions.session import Session

PATIENCE_S = 2.0


@asynccontextmanager
async def serve_control(path: Path, registry: "Registry") -> AsyncGenerator[None]:
    """Answer on `path` while the server lives."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [await _line(session) for session in registry.all()]
        with contextlib.suppress(ConnectionError):  # who asked has not waited
            writer.write(json.dumps(lines).encode())
            await writer.drain()
        writer.close()

    with listener(path) as bound:
        server = await asyncio.start_unix_server(answer, sock=bound)
        try:
            yield
        finally:
            server.close()
            await server.wait_closed()


async def _line(session: "Session") -> dict[str, Any]:
    info = await asyncio.to_thread(session.info)
    kernel = session.life.kernel
    cpu = {"cpu_s": kernel.cpu_s() if kernel else 0.0, "read_at_s": time.monotonic()}
    return {"principal": session.principal, **cpu, **info.model_dump()}


@contextmanager
def listener(path: Path) -> Generator[socket.socket]:
    """A socket at `path` that nobody but this user can connect to, in a folder that nobody else can enter."""
    with socket.socket(socket.AF_UNIX) as bound, reachable(path) as short:
        bind_socket(bound, short)
        yield bound


@contextmanager
def reachable(path: Path) -> Generator[str]:
    """A socket's path in a form that fits the 107 bytes an address has, however deep the data directory is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path)
    finally:
        os.close(folder)


def _sockets(data_directory: Path) -> list[Path]:
    return sorted(data_directory.glob("runs/*/control.sock"))


@dataclass(frozen=True, slots=True)
class SessionLine:
    """One session, with what only operators see."""

    principal: str
    cpu_s: float
    """Processor time that its kernel has used."""
    read_at_s: float
    """When that was, by the machine's monotonic clock."""
    info: SessionInfo


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One server; `sessions` is None when it stays silent."""

    pid: int
    sessions: list[SessionLine] | None


async def ask_servers(data_directory: Path) -> list[ServerAnswer]:
    """Every server that uses this data directory."""
    paths = await asyncio.to_thread(_sockets, data_directory)
    answers = await asyncio.gather(*map(_ask_server, paths))
    return [answer for answer in answers if answer is not None]


async def ask_sessions(data_directory: Path) -> tuple[list[tuple[int, str, SessionInfo]], list[int]]:
    """(server pid, principal, session) of the servers that use this data directory, and the pids that stay silent."""
    servers = await ask_servers(data_directory)
    found = [(server.pid, line.principal, line.info) for server in servers for line in server.sessions or []]
    return found, [server.pid for server in servers if server.sessions is None]


async def _ask_server(path: Path) -> ServerAnswer | None:
    pid = int(path.parent.name.split("-")[0])
    try:
        async with asyncio.timeout(PATIENCE_S):
            lines = await _ask(path)
    except TimeoutError:
        return ServerAnswer(pid, None)
    except OSError:
        return None  # a server that was killed leaves its socket behind
    return ServerAnswer(pid, [_read(line) for line in lines])


def _read(line: dict[str, Any]) -> SessionLine:
    principal, cpu_s, read_at_s = (line.pop(name) for name in ("principal", "cpu_s", "read_at_s"))
    return SessionLine(principal, cpu_s, read_at_s, SessionInfo.model_validate(line))


async def _ask(path: Path) -> list[dict[str, Any]]:
    with reachable(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
    try:
        return json.loads(await reader.read())
    finally:
        writer.close()
