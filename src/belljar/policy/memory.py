"""What a session's guard must not forget while the session sleeps: names that cells bound, calls made, yeses given.

Kept beside the session's folder, out of the cells' reach. No values: names in code, rules and numbers.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belljar.policy.names import Names

FILE = "guard.json"
MOST_BYTES = 4 * 1024 * 1024
MOST_COUNTED = 10_000

log = logging.getLogger(__name__)


class Memory:
    """One session's; without a folder it lasts as long as the object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder else None
        self.names = Names()
        self._counts: dict[str, int] = {}
        self._approved: set[str] = set()
        self._read()

    def count(self, key: str) -> int:
        """How often that was noted."""
        return self._counts.get(key, 0)

    def note(self, *keys: str) -> None:
        """Once more, for each."""
        for key in keys:
            if key in self._counts or len(self._counts) < MOST_COUNTED:
                self._counts[key] = self._counts.get(key, 0) + 1
        self._write()

    def is_approved(self, rule: str) -> bool:
        """Whether the person's yes to this rule holds on."""
        return rule in self._approved

    def approve(self, rule: str) -> None:
        """The person said yes, once for all."""
        self._approved.add(rule)
        self._write()

    def learn(self, names: Names) -> None:
        """The names are these now."""
        if names != self.names:
            self.names = names
            self._write()

    def inherit(self, other: "Memory") -> None:
        """A fork knows what its origin did."""
        self.names = other.names.copy()
        self._counts, self._approved = dict(other._counts), set(other._approved)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        kept = {
            "names": {name: sorted(origins) for name, origins in self.names.origins.items()},
            "starred": sorted(self.names.starred),
            "bound": sorted(self.names.bound),
            "counts": self._counts,
            "approved": sorted(self._approved),
        }
        try:
            self._path.write_text(json.dumps(kept), "utf-8")
            self._path.chmod(0o600)
        except OSError as error:
            log.warning("%s is not kept: %s", FILE, error.strerror)

    def _read(self) -> None:
        try:
            if self._path is None or not self._path.exists() or self._path.stat().st_size > MOST_BYTES:
                return
            kept: Mapping[str, Any] = json.loads(self._path.read_text("utf-8"))
            names = {name: set(origins) for name, origins in kept["names"].items()}
            self.names = Names(names, set(kept["starred"]), set(kept["bound"]))
            self._counts, self._approved = dict(kept["counts"]), set(kept["approved"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read and is begun anew: %s", FILE, type(error).__name__)
