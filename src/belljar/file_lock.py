"""Locks on files that servers on one host hold in turn; a lock is released when the process that holds it ends."""

import fcntl
import os
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

_LOOK_EVERY_S = 0.1


@contextmanager
def hold_lock(path: Path) -> Generator[None]:
    """Hold the lock; blocks until it is free."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@asynccontextmanager
async def open_lock(path: Path, *, on_wait: Callable[[], None] | None = None) -> AsyncGenerator[int]:
    """Hold the lock. A child that inherits the descriptor keeps it locked if this process is killed."""
    descriptor = _open(path)
    try:
        if not _try_lock(descriptor):
            if on_wait:
                on_wait()
            # Poll, because a thread that waits in flock cannot be cancelled.
            while not _try_lock(descriptor):  # noqa: ASYNC110
                await anyio.sleep(_LOOK_EVERY_S)
        yield descriptor
    finally:
        os.close(descriptor)


@asynccontextmanager
async def try_lock(path: Path) -> AsyncGenerator[int | None]:
    """Hold the lock if it is free; yield None, without waiting, if somebody holds it."""
    descriptor = _open(path)
    try:
        yield descriptor if _try_lock(descriptor) else None
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
