"""Listening sockets in a session's scratch folder, where its code can reach them."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


@dataclass(slots=True)
class Door:
    """A listening socket beyond the end of a server, for whoever keeps it."""

    descriptor: int = -1
    """An earlier server's, to listen on; then, while it is served, the one to keep."""
    is_left: bool = False
    """Whether it stays when it is served no longer."""


@asynccontextmanager
async def serving(
    folder: Path, name: str, accept: Accept, *, limit: int, door: Door | None = None
) -> AsyncGenerator[None]:
    """Answer on a UNIX socket of that name in the folder until the block ends; lines are up to `limit` bytes."""
    loop = asyncio.get_running_loop()

    def begin() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit, loop), accept, loop)

    async with serving_as(folder, name, begin, door=door):
        yield


@asynccontextmanager
async def serving_as(
    folder: Path, name: str, begin: Callable[[], asyncio.Protocol], *, door: Door | None = None
) -> AsyncGenerator[None]:
    """The same for who takes the bytes as they come."""
    with _listening(folder, name, door or Door()) as listener:
        # Begun inside the block: a start that is cancelled would leave the loop a number that is somebody else's next.
        server = await asyncio.get_running_loop().create_unix_server(begin, sock=listener, start_serving=False)
        try:
            await server.start_serving()
            yield
        finally:
            server.close()


@contextmanager
def _listening(folder: Path, name: str, door: Door) -> Generator[socket.socket]:
    """A socket that is gone afterwards. Only who may enter the folder can connect."""
    is_kept = door.descriptor >= 0
    with socket.socket(fileno=door.descriptor) if is_kept else socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        door.descriptor = listener.fileno()
        with _short(folder) as reachable:
            if not is_kept:
                listener.bind(str(reachable / name))
            try:
                if not is_kept:
                    # The session may have a uid of its own; the folder is closed to everyone else's.
                    (reachable / name).chmod(0o666)
                    listener.listen(128)
                yield listener
            finally:
                if not door.is_left:
                    with contextlib.suppress(OSError):
                        (folder / name).unlink()


class Conversations:
    """The connections that are being served, ended together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, conversation: Coroutine[None, None, None]) -> None:
        """Serve one connection."""
        task = asyncio.get_running_loop().create_task(conversation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """End every one of them."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextmanager
def _short(folder: Path) -> Generator[Path]:
    """The folder under a name that leaves room in a socket's address, which holds 107 bytes."""
    if sys.platform != "linux":
        yield folder
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
