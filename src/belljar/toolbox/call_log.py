"""The log of one execution's calls, in the order they started, and how each ended, without arguments and results."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from belljar.toolbox.base import CallRecord

MAX_RECORDS = 1_000

End = Literal["returned", "failed", "refused", "cancelled"]
_Started = tuple[str, str, float]
"""The server, the tool and the start time of a call in flight."""
OnChange = Callable[[int, CallRecord], None]
"""Called with the number of a call and its current record."""

CUT_OFF = "its server ended meanwhile; whether the tool did it is not known"


class CallLog:
    """Keeps every call in flight, and the latest of those that have ended."""

    def __init__(self, *, earlier: Sequence[CallRecord] = (), on_change: OnChange | None = None) -> None:
        self._records: dict[int, CallRecord | _Started] = {}
        self._count = 0
        self._on_change = on_change
        for record in earlier:
            self._count += 1
            is_cut_off = record.state == "started"
            self._set(self._count, replace(record, state="failed", reason=CUT_OFF) if is_cut_off else record)

    def start(self, server: str, tool: str) -> int:
        """Record the start of a call; return its number, for `finish`."""
        self._count += 1
        self._records[self._count] = (server, tool, time.monotonic())
        if self._on_change is not None:
            self._on_change(self._count, CallRecord(server, tool, "started"))
        return self._count

    def finish(self, number: int, state: End, reason: str = "") -> None:
        """Record how a call ended."""
        started = self._records[number]
        if isinstance(started, CallRecord):
            return
        server, tool, began = started
        self._set(number, CallRecord(server, tool, state, round(time.monotonic() - began, 6), reason))
        if len(self._records) > MAX_RECORDS:
            del self._records[next(each for each, record in self._records.items() if isinstance(record, CallRecord))]

    def _set(self, number: int, record: CallRecord) -> None:
        self._records[number] = record
        if self._on_change is not None:
            self._on_change(number, record)

    def records(self) -> list[CallRecord]:
        """Return the records; a call in flight has the state `started`."""
        return [
            record if isinstance(record, CallRecord) else CallRecord(record[0], record[1], "started")
            for record in self._records.values()
        ]


def most_telling(records: Sequence[CallRecord], most: int) -> list[CallRecord]:
    """Return the `most` important records in their order: calls that did not return first, then the latest."""
    ranked = sorted(range(len(records)), key=lambda place: (records[place].state == "returned", -place))
    return [records[place] for place in sorted(ranked[:most])]
