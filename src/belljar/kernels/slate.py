"""A few words of a session's that outlive its server: which execution its kernel was last given, and until when.

In memory that a supervisor holds too, so that writing them costs microseconds and survives a kill. Nobody in the
sandbox can read them or write them.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace

_SIZE = 256


@dataclass(frozen=True, slots=True)
class Note:
    """What is on a slate."""

    execution_id: str = ""
    deadline: float = 0.0
    """When it is to be interrupted, by the clock on the wall."""
    timeout_s: float = 0.0
    """What it was allowed in all."""
    request: int = 0
    """The kernel's number of it; 0 as long as it has not been sent."""


class Slate:
    """One session's; `descriptor` is that of an earlier server's."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("belljar-slate")
        self.note = Note()
        text = os.pread(self.descriptor, _SIZE, 0)
        if text:
            self.note = Note(**json.loads(text))

    def begin(self, execution_id: str, timeout_s: float) -> None:
        """An execution has its turn."""
        self._write(Note(execution_id, time.time() + timeout_s, timeout_s))

    def send(self, request: int) -> None:
        """It is about to be sent under this number."""
        self._write(replace(self.note, request=request))

    def _write(self, note: Note) -> None:
        self.note = note
        if self.descriptor < 0:  # its kernel is gone, or about to go
            return
        os.pwrite(self.descriptor, json.dumps(asdict(note)).encode().ljust(_SIZE), 0)

    def close(self) -> None:
        """Let go of it; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
