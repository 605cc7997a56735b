"""State of a session's guard that outlives hibernation (names bound by cells, counted calls, approvals), and rates.

The files lie beside the session's folder, where cells cannot reach them. They hold names in code, rules and numbers,
never values. This module knows keys and numbers, not what the rules say.
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
"""A file of its own, because cells decide how many names there are, which must not endanger counts and approvals."""
MAX_BYTES = 32 * 1024 * 1024
MAX_COUNTED = 10_000

log = logging.getLogger(__name__)


class GuardState:
    """The counts, approvals and names of one session. Without a folder they last as long as the object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder else None
        self._names_path = folder / NAMES_FILE if folder else None
        self.names = CodeNames()
        self._counts: dict[str, int] = {}
        self._approved: set[str] = set()
        self._read()

    def count(self, key: str) -> int:
        """Return how often a key was added."""
        return self._counts.get(key, 0)

    def add(self, *keys: str) -> None:
        """Add one to the count of each key."""
        for key in keys:
            # Keys of rules are always counted, because they are few and carry limits. Keys of tools are bounded,
            # because a server may have any number of tools.
            if key in self._counts or len(self._counts) < MAX_COUNTED or key.startswith("tools."):
                self._counts[key] = self._counts.get(key, 0) + 1
        self._write()

    def is_approved(self, rule: str) -> bool:
        """Return whether the person approved this rule for the rest of the session."""
        return rule in self._approved

    def approve(self, rule: str) -> None:
        """Remember that the person approved this rule for the rest of the session."""
        self._approved.add(rule)
        self._write()

    def learn(self, names: CodeNames) -> None:
        """Replace the names, and write them if they changed."""
        if names != self.names:
            self.names = names
            self._write_names()

    def inherit(self, other: "GuardState") -> None:
        """Copy the state of the session that this one was forked from."""
        self.names = other.names.copy()
        self._counts, self._approved = dict(other._counts), set(other._approved)
        self._write()
        self._write_names()

    def _write(self) -> None:
        _write_json(self._path, {"counts": self._counts, "approved": sorted(self._approved)})

    def _write_names(self) -> None:
        names = {name: sorted(origins) for name, origins in self.names.origins.items()}
        starred, bound = sorted(self.names.starred), sorted(self.names.bound)
        _write_json(self._names_path, {"names": names, "starred": starred, "bound": bound})

    def _read(self) -> None:
        try:
            if kept := _read_json(self._path):
                self._counts, self._approved = dict(kept["counts"]), set(kept["approved"])
            if kept := _read_json(self._names_path):
                names = {name: set(origins) for name, origins in kept["names"].items()}
                self.names = CodeNames(names, set(kept["starred"]), set(kept["bound"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read and is begun anew: %s", FILE, type(error).__name__)


def _write_json(path: Path | None, values: Mapping[str, Any]) -> None:
    """Write a file completely or not at all, because half a file (after a full disk) could not be read again."""
    if path is None:
        return
    draft = path.with_suffix(".new")
    try:
        write_file(draft, json.dumps(values))
        draft.replace(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path.name, error.strerror)


def _read_json(path: Path | None) -> Mapping[str, Any] | None:
    if path is None or not path.exists() or path.stat().st_size > MAX_BYTES:
        return None
    kept: Any = json.loads(path.read_text("utf-8"))
    return kept


# Rates: how often something was done within a period.

MAX_KEYS = 10_000


class Rates:
    """Counts calls in a moving window, by key. A key names a principal, whose sessions all share its window."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, ...], deque[float]] = {}

    def wait_s(self, key: tuple[str, ...], most: int, period_s: float) -> float:
        """Return how long to wait until another call fits; 0 if one fits now."""
        calls = self._calls.get(key)
        if calls is None:
            return 0.0
        now = time.monotonic()
        while calls and calls[0] <= now - period_s:
            calls.popleft()
        return calls[len(calls) - most] + period_s - now if len(calls) >= most else 0.0

    def add(self, key: tuple[str, ...], most: int) -> None:
        """Record a call. Only the latest `most` calls of a key are remembered, because older ones cannot matter."""
        if key not in self._calls and len(self._calls) >= MAX_KEYS:
            del self._calls[next(iter(self._calls))]
        calls = self._calls.setdefault(key, deque())
        calls.append(time.monotonic())
        while len(calls) > most:
            calls.popleft()
