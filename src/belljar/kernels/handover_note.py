"""A few words of a session's that outlive its server: which execution its kernel was last given, until when, and
which tools it has called.

In memory that a supervisor holds too, so that writing them costs microseconds and survives a kill. Nobody in the
sandbox can read them or write them.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace

from belljar.toolbox.base import CallRecord
from belljar.toolbox.call_log import MOST_RECORDS

_SIZE = 256
_CALL_BYTES = 2_048
"""The most that is noted of a call: two names of a hundred characters, and a reason of two hundred."""


@dataclass(frozen=True, slots=True)
class RunningNote:
    """What is on a slate."""

    execution_id: str = ""
    deadline: float = 0.0
    """When it is to be interrupted, by the clock on the wall."""
    timeout_s: float = 0.0
    """What it was allowed in all."""
    request: int = 0
    """The kernel's number of it; 0 as long as it has not been sent."""
    allow_input: bool = False
    """Whether it may ask a person."""


class NoSlate:
    """Stands in for a slate where the kernel ends with its server: nothing is noted."""

    note = RunningNote()

    def send(self, request: int, *, allow_input: bool = False) -> None:
        """Do nothing."""


class NoteFile:
    """One session's; `descriptor` is that of an earlier server's."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("belljar-slate")
        self.note = RunningNote()
        text = os.pread(self.descriptor, _SIZE, 0)
        if text:
            self.note = RunningNote(**json.loads(text))

    def note_execution(self, execution_id: str, timeout_s: float) -> None:
        """An execution has its turn; it has called nothing yet."""
        if self.descriptor >= 0 and os.fstat(self.descriptor).st_size > _SIZE:
            os.ftruncate(self.descriptor, _SIZE)
        self._write(RunningNote(execution_id, time.time() + timeout_s, timeout_s))

    def send(self, request: int, *, allow_input: bool = False) -> None:
        """It is about to be sent under this number."""
        self._write(replace(self.note, request=request, allow_input=allow_input))

    def note_call(self, number: int, record: CallRecord) -> None:
        """What is known of its call of that number; of very many, those of the last numbers stay."""
        if self.descriptor < 0:
            return
        told = json.dumps({"number": number, **asdict(record)}, ensure_ascii=False).encode()
        if len(told) <= _CALL_BYTES:
            place = _SIZE + number % MOST_RECORDS * _CALL_BYTES
            os.pwrite(self.descriptor, told.ljust(_CALL_BYTES), place)

    def calls(self) -> list[CallRecord]:
        """What was noted of its calls, in their order."""
        noted: dict[int, CallRecord] = {}
        for place in range(_SIZE, os.fstat(self.descriptor).st_size, _CALL_BYTES):
            # One that a kill has cut in two is none.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                told = json.loads(os.pread(self.descriptor, _CALL_BYTES, place).strip(b"\0 "))
                number = told.pop("number")
                noted[number] = CallRecord(**told)
        return [noted[number] for number in sorted(noted)]

    def _write(self, note: RunningNote) -> None:
        self.note = note
        if self.descriptor < 0:  # its kernel is gone, or about to go
            return
        os.pwrite(self.descriptor, json.dumps(asdict(note)).encode().ljust(_SIZE), 0)

    def close(self) -> None:
        """Let go of it; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
