"""The socket on which code inside a session asks the host to fetch a file by URL, or to send one: `belljar_transfer`.

One JSON line comes in, one JSON object goes out. Whoever asks may be hostile, so size, time and number are bounded,
only hosts of the egress rules are reached, and no answer or log line has more of a URL than its host.
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field

from belljar import ipc
from belljar.egress.session_sockets import SessionSocket
from belljar.environments.install_room import InstallRoom
from belljar.errors import BelljarError, TooLarge
from belljar.files.https import Reach, fetch_https_into, send_https
from belljar.files.openat import Owner
from belljar.files.workspace import Workspace
from belljar.provisioning.request_server import RequestStream, serving_requests

MAX_URL_CHARS = 16_384
_MAX_AT_ONCE = 4

log = logging.getLogger(__name__)


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

    def __init__(self, folder: Path, owner: Owner | None, reach: Reach, room: InstallRoom, limit_bytes: int) -> None:
        self._folder = folder
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
        # Not in memory, where four files at once would be half a gigabyte of the server's, for each session.
        with tempfile.TemporaryFile(dir=self._folder.parent) as file:
            size = await fetch_https_into(file, url, limit, reach=self._reach)
            async with self._room.room_for_file(size):
                await to_thread.run_sync(self._workspace.write_from, name, file.fileno(), limit)
        return size

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
