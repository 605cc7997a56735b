"""What a veil must not forget with its server: a line for each value, token and secret, in memory without a name.

Whoever holds the descriptor beyond the end of the server, a supervisor, holds bytes that it does not look into. Never
on disk, and never inside a sandbox. Knows lines, not what they mean.
"""

import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

Line = list[Any]


class Strongbox:
    """One session's; `descriptor` is that of an earlier server's, which is its own now."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("belljar-vault")
        self._size = os.fstat(self.descriptor).st_size
        self._lock = threading.Lock()

    def lines(self) -> Iterator[Line]:
        """What is in it; a line that a kill has cut in two is none."""
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            file.seek(0)
            for text in file:
                try:
                    yield json.loads(text)
                except ValueError:
                    continue

    def add(self, line: Line) -> None:
        """Keep one more."""
        # Begun with the end of the one before, which a kill may have cut in two.
        text = f"\n{json.dumps(line)}\n".encode()
        with self._lock:
            if self.descriptor < 0:
                return
            try:
                self._size += os.pwrite(self.descriptor, text, self._size)
            except OSError as error:
                log.warning("what tokens stand for is not kept for the next server: %s", error.strerror)

    def close(self) -> None:
        """Let go of it; may be called twice."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
