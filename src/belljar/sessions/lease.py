"""How long a session may stay: from its last use on, and for ever while it is in use."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from belljar.models import SessionNotice

INSTRUCTIONS = (
    "Pass this session_id in the next calls: variables, imports and files stay. "
    "It ends after {minutes:g} minutes without use."
)


class Lease:
    """One session's."""

    def __init__(self, session_id: str, *, idle_s: float, is_in_use: Callable[[], bool]) -> None:
        self._session_id = session_id
        self._idle_s = idle_s
        self._is_in_use = is_in_use
        self.created_at = time.time()
        self.used_at = time.time()
        self._used_ticks = time.monotonic()
        """The same by the clock that nobody sets: what expires does so by this one."""
        self._is_noticed = False

    def restore(self, created_at: float) -> None:
        """The session is older than this server, and was told of."""
        self.created_at = created_at
        self._is_noticed = True

    def touch(self) -> None:
        """It was used."""
        self.used_at = time.time()
        self._used_ticks = time.monotonic()

    @property
    def left_s(self) -> float:
        """How long until it ends if nothing happens."""
        return self._idle_s - (0.0 if self._is_in_use() else time.monotonic() - self._used_ticks)

    @property
    def expires_at(self) -> float:
        """When it ends if nothing happens."""
        return time.time() + self.left_s

    def notice(self) -> SessionNotice | None:
        """What the first caller is told; None ever after."""
        if self._is_noticed:
            return None
        self._is_noticed = True
        instructions = INSTRUCTIONS.format(minutes=self._idle_s / 60)
        return SessionNotice(session_id=self._session_id, instructions=instructions, expires_at=iso(self.expires_at))


def iso(timestamp: float) -> str:
    """A time as callers read it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
