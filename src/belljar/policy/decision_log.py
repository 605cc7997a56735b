"""The decision log: a file in the data directory with one JSON object per decision of the policy.

It holds ids and rules, never values. Servers that share a data directory share the file. The file is rotated at its
size limit, and one older file is kept.
"""

import fcntl
import json
import logging
import os
import time
from pathlib import Path

FILE = "decisions.jsonl"
MAX_BYTES = 8 * 1024 * 1024
MAX_NAME_CHARS = 200

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
