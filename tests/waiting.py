"""Waits for what other processes and tasks do: look again until it is so, and fail when it takes too long."""

import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar, cast, overload

import anyio

DEADLINE_S = 60.0
# Looks come often at first, and then more seldom: some walk over all of /proc.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05
Seen = TypeVar("Seen")


@overload
async def until(look: Callable[[], Awaitable[Seen]], *, limit_s: float = DEADLINE_S) -> Seen: ...
@overload
async def until(look: Callable[[], Seen], *, limit_s: float = DEADLINE_S) -> Seen: ...
async def until(look: Callable[[], Seen | Awaitable[Seen]], *, limit_s: float = DEADLINE_S) -> Seen:
    """Call `look` again and again, and return what it returns as soon as that is true."""
    seen: object = None
    pause_s = FIRST_PAUSE_S
    with anyio.move_on_after(limit_s):
        while True:
            found = look()
            seen = await found if isawaitable(found) else found
            if seen:
                return cast("Seen", seen)
            await anyio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError(f"not so after {limit_s:g} s: {seen!r}")


def until_blocking(look: Callable[[], Seen], *, limit_s: float = DEADLINE_S) -> Seen:
    """Do the same in a test that is no coroutine."""
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not so after {limit_s:g} s: {seen!r}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return seen
