"""The screen that redacts one execution's output: streams, results, displays, errors and questions."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, cast

from belljar.outputs.events import (
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    InputRequest,
    MimeBundle,
    Notice,
    Raised,
    Stream,
    with_clean_text,
)
from belljar.outputs.recorder import TailBuffer
from belljar.privacy.detectors import BREAKERS, LONGEST_CHARS
from belljar.privacy.redaction import SessionRedactor

MAX_CHARS = 4_000_000
"""Characters of one execution's streams that are searched: a million take a second, longer if all are numbers."""
MAX_S = 30.0
"""Processor time for one execution, limited because code may choose output that takes long to search."""
_ENOUGH = f"output past {MAX_CHARS:,} characters is not shown, because it is not searched for personal data"
_TOO_SLOW = "the rest is not shown, because searching it for personal data takes too long"

# Forms that come as base64, most of them without text to search.


class RedactionScreen:
    """The screen of one execution; see `belljar.outputs.recorder.OutputScreen`."""

    def __init__(self, redactor: SessionRedactor) -> None:
        self._redactor = redactor
        self._tails: dict[Literal["stdout", "stderr"], TailBuffer] = {}
        self._seen_chars = 0
        self._spent_s = 0.0

    def screen(self, event: Event) -> list[Event]:
        """Return the event with tokens for personal data; the end of a stream that may go on is held back."""
        if self._spent_s > MAX_S:
            return (
                [] if isinstance(event, Stream | DisplayData | ExecuteResult | CommMessage) else self._screened(event)
            )
        started_s = time.thread_time()
        passed = self._screened(event)
        self._spent_s += time.thread_time() - started_s
        return [*passed, Notice(_TOO_SLOW)] if self._spent_s > MAX_S else passed

    def _screened(self, event: Event) -> list[Event]:
        if isinstance(event, Stream):
            if self._seen_chars > MAX_CHARS:
                return []
            self._seen_chars += len(event.text)
            if self._seen_chars > MAX_CHARS:
                return [*self.flush(), Notice(_ENOUGH)]
            text = self._tail(event.name).feed(event.text)
            return [replace(event, text=self._redactor.redact_own_text(text))] if text else []
        return [*self.flush(), self._redacted(event)]

    def flush(self) -> Iterator[Event]:
        """Yield the ends of both streams, which were held back."""
        for name, tail in self._tails.items():
            if text := tail.flush():
                yield Stream(name, self._redactor.redact_own_text(text))

    def _tail(self, name: Literal["stdout", "stderr"]) -> TailBuffer:
        if name not in self._tails:
            self._tails[name] = TailBuffer(BREAKERS, longest=LONGEST_CHARS, spans=self._spans)
        return self._tails[name]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        return ((span.start, span.end) for span in self._redactor.detector.find(text))

    def _redacted(self, event: Event) -> Event:
        redact = self._redactor.redact_own_text
        match event:
            case DisplayData() | ExecuteResult():
                return replace(event, data=self._bundle(event.data))
            case Raised():
                lines = [redact(line) for line in event.traceback]
                return Raised(redact(event.name), redact(event.message), lines)
            case InputRequest():
                form = cast("MimeBundle", self._redactor.redact_own_value(event.form)) if event.form else None
                return replace(event, prompt=redact(event.prompt), form=form)
            case CommMessage():
                redact_deep = self._redactor.redact_own_value
                return replace(event, data=redact_deep(event.data), metadata=redact_deep(event.metadata))
            case _:
                return event

    def _bundle(self, bundle: MimeBundle) -> MimeBundle:
        return with_clean_text(bundle, self._redactor.redact_own_value)
