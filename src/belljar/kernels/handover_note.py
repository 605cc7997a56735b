"""A record of one session that outlives its server: which execution the kernel was last given, until when it may run,
and which tools it has called.

The record is in a memfd that a supervisor holds too, so that a write costs microseconds and survives the server being
killed. Nobody in the sandbox can read or write it.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, fields, replace

from belljar.toolbox.base import MAX_RECORDS, CallRecord

_SIZE = 256
_CALL_BYTES = 2_048
"""The most that is recorded of a call: two names of a hundred characters, and a reason of two hundred."""


@dataclass(frozen=True, slots=True)
class RunningNote:
    """The execution that the kernel was last given."""

    execution_id: str = ""
    deadline: float = 0.0
    """When the execution is to be interrupted, in seconds since the epoch."""
    timeout_s: float = 0.0
    """How long the execution may run in all."""
    request: int = 0
    """The number of the request to the runner; 0 until it is sent."""
    allow_input: bool = False
    """Whether the cell may ask a person for input."""


class NoNoteFile:
    """Stands in for a `NoteFile` where the kernel ends with its server: nothing is recorded."""

    note = RunningNote()

    def send(self, request: int, *, allow_input: bool = False) -> None:
        """Do nothing."""


class NoteFile:
    """The memfd of one session; `descriptor` is the one that an earlier server wrote to, negative for a new one."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("belljar-handover-note")
        self.note = RunningNote()
        text = os.pread(self.descriptor, _SIZE, 0)
        if text:
            noted = json.loads(text)
            # Another version of belljar may have written more or less than this one knows.
            self.note = RunningNote(
                **{field.name: noted[field.name] for field in fields(RunningNote) if field.name in noted}
            )

    def note_execution(self, execution_id: str, timeout_s: float) -> None:
        """Record that an execution has its turn, and forget the calls of the last one."""
        if self.descriptor >= 0 and os.fstat(self.descriptor).st_size > _SIZE:
            os.ftruncate(self.descriptor, _SIZE)
        self._write(RunningNote(execution_id, time.time() + timeout_s, timeout_s))

    def send(self, request: int, *, allow_input: bool = False) -> None:
        """Record that the execution is about to be sent to the runner as the request of this number."""
        self._write(replace(self.note, request=request, allow_input=allow_input))

    def note_call(self, number: int, record: CallRecord) -> None:
        """Record a tool call of the execution by its number; beyond `MAX_RECORDS` the latest calls are kept."""
        if self.descriptor < 0:
            return
        content = json.dumps({"number": number, **asdict(record)}, ensure_ascii=False).encode()
        if len(content) <= _CALL_BYTES:
            place = _SIZE + number % MAX_RECORDS * _CALL_BYTES
            os.pwrite(self.descriptor, content.ljust(_CALL_BYTES), place)

    def calls(self) -> list[CallRecord]:
        """Return the recorded calls in their order."""
        noted: dict[int, CallRecord] = {}
        for place in range(_SIZE, os.fstat(self.descriptor).st_size, _CALL_BYTES):
            # Skip a record that was half written when the server was killed.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                content = json.loads(os.pread(self.descriptor, _CALL_BYTES, place).strip(b"\0 "))
                number = content.pop("number")
                noted[number] = CallRecord(**content)
        return [noted[number] for number in sorted(noted)]

    def _write(self, note: RunningNote) -> None:
        self.note = note
        if self.descriptor < 0:  # the kernel has ended, or is about to
            return
        os.pwrite(self.descriptor, json.dumps(asdict(note)).encode().ljust(_SIZE), 0)

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
