"""The event loop of a session, which makes its selector and its sockets when something asks for them.

Most sessions never run it. Without these there is nothing in a loop that forks must not share, so a zygote makes one
for all of them: each fork copies 90 pages less than if it made its own, and has three descriptors less.
"""

import asyncio
import selectors
from typing import Any

_MADE_LATER = ("_selector", "_ssock", "_csock")
_NONE_YET: Any = object()


class SessionEventLoop(asyncio.SelectorEventLoop):
    """An event loop like any other, as soon as it is used."""

    def __init__(self) -> None:
        super().__init__(_NONE_YET)
        del self._selector

    def _make_self_pipe(self) -> None:
        if self._selector is not _NONE_YET:
            super()._make_self_pipe()  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        """Make what is missing; called for attributes that the loop does not have."""
        if name not in _MADE_LATER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._selector = selectors.DefaultSelector()
        self._make_self_pipe()
        return vars(self)[name]


def is_made(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop has a selector and sockets that a fork would share."""
    return not isinstance(loop, SessionEventLoop) or _MADE_LATER[0] in vars(loop)


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
