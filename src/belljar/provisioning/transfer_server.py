"""The socket on which code inside a session asks the host to fetch a file by URL, or to send one: `belljar_transfer`.

One JSON line comes in, one JSON object goes out. Whoever asks may be hostile, so size, time and number are bounded,
only hosts of the egress rules are reached, and no answer or log line has more of a URL than its host.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from belljar import ipc
from belljar.egress.session_sockets import SessionSocket, serving
from belljar.environments.install_room import InstallRoom
from belljar.errors import BelljarError, TooLarge
from belljar.files.https import Reach, fetch_https, send_https
from belljar.files.openat import Owner
from belljar.files.workspace import Workspace

MOST_URL_CHARS = 16_384
_LINE_BYTES = 65_536
_LINE_S = 10
_MAX_AT_ONCE = 4
_MAX_REFUSED = 16

log = logging.getLogger(__name__)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    action: Literal["fetch", "send"]
    url: Annotated[str, Field(max_length=MOST_URL_CHARS)]
    name: Annotated[str, Field(max_length=4_096)]


@dataclass(frozen=True, slots=True)
class TransferReply:
    """How many bytes were moved, or why none were."""

    size: int = 0
    error: str = ""


class Transfers:
    """Moves files between one session's folder and the hosts it may reach."""

    def __init__(self, folder: Path, owner: Owner | None, reach: Reach, room: InstallRoom, limit_bytes: int) -> None:
        self._workspace = Workspace(folder, owner)
        self._reach = reach
        self._room = room
        self._limit_bytes = limit_bytes

    async def fetch(self, url: str, name: str) -> int:
        """Fetch a URL into a file of the folder; return its size."""
        self._workspace.check_name(name)
        limit = self._limit_bytes
        if self._room.is_limited:
            limit = min(limit, (await self._room.check_begun()).size_bytes)
        content = await fetch_https(url, limit, reach=self._reach)
        await asyncio.to_thread(self._workspace.write, name, content)
        return len(content)

    async def send(self, url: str, name: str) -> int:
        """Send a file of the folder to a URL; return its size."""
        file, status = await asyncio.to_thread(self._workspace.open_read, name)
        with file:
            if status.st_size > self._limit_bytes:
                raise TooLarge(
                    f"the file has {status.st_size:,} bytes, and the limit is {self._limit_bytes:,}",
                    hint="Send it in smaller parts",
                )
            await send_https(url, file, status.st_size, reach=self._reach)
        return status.st_size


class TransferServer:
    """Answers the requests of one session; made by `open_transfer_server`."""

    def __init__(self, session_id: str, transfers: Transfers) -> None:
        self._session_id = session_id
        self._transfers = transfers
        self._conversations = ipc.Conversations(_MAX_AT_ONCE + _MAX_REFUSED)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        if self._conversations.is_full:
            writer.transport.abort()
            return
        self._conversations.start(self._serve(ipc.MessageStream(reader, writer)))

    async def aclose(self) -> None:
        """End all conversations."""
        await self._conversations.aclose()

    async def _serve(self, stream: ipc.MessageStream) -> None:
        try:
            reply = await self._answer(stream)
            async with asyncio.timeout(_LINE_S):
                await stream.send(asdict(reply))
        except (OSError, TimeoutError):
            pass
        finally:
            stream.close()

    async def _answer(self, stream: ipc.MessageStream) -> TransferReply:
        if len(self._conversations) > _MAX_AT_ONCE:
            return TransferReply(error=f"busy: {_MAX_AT_ONCE} files are being moved already")
        try:
            async with asyncio.timeout(_LINE_S):
                request = await stream.receive(_Request.model_validate_json)
        except ipc.Malformed:
            return TransferReply(error="invalid-argument: the request cannot be read")
        ids = {"session_id": self._session_id}
        log.info("session %s: %s of a file by URL", self._session_id, request.action, extra=ids)
        move = self._transfers.fetch if request.action == "fetch" else self._transfers.send
        try:
            return TransferReply(size=await move(request.url, request.name))
        except BelljarError as error:
            return TransferReply(error=f"{error.code}: {error}")


@asynccontextmanager
async def open_transfer_server(
    folder: Path, name: str, *, session_id: str, transfers: Transfers, socket: SessionSocket | None = None
) -> AsyncGenerator[TransferServer]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends."""
    server = TransferServer(session_id, transfers)
    try:
        async with serving(folder, name, server.accept, limit=_LINE_BYTES, session_socket=socket):
            yield server
    finally:
        with contextlib.suppress(OSError):
            await server.aclose()
