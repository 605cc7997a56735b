"""A lock that servers on one host hold in turn, through a file; it goes with the process that held it."""

import fcntl
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

_LOOK_EVERY_S = 0.1


@asynccontextmanager
async def open_lock(path: Path, *, on_wait: Callable[[], None] | None = None) -> AsyncGenerator[int]:
    """Hold the lock; a child that gets the descriptor holds it on, should this process be killed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not _try_lock(descriptor):
            if on_wait:
                on_wait()
            # A thread that waits in flock cannot be cancelled, so we look again instead.
            while not _try_lock(descriptor):  # noqa: ASYNC110
                await anyio.sleep(_LOOK_EVERY_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
