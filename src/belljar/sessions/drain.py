"""Empties a server that is to stop, or whose machine is to be taken away: its sessions sleep and go into the store.

Cells that run have some time to end, nothing new begins, and calls for sessions wait until all sleep, for a while. Then
they are told to come again: the next server that they reach goes on.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Never

from belljar.errors import Busy

if TYPE_CHECKING:
    from belljar.sessions.registry import Registry
    from belljar.sessions.session import Session

AT_ONCE: Final = 4
"""How many sessions are saved and put at once: each may have gigabytes."""

_REFUSE_S: Final = 20.0
"""How long a call waits, so that no caller waits much longer than it asked for."""

log = logging.getLogger(__name__)


class Drain:
    """One drain of a registry's sessions."""

    def __init__(self, registry: "Registry", patience_s: float) -> None:
        """Have every session sleep; cells that still run after `patience_s` are interrupted."""
        self._registry = registry
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._is_over = asyncio.Event()
        self._deadline = time.monotonic() + patience_s
        self._work = asyncio.get_running_loop().create_task(self._run(patience_s))

    @property
    def is_complete(self) -> bool:
        """Return whether all sleep in the store."""
        stored = self._registry.stored
        is_stored = stored is not None and not any(stored.waiting().values())
        return self._is_over.is_set() and is_stored and not self._registry.all()

    async def wait(self) -> None:
        """Wait until all sleep; whoever ends this wait ends the drain."""
        await self._work

    def cancel(self) -> None:
        """Let those go on that are still awake."""
        self._work.cancel()

    async def _run(self, patience_s: float) -> None:
        began, sessions = time.monotonic(), self._registry.all()
        log.warning("this server drains: %d sessions go to sleep, cells have %g s to end", len(sessions), patience_s)
        try:
            await asyncio.gather(*map(self._leave, sessions))
            stored = self._registry.stored
            if stored is not None:
                await stored.put_all()
        finally:
            self._is_over.set()
        left = sum(stored.waiting().values()) if stored is not None else len(sessions)
        where = f"sleep, {left} of them on this disk only" if left else "are in the store"
        log.warning("this server is drained after %.1f s: its sessions %s", time.monotonic() - began, where)

    async def _leave(self, session: "Session") -> None:
        # Waited for in a task, because a wait that is cancelled would cancel the cells.
        ending = asyncio.ensure_future(session.queue.drain())
        await asyncio.wait([ending], timeout=max(0.0, self._deadline - time.monotonic()))
        async with self._slots:
            if self._registry.find_open(session.id) is not session:
                return  # it was cleared, or the server does not wait any longer
            await self._registry.endings.hibernate(session, "left its server, which was told to stop")
            if self._registry.stored is not None:
                await self._registry.stored.put(session.id)

    async def refuse(self, session_id: str) -> Never:
        """Refuse a call for a session, if possible once that can be woken elsewhere."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REFUSE_S):
                await self._is_over.wait()
        does = "sleeps" if self._is_over.is_set() else "goes to sleep"
        raise Busy(
            f"session {session_id[:64]} {does}, because its server is being stopped",
            hint="Make the same call again in 10 seconds: the next server that it reaches wakes the session",
        )
