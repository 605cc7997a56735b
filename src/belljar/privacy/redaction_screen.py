"""The output of one execution behind its session's veil: streams, results, displays, errors and questions."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from belljar.outputs.events import (
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    InputRequest,
    MimeBundle,
    Raised,
    Stream,
)
from belljar.outputs.screens import TailKeeper
from belljar.privacy.detectors import BREAKERS, LONGEST_CHARS
from belljar.privacy.redaction import SessionRedactor

MOST_CHARS = 4_000_000
"""Of the streams of one execution: looking through a million takes a second, and longer when it is all numbers."""
MOST_S = 30.0
"""Of our processor for one execution: code may choose what it says so that looking through it takes long."""
_ENOUGH = (
    f"\n[belljar: output past {MOST_CHARS:,} characters is not shown, because it is not searched for personal data]\n"
)
_TOO_SLOW = "\n[belljar: the rest is not shown, because searching it for personal data takes too long]\n"

# Forms that come as base64: there is no text in them to read.
_BINARY = ("audio/", "video/", "font/", "application/pdf", "application/octet-stream", "application/zip")


class RedactionScreen:
    """See `belljar.outputs.screens.OutputScreen`."""

    def __init__(self, veil: SessionRedactor) -> None:
        self._veil = veil
        self._tails: dict[Literal["stdout", "stderr"], TailKeeper] = {}
        self._seen_chars = 0
        self._spent_s = 0.0

    def screen(self, event: Event) -> list[Event]:
        """The event with tokens for personal data; the end of a stream that may go on is held back."""
        if self._spent_s > MOST_S:
            return (
                [] if isinstance(event, Stream | DisplayData | ExecuteResult | CommMessage) else self._screened(event)
            )
        started_s = time.thread_time()
        passed = self._screened(event)
        self._spent_s += time.thread_time() - started_s
        return [*passed, Stream("stderr", _TOO_SLOW)] if self._spent_s > MOST_S else passed

    def _screened(self, event: Event) -> list[Event]:
        if isinstance(event, Stream):
            if self._seen_chars > MOST_CHARS:
                return []
            self._seen_chars += len(event.text)
            if self._seen_chars > MOST_CHARS:
                return [*self.flush(), Stream("stderr", _ENOUGH)]
            text = self._tail(event.name).feed(event.text)
            return [replace(event, text=self._veil.redact_own_text(text))] if text else []
        return [*self.flush(), self._covered(event)]

    def flush(self) -> Iterator[Event]:
        """The ends of both streams."""
        for name, tail in self._tails.items():
            if text := tail.flush():
                yield Stream(name, self._veil.redact_own_text(text))

    def _tail(self, name: Literal["stdout", "stderr"]) -> TailKeeper:
        if name not in self._tails:
            self._tails[name] = TailKeeper(BREAKERS, longest=LONGEST_CHARS, spans=self._spans)
        return self._tails[name]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        return ((span.start, span.end) for span in self._veil.detector.find(text))

    def _covered(self, event: Event) -> Event:
        cover = self._veil.redact_own_text
        match event:
            case DisplayData() | ExecuteResult():
                return replace(event, data=self._bundle(event.data))
            case Raised():
                lines = [cover(line) for line in event.traceback]
                return Raised(cover(event.name), cover(event.message), lines)
            case InputRequest():
                return replace(event, prompt=cover(event.prompt))
            case CommMessage():
                deep = self._veil.cover_deep
                return replace(event, data=deep(event.data), metadata=deep(event.metadata))
            case _:
                return event

    def _bundle(self, bundle: MimeBundle) -> MimeBundle:
        return {mime: value if _is_binary(mime) else self._veil.cover_deep(value) for mime, value in bundle.items()}


def _is_binary(mime: str) -> bool:
    return mime.startswith(_BINARY) or (mime.startswith("image/") and mime != "image/svg+xml")
