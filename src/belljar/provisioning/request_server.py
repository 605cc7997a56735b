"""The sockets on which code inside a session asks the server for what only the host can do.

One is for packages (`pip install` in a cell ends up here), one for files by URL, which come from or go to hosts that
the session itself does not reach. One JSON line comes in, one JSON object goes out, over a UNIX socket in the session's
scratch folder. Whoever asks may be hostile, so size, time and number are bounded, requirements are checked as those of
any caller are, only hosts of the egress rules are reached, and no answer or log line has more of a URL than its host.
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field

from belljar import ipc
from belljar.egress.session_sockets import SessionSocket, open_socket_server
from belljar.environments.base import Environment
from belljar.environments.installed_check import NAME_LIMIT_CHARS, modules_of
from belljar.environments.installs import InstallOutcome, PackageChange, install
from belljar.environments.uv import OpenUv
from belljar.errors import BelljarError, TooLarge
from belljar.files.disk_usage import InstallRoom
from belljar.files.openat import Owner
from belljar.files.workspace import Workspace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from belljar.files.https import Reach

MAX_URL_CHARS = 16_384
_MAX_AT_ONCE = 4
_MAX_WAITING = 4

log = logging.getLogger(__name__)
_LINE_BYTES = 65_536
_LINE_S = 10
_MAX_REFUSED = 16
"""How many more connections than may wait are answered, with a refusal; those beyond are closed at once."""

Request = TypeVar("Request")


class TransferRequest(BaseModel):
    """What a session asks for: a file of its folder is fetched from a URL, or sent to one."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    action: Literal["fetch", "send"]
    url: Annotated[str, Field(max_length=MAX_URL_CHARS)]
    name: Annotated[str, Field(max_length=4_096)]


@dataclass(frozen=True, slots=True)
class TransferReply:
    """How many bytes were moved, or why none were."""

    size: int = 0
    error: str = ""


class Transfers:
    """Moves files between one session's folder and the hosts it may reach."""

    def __init__(self, folder: Path, owner: Owner | None, reach: "Reach", room: InstallRoom, limit_bytes: int) -> None:
        self._folder = folder
        self._workspace = Workspace(folder, owner)
        self._reach = reach
        self._room = room
        self._limit_bytes = limit_bytes

    async def fetch(self, url: str, name: str) -> int:
        """Fetch a URL into a file of the folder; return its size."""
        from belljar.files.https import fetch_https_into  # with an HTTP library, which few sessions need

        self._workspace.check_name(name)
        limit = self._limit_bytes
        if self._room.is_limited:
            limit = min(limit, (await self._room.check_begun()).size_bytes)
        # Not in memory, where four files at once would be half a gigabyte of the server's, for each session.
        with tempfile.TemporaryFile(dir=self._folder.parent) as file:
            size = await fetch_https_into(file, url, limit, reach=self._reach)
            async with self._room.room_for_file(size):
                await to_thread.run_sync(self._workspace.write_from, name, file.fileno(), limit)
        return size

    async def send(self, url: str, name: str) -> int:
        """Send a file of the folder to a URL; return its size."""
        from belljar.files.https import send_https

        file, status = await asyncio.to_thread(self._workspace.open_read, name)
        with file:
            if status.st_size > self._limit_bytes:
                raise TooLarge(
                    f"the file has {status.st_size:,} bytes, and the limit is {self._limit_bytes:,}",
                    hint="Send it in smaller parts",
                )
            await send_https(url, file, status.st_size, reach=self._reach)
        return status.st_size


@asynccontextmanager
async def open_transfer_server(
    folder: Path, name: str, *, session_id: str, transfers: Transfers, socket: SessionSocket | None = None
) -> AsyncGenerator[None]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends."""

    async def answer(stream: RequestStream) -> TransferReply:
        if stream.is_one_too_many:
            return TransferReply(error=f"busy: {_MAX_AT_ONCE} files are being moved already")
        try:
            request = await stream.receive(TransferRequest.model_validate_json)
        except ipc.Malformed:
            return TransferReply(error="invalid-argument: the request cannot be read")
        log.info("session %s: %s of a file by URL", session_id, request.action, extra={"session_id": session_id})
        move = transfers.fetch if request.action == "fetch" else transfers.send
        try:
            return TransferReply(size=await move(request.url, request.name))
        except BelljarError as error:
            return TransferReply(error=f"{error.code}: {error}")

    async with serving_requests(folder, name, answer, most=_MAX_AT_ONCE, socket=socket):
        yield


class PackageRequest(BaseModel):
    """The requirements that a session asks for."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    requirements: list[Annotated[str, Field(max_length=NAME_LIMIT_CHARS)]] = Field(min_length=1, max_length=100)


