"""Asks the running servers of a data directory what commands need of each: its live sessions, a link to its console.

A small client of the HTTP API on the servers' sockets, which imports nothing of the engine: commands start quickly.
"""

import asyncio
import http.client
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belljar import ipc
from belljar.models import SessionInfo
from belljar.servers import FLEET_SOCKET, http_sockets, is_living

_EARLIER = "operator.sock"
"""The socket of a server of an earlier version, which speaks another protocol."""
TIMEOUT_S = 2.0
_PREFIX = "/api/v1"


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
    """Ask every server that uses this data directory for its sessions, and return their answers."""
    answers = await ask_each(data_directory, "GET", "/live-sessions")
    return [ServerAnswer(pid, None if found is None else [*map(_line, found["items"])]) for pid, found in answers]


async def ask_sessions(data_directory: Path) -> tuple[list[tuple[int, str, SessionInfo]], list[int]]:
    """Return (server pid, principal, session) of all servers of a data directory, and the pids that did not answer."""
    servers = await ask_servers(data_directory)
    found = [(server.pid, line.principal, line.info) for server in servers for line in server.sessions or []]
    return found, [server.pid for server in servers if server.sessions is None]


async def ask_each(data_directory: Path, method: str, path: str) -> list[tuple[int, Any]]:
    """Ask every running server; return its pid with what it answers, or None if it did not in time, or only refused."""
    runs = data_directory / "runs"
    sockets = await asyncio.to_thread(lambda: http_sockets(data_directory))
    answers = await asyncio.gather(*(asyncio.to_thread(_ask, one, method, path) for one in sockets))
    found = [(_pid(one), answer[0]) for one, answer in zip(sockets, answers, strict=True) if answer]
    earlier = [one for one in sorted(runs.glob(f"*/{_EARLIER}")) if is_living(runs, one.parent.name)]
    return [*found, *((_pid(one), None) for one in earlier)]


async def ask_fleet(data_directory: Path, method: str, target: str) -> Any:
    """Return what one server of this machine answers for its fleet; None where none runs in one, or knows it."""
    sockets = await asyncio.to_thread(lambda: http_sockets(data_directory, name=FLEET_SOCKET))
    for one in sockets:
        if (answer := await asyncio.to_thread(_ask, one, method, target, "")) and answer[0] is not None:
            return answer[0]
    return None


def _ask(path: Path, method: str, target: str, prefix: str = _PREFIX) -> list[Any]:
    """Return the answer in a list; an empty one for the socket of a server that was killed, or that ends now."""
    connection = _Connection(path)
    try:
        connection.request(method, prefix + target)
        answer = connection.getresponse()
        content = answer.read()
        return [json.loads(content) if answer.status < 300 else None]
    except TimeoutError:
        return [None]
    except (OSError, http.client.HTTPException, ValueError):
        return []
    finally:
        connection.close()


class _Connection(http.client.HTTPConnection):
    """A connection to a server's socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("belljar", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """See `http.client`."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        ipc.connect(self.sock, self._path)


def _line(told: dict[str, Any]) -> SessionLine:
    # A server of another version may tell more.
    known = {name: value for name, value in told.items() if name in SessionInfo.model_fields}
    return SessionLine(told["principal"], SessionInfo.model_validate(known))


def _pid(path: Path) -> int:
    number = path.parent.name.partition("-")[0]
    return int(number) if number.isdecimal() else 0
