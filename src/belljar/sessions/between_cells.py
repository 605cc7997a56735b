"""Questions to a session's kernel that a person waits for: completions, help, a look at variables.

They take the session's turn, as a cell does, and are given up rather than made to wait for a cell.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Literal, TypeVar

from belljar.errors import KernelDied
from belljar.kernels.base import Kernel
from belljar.sessions.session import Session

_Answer = TypeVar("_Answer")
# A completion that is a second late is too late, because the person has typed on. A checkpoint that is taken between
# two cells is over by then.
TURN_TIMEOUT_S: Final = 1.0


@asynccontextmanager
async def kernel_between_cells(session: Session) -> AsyncGenerator[Kernel | Literal["busy", "not started"]]:
    """Hold the session's turn while its kernel is asked; yields why not when it runs a cell or has no kernel."""
    if session.is_busy:
        yield "busy"
        return
    try:
        async with asyncio.timeout(TURN_TIMEOUT_S):
            await session.turn.acquire()
    except TimeoutError:
        yield "busy"
        return
    try:
        kernel = session.session_kernel.kernel
        yield kernel if kernel is not None and kernel.is_alive() else "not started"
    finally:
        session.turn.release()


async def ask_between_cells(session: Session, ask: Callable[[Kernel], Awaitable[_Answer]]) -> _Answer | None:
    """Return the kernel's answer; None when the session is busy, or has no kernel, or that dies meanwhile."""
    try:
        async with kernel_between_cells(session) as kernel:
            return None if isinstance(kernel, str) else await ask(kernel)
    except KernelDied:
        return None
