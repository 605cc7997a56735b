"""The event loop of a session, which makes its selector and its sockets when something asks for them.

Most sessions never run it. Without these there is nothing in a loop that forks must not share, so a zygote makes one
for all of them: each fork copies 90 pages less than if it made its own, and has three descriptors less.
"""

import asyncio
import contextlib
import selectors
import threading
from typing import Any

_NONE_YET: Any = object()
_LATER = ("_selector", "_ssock", "_csock")

# Threads of a session may ask for the same loop at once.
_becoming = threading.RLock()


class SessionEventLoop(asyncio.SelectorEventLoop):
    """An event loop that becomes one of asyncio's own class as soon as it is used.

    Of that class, because `nest_asyncio` patches the class of the loop that runs, and means all loops.
    """

    def __init__(self) -> None:
        super().__init__(_NONE_YET)
        del self._selector

    def _make_self_pipe(self) -> None:
        if self._selector is not _NONE_YET:
            super()._make_self_pipe()  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        """Become a usual loop; called for attributes that this one does not have, its selector or any other."""
        with _becoming:
            if type(self) is SessionEventLoop:
                self._become_usual()
        return getattr(self, name)

    def _become_usual(self) -> None:
        self._selector = selectors.DefaultSelector()
        try:
            self._make_self_pipe()
            self.__class__ = asyncio.SelectorEventLoop  # pyright: ignore[reportAttributeAccessIssue]
        except BaseException:
            # No descriptors were left, or the cell was interrupted: the next to ask tries again.
            for name in _LATER:
                with contextlib.suppress(KeyError):
                    vars(self).pop(name).close()
            self._internal_fds = 0
            raise


def is_made(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop has a selector and sockets that a fork would share."""
    return not isinstance(loop, SessionEventLoop)


def shareable_loop() -> "asyncio.AbstractEventLoop | None":
    """Return a new loop for all forks of this process; None where a module chose loops that have sockets at once."""
    loop = new_loop()
    if not is_made(loop):
        return loop
    loop.close()
    return None


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop for a session: one of ours, unless something else than asyncio's own makes loops here."""
    usual = asyncio.new_event_loop()
    if type(usual) is not asyncio.SelectorEventLoop:
        return usual
    usual.close()
    return SessionEventLoop()
