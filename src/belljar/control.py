"""The list of all sessions that running servers give to operators, for `belljar sessions`.

Each server listens on one socket that only its own user can open. The `op` of the first message says what is wanted: a
list of all sessions, whose request and answer are in this module, or an attachment to one session (`attachments/`).
`attachments/server.py` serves the socket.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar import ipc
from belljar.models import Model, SessionInfo

if TYPE_CHECKING:
    # A process that only asks, such as `belljar sessions`, need not import the engine.
    from belljar.sessions.registry import Registry
    from belljar.sessions.session import Session

SOCKET_NAME = "operator.sock"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 2.0


def server_sockets(data_directory: Path, run: str = "*") -> list[Path]:
    """Return the sockets of the servers of a data directory, those of servers that were killed included."""
    return sorted(data_directory.glob(f"runs/{run}/{SOCKET_NAME}"))


class SessionList(Model):
    """A server's answer to `{"op": "sessions"}`."""

    sessions: list[dict[str, Any]]


async def list_sessions(registry: "Registry") -> dict[str, Any]:
    """Return the answer to `{"op": "sessions"}`."""
    return {"sessions": [await _line(session) for session in registry.all()]}


async def _line(session: "Session") -> dict[str, Any]:
    info = await asyncio.to_thread(session.info)
    return {"principal": session.principal, **info.model_dump()}


@dataclass(frozen=True, slots=True)
class SessionLine:
    """One session, with its owner, whom only operators see."""

    principal: str
    info: SessionInfo


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer of one server; `sessions` is None when it did not answer in time."""

    pid: int
    sessions: list[SessionLine] | None


async def ask_servers(data_directory: Path) -> list[ServerAnswer]:
    """Ask every server that uses this data directory, and return their answers."""
    paths = await asyncio.to_thread(server_sockets, data_directory)
    answers = await asyncio.gather(*map(_ask_server, paths))
    return [answer for answer in answers if answer is not None]


async def ask_sessions(data_directory: Path) -> tuple[list[tuple[int, str, SessionInfo]], list[int]]:
    """Return (server pid, principal, session) of all servers of a data directory, and the pids that did not answer."""
    servers = await ask_servers(data_directory)
    found = [(server.pid, line.principal, line.info) for server in servers for line in server.sessions or []]
    return found, [server.pid for server in servers if server.sessions is None]


async def _ask_server(path: Path) -> ServerAnswer | None:
    pid = int(path.parent.name.split("-")[0])
    try:
        async with asyncio.timeout(TIMEOUT_S):
            lines = await _ask(path)
    except TimeoutError:
        return ServerAnswer(pid, None)
    except (OSError, ipc.Malformed):
        return None  # the socket of a server that was killed, or that ends at this moment
    return ServerAnswer(pid, [_read(line) for line in lines])


def _read(line: dict[str, Any]) -> SessionLine:
    # A server of another version may tell more.
    known = {name: value for name, value in line.items() if name in SessionInfo.model_fields}
    return SessionLine(line["principal"], SessionInfo.model_validate(known))


async def _ask(path: Path) -> list[dict[str, Any]]:
    stream = await ipc.open_stream(path, limit_bytes=MAX_MESSAGE_BYTES)
    try:
        await stream.send({"op": "sessions"})
        return (await stream.receive(SessionList.model_validate_json)).sessions
    finally:
        stream.close()
