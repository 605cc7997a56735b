"""A session's comms: what its widgets say goes to those who show them, what is done to those comes back in its turn.

Nothing of it is kept: the journal has what cells show, and a front end that comes later asks the widgets themselves.
With nobody to show them, their words go nowhere. Knows nothing of widgets.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from belljar.errors import KernelDied
from belljar.executions.stopper import Stopper
from belljar.kernels.base import CommKernel, has_comms
from belljar.outputs.events import CommMessage, Event, Finished, InputRequest, Raised

if TYPE_CHECKING:
    from belljar.sessions.session import Session

OVERHEARING_S = 0.1
# At once, before the turn is given back.
MOST_OVERHEARD = 100
# What a front end that has just come asks of all widgets, before anyone has touched one.
STATES = "request_states"
CommWatcher = Callable[[str, int, Event | None], None]
"""Told the id of an execution and how many of its events were before, or of a request of a front end's and 0, or of
nothing; what was said; and None when the request has been heard."""


class SessionComms:
    """One session's."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._stopper: Stopper | None = None
        self._watchers: set[CommWatcher] = set()
        self._overhearing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    def watch(self, watcher: CommWatcher) -> None:
        """Someone shows the widgets from now on."""
        self._watchers.add(watcher)
        if self._overhearing is None or self._overhearing.done():
            self._overhearing = self._session.queue.run_aside(self._overhear())

    def unsubscribe(self, watcher: CommWatcher) -> None:
        """They do not any more."""
        self._watchers.discard(watcher)

    async def _overhear(self) -> None:
        """Threads and tasks outlive their cells, and have widgets say things. Between cells nothing else is read."""
        session = self._session
        while self._watchers:
            await asyncio.sleep(OVERHEARING_S)
            if session.is_busy or session.turn.locked():
                continue
            async with session.turn:
                kernel = session.session_kernel.kernel
                if has_comms(kernel) and kernel.is_alive():
                    with suppress(KernelDied):  # told to the next cell
                        await self._pass_on_overheard(kernel)

    async def _pass_on_overheard(self, kernel: CommKernel) -> None:
        screens = self._session.screens()
        for _ in range(MOST_OVERHEARD):
            if (message := await kernel.overhear()) is None:
                return
            for passed in await screens.passed(message):
                self.tell("", 0, passed)

    def tell(self, source_id: str, sequence: int, event: Event | None) -> bool:
        """Pass something on; False when nobody wants to know."""
        for watcher in [*self._watchers]:
            watcher(source_id, sequence, event)
        return bool(self._watchers)

    async def deliver(self, request_id: str, message: CommMessage, author: str = "") -> None:
        """Hand a front end's word to the session, in its turn. What comes of it is told under the request's id."""
        session = self._session
        session.lease.touch()
        try:
            async with session.turn, session.admission.slot(session.principal):
                kernel = session.session_kernel.kernel
                if has_comms(kernel) and kernel.is_alive() and not self._is_closed:
                    if message.kind == "comm_msg" and message.data.get("method") != STATES:
                        session.authors.use(author)
                    await self._listen(request_id, kernel, kernel.deliver_comm(message))
        finally:
            self.tell(request_id, 0, None)

    async def _listen(self, request_id: str, kernel: CommKernel, events: AsyncIterator[Event]) -> None:
        """As to a cell, but for no record: who is there sees it now."""
        settings, screens = self._session.settings, self._session.screens()
        self._stopper = stopper = Stopper(
            kernel, timeout_s=settings.execution_timeout_s, grace_s=settings.interrupt_grace_s
        )
        self._is_quiet.clear()
        try:
            with stopper.watching():
                async for event in events:
                    if isinstance(event, Finished):
                        self._session.session_kernel.remember(event)
                    elif isinstance(event, InputRequest):
                        await kernel.reply_input(None)  # the runner asks nothing here; one that does is hostile
                    else:
                        for passed in await screens.passed(event):
                            self.tell(request_id, 0, passed)
        except KernelDied as death:
            # The next cell finds it dead, and tells what was lost.
            self.tell(request_id, 0, Raised("died", death.message, [f"died: {death.message}"]))
        finally:
            self._stopper = None
            self._is_quiet.set()
            for passed in screens.flush():
                self.tell(request_id, 0, passed)

    async def opened(self) -> dict[str, str]:
        """Targets of the comms there are, by their ids. Called by who has the session's turn."""
        kernel = self._session.session_kernel.kernel
        return await kernel.comms() if has_comms(kernel) and kernel.is_alive() else {}

    def interrupt(self) -> None:
        """Stop a callback that runs."""
        if self._stopper is not None:
            self._stopper.stop("interrupted")

    async def aclose(self) -> None:
        """Hear nothing more, and stop a callback that runs: the session is about to be put away."""
        self._is_closed = True
        self.interrupt()
        await self._is_quiet.wait()
