"""What saving and loading a session's variables have in common: the entries of the stream, and the report.

Both happen inside the sandbox. What cannot be kept is named, with its type and the reason; nothing a variable does when
it is pickled or made again can do more than lose it. Both run the session's own code, so both can be interrupted like
a cell: `run` is the part that may be, `finish` the part that must not.
"""

# What is kept may be anything.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

# The host refuses a report that is larger.
MAX_KEPT = 10_000
MAX_LOST = 1_000
MAX_NAME = 200
MAX_REASON = 600
WHOLE_FILE = "*"
INTERRUPTED = "it was interrupted before this was done"
VARIABLE, IMPORTS, SURROUNDING = "variable", "imports", "surrounding"


class Loss(NamedTuple):
    """Something that could not be kept."""

    name: str
    type: str
    reason: str


class Entry(NamedTuple):
    """One `dump` of the stream."""

    kind: str
    name: str
    value: Any


class Report:
    """What became of every name."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.lost: list[Loss] = []
        self.size_bytes = 0

    def message(self) -> dict[str, Any]:
        """For the host, within its limits."""
        lost = [[one.name[:MAX_NAME], one.type[:MAX_NAME], one.reason[:MAX_REASON]] for one in self.lost]
        if len(lost) > MAX_LOST:
            lost[MAX_LOST - 1 :] = [[WHOLE_FILE, "", f"{len(lost) - MAX_LOST + 1:,} more could not be kept"]]
        kept = [name[:MAX_NAME] for name in self.kept[:MAX_KEPT]]
        return {"type": "state", "kept": kept, "lost": lost, "size_bytes": self.size_bytes}


class Keeping(Protocol):
    """Saving or loading, as the runner sees it."""

    report: Report

    def run(self) -> None:
        """All but the last step. May be interrupted, and raises nothing else."""
        ...

    def finish(self) -> None:
        """Settle what is done by now."""
        ...


@contextlib.contextmanager
def undisturbed() -> Generator[None, None, None]:
    """No warnings about what variables do when they are pickled, and no collector that looks at each new object."""
    was_enabled = gc.isenabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
