"""Copies of kernels that sleep: processes that run nothing until a kernel is woken from them, and what may go wrong."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from belljar.errors import CopyRefused
from belljar.kernels import frames, messages
from belljar.kernels.base import Asleep
from belljar.kernels.copies import private_memory_mb, set_expendable

COPY_PATIENCE_S = 10.0


class SleepingKernel:
    """A copy of a kernel as it once was."""

    def __init__(self, wire: frames.Wire, lost: list[str]) -> None:
        self.wire = wire
        self.lost = lost
        self.pid = wire.peer_pid
        # Memory that runs out is taken from copies first; a woken one starts as important as any.
        set_expendable(self.pid, is_expendable=True)

    def is_alive(self) -> bool:
        """Whether it can still be woken."""
        return not self.wire.is_hung_up()

    def memory_mb(self) -> float:
        """What it costs beside the kernel."""
        return private_memory_mb(self.pid)


def ours(copy: Asleep) -> SleepingKernel:
    """A copy that was made here."""
    if not isinstance(copy, SleepingKernel):
        raise TypeError(f"{copy!r} is a copy of another kind of kernel")
    return copy


def check_copied(answer: messages.Forked) -> messages.Forked:
    """Refuse what the runner could not copy, in its words."""
    if answer.error:
        raise CopyRefused(
            f"the session cannot be copied: {answer.error}", hint="End those threads first, or start a new session"
        )
    return answer


@asynccontextmanager
async def patience() -> AsyncGenerator[None]:
    """For an answer of a session, whose code may see to it that there is none."""
    try:
        async with asyncio.timeout(COPY_PATIENCE_S):
            yield
    except TimeoutError:
        raise CopyRefused(
            f"the session cannot be copied: it gave no answer in {COPY_PATIENCE_S:g} s", hint="Start a new session"
        ) from None
