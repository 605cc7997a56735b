"""A socket on which code inside a session asks the host for something: one JSON line comes in, one object goes out.

Whoever asks may be hostile, so the size of a line, the time to send it and the number of connections are bounded.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from belljar import ipc
from belljar.egress.session_sockets import SessionSocket, open_socket_server

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LINE_BYTES = 65_536
_LINE_S = 10
_MAX_REFUSED = 16
"""How many more connections than may wait are answered, with a refusal; those beyond are closed at once."""

Request = TypeVar("Request")


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
