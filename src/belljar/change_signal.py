"""Wakes those who wait for the next change: of an execution, of a workflow's run, of a server's sessions."""

import asyncio
from collections.abc import Coroutine


class ChangeSignal:
    """Told of every change, on the event loop's thread. It keeps none: who waits must have looked before."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    def wait(self, wait_s: float) -> Coroutine[None, None, bool]:
        """Wait for the next change after this call; return False when `wait_s` passed without one.

        The call itself counts, not the first step of a task that it is given to: a change between the two is heard.
        """
        return _is_set_within(self._event, wait_s)


async def _is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
