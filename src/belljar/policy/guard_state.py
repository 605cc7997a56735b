"""What a session's guard must not forget while the session sleeps: names that cells bound, calls made, yeses given.

Kept beside the session's folder, out of the cells' reach. No values: names in code, rules and numbers.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belljar.files.private import write_file
from belljar.policy.code_names import CodeNames

FILE = "guard.json"
NAMES_FILE = "guard-names.json"
"""Apart from the rest: names are as many as cells like, and must not cost what counts and yeses are kept for."""
MOST_BYTES = 32 * 1024 * 1024
MOST_COUNTED = 10_000

log = logging.getLogger(__name__)


class GuardState:
    """One session's; without a folder it lasts as long as the object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder else None
        self._names_path = folder / NAMES_FILE if folder else None
        self.names = CodeNames()
        self._counts: dict[str, int] = {}
        self._approved: set[str] = set()
        self._read()

    def count(self, key: str) -> int:
        """How often that was noted."""
        return self._counts.get(key, 0)

    def add(self, *keys: str) -> None:
        """Once more, for each."""
        for key in keys:
            # Rules are few, and theirs are limits; a server may have as many tools as it likes.
            if key in self._counts or len(self._counts) < MOST_COUNTED or key.startswith("tools."):
                self._counts[key] = self._counts.get(key, 0) + 1
        self._write()

    def is_approved(self, rule: str) -> bool:
        """Whether the person's yes to this rule holds on."""
        return rule in self._approved

    def approve(self, rule: str) -> None:
        """The person said yes, once for all."""
        self._approved.add(rule)
        self._write()

    def learn(self, names: CodeNames) -> None:
        """The names are these now."""
        if names != self.names:
            self.names = names
            self._write_names()

    def inherit(self, other: "GuardState") -> None:
        """A fork knows what its origin did."""
        self.names = other.names.copy()
        self._counts, self._approved = dict(other._counts), set(other._approved)
        self._write()
        self._write_names()

    def _write(self) -> None:
        _keep(self._path, {"counts": self._counts, "approved": sorted(self._approved)})

    def _write_names(self) -> None:
        names = {name: sorted(origins) for name, origins in self.names.origins.items()}
        starred, bound = sorted(self.names.starred), sorted(self.names.bound)
        _keep(self._names_path, {"names": names, "starred": starred, "bound": bound})

    def _read(self) -> None:
        try:
            if kept := _kept(self._path):
                self._counts, self._approved = dict(kept["counts"]), set(kept["approved"])
            if kept := _kept(self._names_path):
                names = {name: set(origins) for name, origins in kept["names"].items()}
                self.names = CodeNames(names, set(kept["starred"]), set(kept["bound"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read and is begun anew: %s", FILE, type(error).__name__)


def _keep(path: Path | None, values: Mapping[str, Any]) -> None:
    """Whole or not at all: half a file after a full disk would be no memory."""
    if path is None:
        return
    draft = path.with_suffix(".new")
    try:
        write_file(draft, json.dumps(values))
        draft.replace(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path.name, error.strerror)


def _kept(path: Path | None) -> Mapping[str, Any] | None:
    if path is None or not path.exists() or path.stat().st_size > MOST_BYTES:
        return None
    kept: Any = json.loads(path.read_text("utf-8"))
    return kept


# How often something was done: counts of a session, and rates over time. It knows keys and numbers, not rules.

MOST_KEYS = 10_000


class Rates:
    """Calls in a moving window, by key; shared by all sessions of whoever the keys stand for."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, ...], deque[float]] = {}

    def wait_s(self, key: tuple[str, ...], most: int, period_s: float) -> float:
        """How long until another call fits; 0 when one does now."""
        calls = self._calls.get(key)
        if calls is None:
            return 0.0
        now = time.monotonic()
        while calls and calls[0] <= now - period_s:
            calls.popleft()
        return calls[len(calls) - most] + period_s - now if len(calls) >= most else 0.0

    def add(self, key: tuple[str, ...], most: int) -> None:
        """A call is made. No more are remembered than can matter."""
        if key not in self._calls and len(self._calls) >= MOST_KEYS:
            del self._calls[next(iter(self._calls))]
        calls = self._calls.setdefault(key, deque())
        calls.append(time.monotonic())
        while len(calls) > most:
            calls.popleft()
