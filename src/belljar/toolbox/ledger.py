"""The calls of one execution, in the order they were started, and how each went. Arguments and results are not kept."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from belljar.toolbox.base import CallRecord

MOST_RECORDS = 1_000

End = Literal["returned", "failed", "refused", "cancelled"]


class Ledger:
    """Keeps every call that is under way, and the latest of those that are not."""

    def __init__(self) -> None:
        self._records: dict[int, CallRecord] = {}
        self._started_at: dict[int, float] = {}
        self._count = 0

    def start(self, server: str, tool: str) -> int:
        """A call begins; returns its number, for `end`."""
        self._count += 1
        self._records[self._count] = CallRecord(server, tool, "started")
        self._started_at[self._count] = time.monotonic()
        return self._count

    def end(self, number: int, state: End, reason: str = "") -> None:
        """How it went."""
        duration_s = round(time.monotonic() - self._started_at.pop(number), 6)
        self._records[number] = replace(self._records[number], state=state, duration_s=duration_s, reason=reason)
        if len(self._records) > MOST_RECORDS:
            del self._records[next(each for each in self._records if each not in self._started_at)]

    def records(self) -> list[CallRecord]:
        """What is known now; a call that is under way is `started`."""
        return [*self._records.values()]


def most_telling(records: Sequence[CallRecord], most: int) -> list[CallRecord]:
    """Some of them, in order: those that did not return before those that did, and late ones before early ones."""
    ranked = sorted(range(len(records)), key=lambda place: (records[place].state == "returned", -place))
    return [records[place] for place in sorted(ranked[:most])]
