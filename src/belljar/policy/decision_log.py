"""The decision log: what the policy decided, a JSON object a line, in the data directory. Ids and rules, never values.

Servers that share a data directory share the file. It is turned over at its limit, and one older file is kept.
"""

import fcntl
import json
import logging
import os
import time
from pathlib import Path

FILE = "decisions.jsonl"
MOST_BYTES = 8 * 1024 * 1024
MOST_NAME_CHARS = 200

log = logging.getLogger(__name__)


class DecisionLog:
    """Appends; a disk that is full costs the line, not the call."""

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = folder / FILE
        self._most_bytes = most_bytes
        self._has_failed = False

    def write(self, **fields: str | int) -> None:
        """Write one line; a field that is empty is left out."""
        told = {
            name: value[:MOST_NAME_CHARS] if isinstance(value, str) else value
            for name, value in fields.items()
            if value != ""
        }
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            self._append(json.dumps({"at": at, **told}).encode() + b"\n")
        except OSError as error:
            if not self._has_failed:
                log.warning("decisions are not logged: %s: %s", self.path, error.strerror)
            self._has_failed = True

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Another server may have turned it over while we waited: then the line goes into the older file.
            if os.fstat(descriptor).st_size + len(line) > self._most_bytes and self._is_current(descriptor):
                self.path.replace(self.path.with_suffix(".1.jsonl"))
                os.close(descriptor)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        return os.path.samestat(os.fstat(descriptor), self.path.stat())
