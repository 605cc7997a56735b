"""Kernel events to numbered output events: an execution's output in the form that is journalled and replayed."""

from contextlib import suppress

from pydantic import JsonValue

from belljar.models import OutputEvent
from belljar.outputs.budget import clip
from belljar.outputs.displays import INLINE_CHARS, DisplayStore, display_of, plain_of
from belljar.outputs.events import ClearOutput, DisplayData, Event, ExecuteResult, InputRequest, Raised, Stream

# What an event takes in the journal beside its text, so that many events without text are capped too.
EVENT_BYTES = 256
MAX_TRACEBACK_LINES = 400
MAX_LINE_CHARS = 2_000
MAX_MESSAGE_CHARS = 8_000


class Recorder:
    """The record of one execution's output: numbers its events, and past the cap drops output after a notice."""

    def __init__(self, store: DisplayStore, *, cap_bytes: int, text_chars: int) -> None:
        self._store = store
        self._text_chars = text_chars
        self._cap_bytes = cap_bytes
        self._output_bytes = 0
        self._result_bytes = 0
        self._is_capped = False
        self.sequence = 0

    @property
    def text_bytes(self) -> int:
        """About how many bytes the events take in the journal."""
        return self._output_bytes + self._result_bytes

    @property
    def display_bytes(self) -> int:
        """How many bytes the files of displays take."""
        return self._store.total_bytes

    def continue_after(self, before: OutputEvent) -> None:
        """Continue after an event that an earlier server recorded. Called for each of them, in order."""
        if not self.sequence:
            self._store.continue_after()
        self.sequence = before.sequence
        self._output_bytes += len(before.text.encode(errors="replace")) + EVENT_BYTES

    def record(self, event: Event) -> OutputEvent | None:
        """Return the numbered form of an event; None for one that is not recorded."""
        if isinstance(event, Stream | DisplayData | ClearOutput):
            if self._is_capped:
                return None
            if self._output_bytes + self._store.total_bytes > self._cap_bytes:
                self._is_capped = True
                return self.notice(f"output past {self._cap_bytes:,} bytes is not kept; the cell goes on")
        elif self._result_bytes > self._cap_bytes:
            return None  # results, errors and questions are not capped above, and only a hostile cell has many
        match event:
            case Stream():
                self._output_bytes += len(event.text.encode(errors="replace"))
                return self._number(OutputEvent(sequence=0, kind=event.name, text=event.text))
            case DisplayData():
                return self._display(event)
            case ExecuteResult():
                return self._result(event)
            case Raised():
                return self._raised(event)
            case ClearOutput():
                return self._number(OutputEvent(sequence=0, kind="clear", data={"wait": event.wait}))
            case InputRequest():
                return self._number(OutputEvent(sequence=0, kind="input", text=event.prompt[:MAX_LINE_CHARS]))
            case _:
                return None

    def notice(self, text: str, **data: JsonValue) -> OutputEvent:
        """Return a notice of belljar's own, to stand between the cell's output; `data` is for programs."""
        return self._number(OutputEvent(sequence=0, kind="notice", text=f"[belljar: {text}]\n", data=data))

    def _number(self, event: OutputEvent) -> OutputEvent:
        self.sequence += 1
        self._output_bytes += EVENT_BYTES
        self._result_bytes += EVENT_BYTES if event.kind in ("result", "error", "input") else 0
        event.sequence = self.sequence
        return event

    def _display(self, event: DisplayData) -> OutputEvent:
        display = display_of(event.data, self._store, event.display_id)
        self._output_bytes += sum(min(len(form), INLINE_CHARS) for form in event.data.values() if isinstance(form, str))
        plain = plain_of(event.data) or ""
        data: dict[str, JsonValue] = {"update": event.update, "display_id": event.display_id}
        if display is not None:
            plain = ""
            data["display"] = display.model_dump(mode="json")
        return self._number(OutputEvent(sequence=0, kind="display", text=plain, data=data))

    def _result(self, event: ExecuteResult) -> OutputEvent:
        display = display_of(event.data, self._store)
        text = plain_of(event.data)
        data: dict[str, JsonValue] = {"has_text": text is not None}
        if display is not None:
            data["display"] = display.model_dump(mode="json")
        if text is not None and len(text) > self._text_chars:
            whole = text.encode(errors="replace")
            with suppress(OSError):  # on a full disk the cut result is all there is
                data |= {"uri": self._store.store("text/plain", whole), "size": len(whole)}
            text = clip(text, self._text_chars)
        self._result_bytes += len(text or "")
        return self._number(OutputEvent(sequence=0, kind="result", text=text or "", data=data))

    def _raised(self, event: Raised) -> OutputEvent:
        lines = [line[:MAX_LINE_CHARS] for line in event.traceback]
        if len(lines) > MAX_TRACEBACK_LINES:
            half = MAX_TRACEBACK_LINES // 2
            lines = [*lines[:half], f"... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]
        self._result_bytes += sum(map(len, lines))
        message = event.message[:MAX_MESSAGE_CHARS]
        text = f"{event.name[:MAX_LINE_CHARS]}: {message}" if message else event.name[:MAX_LINE_CHARS]
        return self._number(OutputEvent(sequence=0, kind="error", text=text, data={"traceback": [*lines]}))
