"""Cancellations that come before what they cancel, because each takes a connection of its own."""

import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

KEPT_S: Final = 5.0
MOST: Final = 1_000


class EarlyCancellations:
    """What was cancelled and is not known yet: the latest, for a few seconds."""

    def __init__(self) -> None:
        self._until: OrderedDict[Hashable, float] = OrderedDict()

    def add(self, key: Hashable) -> None:
        """Remember that this is cancelled."""
        self._until[key] = time.monotonic() + KEPT_S
        self._until.move_to_end(key)
        if len(self._until) > MOST:
            self._until.popitem(last=False)

    def take(self, key: Hashable) -> bool:
        """Return whether this was cancelled a moment ago, and forget it."""
        return self._until.pop(key, 0.0) > time.monotonic()
