"""The channels of one Jupyter kernel: requests go out, and what comes in is queued in order of arrival.

The queue takes a bounded number of bytes; while it is full, the channels are not read. It holds messages unparsed,
because a message's objects can take many times the memory of its text. Knows nothing of cells or of the kernel's
process.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from belljar.errors import KernelDied
from belljar.kernels.jupyter.messages import Message, MessageSigner
from belljar.kernels.jupyter.zmtp import ZmtpConnection

QUEUE_BYTES = 64 * 1024 * 1024


class _BoundedQueue:
    """A queue with a limit in bytes. Several tasks put, one gets."""

    def __init__(self) -> None:
        self._messages: deque[list[bytes]] = deque()
        self._size_bytes = 0
        self._has_messages = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_closed = False

    async def put(self, parts: list[bytes]) -> None:
        while self._size_bytes >= QUEUE_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._messages.append(parts)
        self._size_bytes += _size_bytes(parts)
        self._has_messages.set()

    async def get(self) -> list[bytes] | None:
        """Return the next message, waiting for it; None when the queue is empty and closed."""
        await self._has_messages.wait()
        if not self._messages:
            return None
        parts = self._messages.popleft()
        self._size_bytes -= _size_bytes(parts)
        self._has_room.set()
        if not self._messages and not self._is_closed:
            self._has_messages.clear()
        return parts

    def close(self) -> None:
        self._is_closed = True
        self._has_messages.set()


class Channels:
    """The connections to one kernel, read from the start by a task each.

    `close` is called when it is known why the kernel ended, `aclose` releases the connections.
    """

    def __init__(self, connections: Mapping[str, ZmtpConnection], signer: MessageSigner) -> None:
        loop = asyncio.get_running_loop()
        self._connections = connections
        self._signer = signer
        self._queue = _BoundedQueue()
        self._awaited: dict[str, asyncio.Future[Message]] = {}
        self._end: asyncio.Future[KernelDied] = loop.create_future()
        self.breach: asyncio.Future[KernelDied] = loop.create_future()
        """Has a result when the kernel broke the protocol. The owner of its process must then end it and call `close`.
        """
        self.readers = [loop.create_task(self._read(name, one)) for name, one in connections.items()]
        """Each ends when its connection is lost."""

    @property
    def peer_pid(self) -> int:
        """Return the pid of the process that listens on shell; 0 when it is unknown."""
        return self._connections["shell"].peer_pid

    async def send(self, channel: str, kind: str, content: Mapping[str, Any], *, parent_id: str = "") -> str:
        """Send a message and return its id; replies to it come through `receive`."""
        request_id, parts = self._signer.pack(kind, content, parent_id)
        await self._send(channel, parts)
        return request_id

    def send_nowait(self, channel: str, kind: str, content: Mapping[str, Any]) -> None:
        """Send a small message without waiting, to a kernel that may have stopped reading or be gone."""
        if not self._end.done():
            self._connections[channel].send_nowait(self._signer.pack(kind, content)[1])

    async def ask(self, kind: str, content: Mapping[str, Any]) -> Message:
        """Send a request on shell and return its reply; all other messages stay in the queue."""
        request_id, parts = self._signer.pack(kind, content)
        reply = self._awaited[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send("shell", parts)
            await asyncio.wait([reply, self._end], return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise await self._death()
            return reply.result()
        finally:
            del self._awaited[request_id]

    async def receive(self) -> Message:
        """Return the next message of a kind we know; KernelDied once everything that came before the end was read."""
        while True:
            parts = await self._queue.get()
            if parts is None:
                raise await self._death()
            try:
                message = self._signer.unpack(parts)
            except KernelDied as breach:
                self._report(breach)
                raise await self._death() from None
            if message is not None:
                return message

    def close(self, death: KernelDied) -> None:
        """Note that nothing more will come, and why; the first reason stays."""
        if not self._end.done():
            self._end.set_result(death)
        self._queue.close()

    async def aclose(self) -> None:
        """Release the connections; may be called twice."""
        self.close(KernelDied("the kernel was closed"))
        for reader in self.readers:
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)
        for connection in self._connections.values():
            await connection.aclose()

    async def _send(self, channel: str, parts: list[bytes]) -> None:
        if self._end.done():
            raise await self._death()
        try:
            await self._connections[channel].send(parts)
        except OSError:
            raise await self._death() from None

    async def _death(self) -> KernelDied:
        death = await asyncio.shield(self._end)
        return KernelDied(death.message, hint=death.hint)

    async def _read(self, name: str, connection: ZmtpConnection) -> None:
        try:
            while (parts := await connection.receive()) is not None:
                if name == "control" or (name == "shell" and self._is_awaited(parts)):
                    continue
                await self._queue.put(parts)
        except KernelDied as breach:
            self._report(breach)

    def _report(self, breach: KernelDied) -> None:
        if not self.breach.done():
            self.breach.set_result(breach)

    def _is_awaited(self, parts: list[bytes]) -> bool:
        message = self._signer.unpack(parts) if self._awaited else None
        reply = self._awaited.get(message.parent_id) if message else None
        if message is None or reply is None:
            return False
        if not reply.done():
            reply.set_result(message)
        return True


def _size_bytes(parts: list[bytes]) -> int:
    # An empty part takes memory too.
    return sum(map(len, parts)) + 64 * len(parts)
