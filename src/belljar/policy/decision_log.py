"""The decision log: a file in the data directory with one JSON object per decision of the policy.

It holds ids and rules, never values. Servers that share a data directory share the file. The file is rotated at its
size limit, and one older file is kept. Owners are in it by their pseudonyms.
"""

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import cast

from pydantic import JsonValue

FILE = "decisions.jsonl"
MAX_BYTES = 8 * 1024 * 1024
MAX_NAME_CHARS = 200
MAX_READ_BYTES = 4 * 1024 * 1024

log = logging.getLogger(__name__)


class DecisionLog:
    """Appends decisions to the file. If the disk is full, the line is lost, but the call goes on."""

    def __init__(self, folder: Path, *, most_bytes: int = MAX_BYTES) -> None:
        self.path = folder / FILE
        self._most_bytes = most_bytes
        self._has_failed = False

    def write(self, **fields: str | int) -> None:
        """Write one line, without the empty fields."""
        entry = {
            name: value[:MAX_NAME_CHARS] if isinstance(value, str) else value
            for name, value in fields.items()
            if value != ""
        }
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            self._append(json.dumps({"at": at, **entry}).encode() + b"\n")
        except OSError as error:
            if not self._has_failed:
                log.warning("decisions are not logged: %s: %s", self.path, error.strerror)
            self._has_failed = True

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Another server may have rotated the file while we waited for the lock. Then `descriptor` is the older
            # file, and the line goes there.
            if os.fstat(descriptor).st_size + len(line) > self._most_bytes and self._is_current(descriptor):
                self.path.replace(self.path.with_suffix(".1.jsonl"))
                os.close(descriptor)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        return os.path.samestat(os.fstat(descriptor), self.path.stat())


def read_decisions(
    folder: Path, visible_to: str | None, execution_id: str = "", limit: int = 50
) -> list[dict[str, JsonValue]]:
    """Return decisions, newest first, all or those of an execution.

    `visible_to` is the pseudonym of somebody who may see their own decisions alone; None for all.
    """
    found: list[dict[str, JsonValue]] = []
    for line in reversed(_last_lines(folder / FILE)):
        entry = _decision(line)
        is_visible = visible_to is None or visible_to in (entry.get("principal"), entry.get("owner"))
        if entry and is_visible and (not execution_id or execution_id in entry.values()):
            found.append(entry)
        if len(found) == limit:
            break
    return found


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_READ_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > MAX_READ_BYTES else lines


def _decision(line: bytes) -> dict[str, JsonValue]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return cast("dict[str, JsonValue]", entry) if isinstance(entry, dict) else {}
