"""The operator's window into a running server: a UNIX socket that only its own user can open.

One question, one answer: a list of all sessions. `belljar sessions` asks every server it finds.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from belljar.models import SessionInfo
from belljar.sessions.registry import Registry

PATIENCE_S = 2.0


@asynccontextmanager
async def serve_control(path: Path, registry: Registry) -> AsyncGenerator[None]:
    """Answer on `path` while the server lives."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [
            {"principal": session.principal, **(await asyncio.to_thread(session.info)).model_dump()}
            for session in registry.all()
        ]
        writer.write(json.dumps(lines).encode())
        await writer.drain()
        writer.close()

    # The folder is closed to others (0700), and with it the socket.
    with _reachable(path) as short:
        server = await asyncio.start_unix_server(answer, short)
        try:
            yield
        finally:
            server.close()
            await server.wait_closed()


@contextmanager
def _reachable(path: Path) -> Generator[str]:
    """The path in a form that fits the 107 bytes a socket address has, however deep the data directory is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path)
    finally:
        os.close(folder)


def _sockets(data_directory: Path) -> list[Path]:
    return sorted(data_directory.glob("runs/*/control.sock"))


async def ask_sessions(data_directory: Path) -> tuple[list[tuple[int, str, SessionInfo]], list[int]]:
    """(server pid, principal, session) of the servers that use this data directory, and the pids that stay silent."""
    found: list[tuple[int, str, SessionInfo]] = []
    silent: list[int] = []
    for path in await asyncio.to_thread(_sockets, data_directory):
        pid = int(path.parent.name.split("-")[0])
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await _ask(path)
        except TimeoutError:
            silent.append(pid)
        except OSError:
            continue  # a server that was killed leaves its socket behind
        else:
            found += [(pid, line.pop("principal"), SessionInfo.model_validate(line)) for line in answer]
    return found, silent


async def _ask(path: Path) -> list[dict[str, Any]]:
    with _reachable(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
    try:
        return json.loads(await reader.read())
    finally:
        writer.close()
