"""A session's comms: messages of its widgets to the front ends that show them, and back in the session's turn.

Nothing of it is recorded: the journal has the displays of cells, and a front end that attaches later asks the widgets
for their state. Without a front end the messages are dropped. Knows nothing of what the messages mean.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from belljar.errors import KernelDied
from belljar.executions.outcome import Stopper
from belljar.kernels.base import CommKernel, has_comms
from belljar.outputs.events import CommMessage, Event, Finished, InputRequest, Raised

if TYPE_CHECKING:
    from belljar.sessions.session import Session

OVERHEARING_S = 0.1
# The most messages read at once between cells, before the turn is given back.
MAX_OVERHEARD = 100
# By this a front end that has just attached asks all widgets for their state. It does not count as using a widget.
STATES = "request_states"
CommWatcher = Callable[[str, int, Event | None], None]
"""Called with a source id, a number and an event.

The source is an execution, with the number of its events before this one; a request of a front end, with 0; or empty,
with 0, between cells. The event is None when the request is done.
"""


class SessionComms:
    """The comms of one session."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._stopper: Stopper | None = None
        self._watchers: set[CommWatcher] = set()
        self._receiving: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    def add_watcher(self, watcher: CommWatcher) -> None:
        """Pass messages to a front end from now on."""
        self._watchers.add(watcher)
        if self._receiving is None or self._receiving.done():
            self._receiving = self._session.queue.run_aside(self._receive_between_cells())

    def remove_watcher(self, watcher: CommWatcher) -> None:
        """Pass no more messages to a front end."""
        self._watchers.discard(watcher)

    async def _receive_between_cells(self) -> None:
        """Read the messages that threads and tasks of earlier cells send between cells, because nothing else does."""
        session = self._session
        while self._watchers:
            await asyncio.sleep(OVERHEARING_S)
            if session.is_busy or session.turn.locked():
                continue
            async with session.turn:
                kernel = session.session_kernel.kernel
                if has_comms(kernel) and kernel.is_alive():
                    with suppress(KernelDied):  # the next cell reports it
                        await self._pass_on_received(kernel)

    async def _pass_on_received(self, kernel: CommKernel) -> None:
        screens = self._session.screens()
        for _ in range(MAX_OVERHEARD):
            if (message := await kernel.receive_comm()) is None:
                return
            for passed in await screens.apply(message):
                self.tell("", 0, passed)

    def tell(self, source_id: str, sequence: int, event: Event | None) -> bool:
        """Pass an event to all front ends; return False when there are none."""
        for watcher in [*self._watchers]:
            watcher(source_id, sequence, event)
        return bool(self._watchers)

    async def deliver(self, request_id: str, message: CommMessage, author: str = "") -> None:
        """Deliver a front end's message to the kernel in the session's turn; pass on its output by the request's id."""
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
        """Pass on the events of a widget callback; as for a cell, but without a record."""
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
                        await kernel.reply_input(None)  # our runner never asks here; a hostile one might
                    else:
                        for passed in await screens.apply(event):
                            self.tell(request_id, 0, passed)
        except KernelDied as death:
            # The next cell finds the kernel dead, and reports what was lost.
            self.tell(request_id, 0, Raised("died", death.message, [f"died: {death.message}"]))
        finally:
            self._stopper = None
            self._is_quiet.set()
            for passed in screens.flush():
                self.tell(request_id, 0, passed)

    async def list_open(self) -> dict[str, str]:
        """Return the targets of the open comms by their ids. Called with the session's turn."""
        kernel = self._session.session_kernel.kernel
        return await kernel.comms() if has_comms(kernel) and kernel.is_alive() else {}

    def interrupt(self) -> None:
        """Stop a callback that runs."""
        if self._stopper is not None:
            self._stopper.stop("interrupted")

    async def aclose(self) -> None:
        """Accept no more messages, and stop a callback that runs, because the session is about to leave this server."""
        self._is_closed = True
        self.interrupt()
        await self._is_quiet.wait()
