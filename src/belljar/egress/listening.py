"""Listening sockets in a session's scratch folder, where its code can reach them."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def listening(folder: Path, name: str) -> Generator[socket.socket]:
    """A UNIX socket of that name in the folder; it is gone afterwards. Only who may enter the folder can connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        with _short(folder) as reachable:
            listener.bind(str(reachable / name))
            try:
                # The session may have a uid of its own; the folder is closed to everyone else's.
                (reachable / name).chmod(0o666)
                listener.listen(128)
                yield listener
            finally:
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