@dataclass(frozen=True, slots=True)
class PackageReply:
    """What the command shows on its two streams, and the modules it should try to import."""

    lines: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    modules: list[str] = field(default_factory=list[str])


Fulfil = Callable[[Sequence[str]], Awaitable[PackageReply]]


async def install_for(
    environment: Environment, layer: Path, open_uv: OpenUv, room: InstallRoom, requirements: Sequence[str]
) -> PackageReply:
    """Install what a session's code asks for into the session's layer."""
    changes: list[PackageChange] = []
    outcomes = await install(environment, layer, requirements, on_change=changes.append, open_uv=open_uv, room=room)
    there = [outcome.name for outcome in outcomes if outcome.error is None]
    found = await asyncio.to_thread(modules_of, environment, layer, there)
    return PackageReply(
        lines=[*map(_success_line, (each for each in outcomes if each.error is None)), *restart_lines(changes)],
        errors=[f"{outcome.name}: {outcome.error}" for outcome in outcomes if outcome.error is not None],
        modules=[module for modules in found.values() for module in modules],
    )


def _success_line(outcome: InstallOutcome) -> str:
    note = f" ({outcome.note})" if outcome.note else ""
    return f"{outcome.name} {outcome.installed_version} is installed{note}"


def restart_lines(changes: Sequence[PackageChange]) -> list[str]:
    """Return a line for each package that had another version before, because code may have imported that one."""
    return [
        f"{change.name} changed from {change.before} to {change.after}: restart needed if it was imported before"
        for change in changes
        if change.before is not None and change.before != change.after
    ]


@asynccontextmanager
async def open_package_server(
    folder: Path, name: str, *, session_id: str, fulfil: Fulfil, socket: SessionSocket | None = None
) -> AsyncGenerator[None]:
    """Serve a session on a socket of that name in a folder it can reach, one installation at a time."""
    turn = asyncio.Lock()

    async def answer(stream: RequestStream) -> PackageReply:
        if stream.is_one_too_many:
            return PackageReply(errors=[f"{_MAX_WAITING} requests for packages are waiting already"])
        try:
            request = await stream.receive(PackageRequest.model_validate_json)
        except ipc.Malformed:
            return PackageReply(errors=["the request cannot be read: name at most 100 packages"])
        count, ids = len(request.requirements), {"session_id": session_id}
        log.info("session %s asks for %d packages", session_id, count, extra=ids)
        try:
            async with turn:
                return await fulfil(request.requirements)
        except BelljarError as error:
            return PackageReply(errors=[str(error)])

    async with serving_requests(folder, name, answer, most=_MAX_WAITING, socket=socket):
        yield


class RequestStream:
    """One connection of a session, and how many others it has open."""

    def __init__(self, stream: ipc.MessageStream, connections: ipc.Conversations, most: int) -> None:
        self._stream = stream
        self._connections = connections
        self._most = most

    @property
    def is_one_too_many(self) -> bool:
        """Whether more connections are open than may be served at once."""
        return len(self._connections) > self._most

    async def receive(self, read: Callable[[bytes], Request]) -> Request:
        """Return the request, as `read` makes it of its line; raise `ipc.Malformed` if it cannot."""
        async with asyncio.timeout(_LINE_S):
            return await self._stream.receive(read)


Answer = Callable[[RequestStream], Awaitable["DataclassInstance"]]


@asynccontextmanager
async def serving_requests(
    folder: Path, name: str, answer: Answer, *, most: int, socket: SessionSocket | None = None
) -> AsyncGenerator[None]:
    """Answer requests, `most` at once, on a socket of that name in a folder the session can reach; until the end."""
    connections = ipc.Conversations(most + _MAX_REFUSED)

    async def serve(stream: ipc.MessageStream) -> None:
        try:
            reply = await answer(RequestStream(stream, connections, most))
            async with asyncio.timeout(_LINE_S):
                await stream.send(asdict(reply))
        except (OSError, TimeoutError):
            pass
        finally:
            stream.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connections.is_full:
            writer.transport.abort()
            return
        connections.start(serve(ipc.MessageStream(reader, writer)))

    try:
        async with open_socket_server(folder, name, accept, limit=_LINE_BYTES, session_socket=socket):
            yield
    finally:
        await connections.aclose()
