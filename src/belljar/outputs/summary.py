"""Output events to the fields of a result: what a caller is shown, with a notebook's rules for clearing and updating.

Live executions and replays from the journal go through the same code, so that they give the same results.
"""

from belljar.models import Display, OutputEvent, ResultNotice, Truncation
from belljar.outputs.budget import MARK, TextBudget, clip
from belljar.outputs.displays import INLINE_CHARS
from belljar.outputs.imitations import disarmed

MAX_DISPLAYS = 50


class Summary:
    """The output of one execution so far, as the fields of a result."""

    def __init__(self, *, budget_chars: int, uri: str) -> None:
        self._budget_chars = budget_chars
        self._uri = uri
        self._text = TextBudget(budget_chars)
        self._is_clear_pending = False
        self._left_out = 0
        self._displays: list[Display] = []
        """The displays, in the order of their marks between the texts."""
        self._bytes_before_last = 0
        """How many bytes of text came before the last display."""
        self._rich_result: Display | None = None
        self.result: str | None = None
        self.error: str | None = None
        self.traceback: list[str] = []
        self.sequence = 0
        self._result_cut: Truncation | None = None

    def add(self, event: OutputEvent) -> None:
        """Add the next event."""
        self.sequence = event.sequence
        if event.kind == "clear":
            self._is_clear_pending = bool(event.data.get("wait"))
            if not self._is_clear_pending:
                self._clear()
            return
        if self._is_clear_pending and event.kind != "input":
            self._clear()
        match event.kind:
            case "stdout" | "stderr" | "notice":
                self._text.add(event.kind, event.text)
            case "display":
                self._display(event)
            case "result":
                self.result = event.text if event.data.get("has_text") else None
                self._result_cut = _cut_of(event)
                self._rich_result = _display_in(event)
            case "error":
                self.error = event.text
                lines = event.data.get("traceback")
                self.traceback = [str(line) for line in lines] if isinstance(lines, list) else []
            case _:
                pass

    def segments(self) -> list[tuple[str, str]]:
        """Return stream texts and notices in order, within the budget; what imitates a notice is marked."""
        segments = [
            (kind, text if kind == "notice" else disarmed(text)) for kind, text in self._text.segments() if kind != MARK
        ]
        if self._left_out:
            segments.append(("notice", f"[belljar: {self._left_out} more displays are not listed]\n"))
        return segments

    def texts(self) -> tuple[list[str], list[ResultNotice]]:
        """Return the texts of `segments`, and which of them are notices."""
        segments = self.segments()
        notices = [ResultNotice(text=text, at=at) for at, (kind, text) in enumerate(segments) if kind == "notice"]
        return [text for _, text in segments], notices

    def stream(self, name: str) -> str:
        """Return the text of one stream, within the budget."""
        return "".join(text for kind, text in self._text.segments() if kind == name)

    @property
    def displays(self) -> list[Display]:
        """The displays, each with its place between the texts; the last expression's value comes last."""
        places: list[int] = []
        texts = 0
        for kind, _ in self._text.segments():
            if kind == MARK:
                places.append(texts)
            else:
                texts += 1
        shown = [display.model_copy(update={"at": at}) for display, at in zip(self._displays, places, strict=True)]
        value = self._rich_result
        # A figure that is shown and is also the cell's last expression comes twice, byte for byte.
        return shown if value is None or self._is_last(value) else [*shown, value]

    @property
    def truncation(self) -> Truncation | None:
        """How much text was left out, of the streams or of the result; None for nothing."""
        return self._text.truncation(self._uri) or self._result_cut

    def _clear(self) -> None:
        self._text = TextBudget(self._budget_chars)
        self._displays = []
        self._bytes_before_last = 0
        self._rich_result = None
        self._left_out = 0
        self._is_clear_pending = False

    def _display(self, event: OutputEvent) -> None:
        display = _display_in(event)
        if display is None:
            display = Display(mime="text/plain", text=clip(event.text, INLINE_CHARS), size=len(event.text))
            display_id = event.data.get("display_id")
            display.display_id = display_id if isinstance(display_id, str) else None
        if event.data.get("update") and self._update(display):
            return
        if display.mime == "text/plain" and display.display_id is None:
            # Plain text keeps its place among the text.
            self._text.add("display", event.text + "\n")
            return
        self._keep(display)

    def _update(self, display: Display) -> bool:
        is_found = False
        for index, shown in enumerate(self._displays):
            if shown.display_id is not None and shown.display_id == display.display_id:
                self._displays[index] = display
                is_found = True
        return is_found

    def _keep(self, display: Display) -> None:
        if self._is_last(display):
            return
        if len(self._displays) >= MAX_DISPLAYS:
            self._left_out += 1
            return
        self._displays.append(display)
        self._bytes_before_last = self._text.total_bytes
        self._text.mark()

    def _is_last(self, display: Display) -> bool:
        """Return whether this place shows the display already, byte for byte, and neither of the two can be updated."""
        if display.uri is None or display.display_id is not None or not self._displays:
            return False
        return self._displays[-1].uri == display.uri and self._bytes_before_last == self._text.total_bytes


def _cut_of(event: OutputEvent) -> Truncation | None:
    uri, size = event.data.get("uri"), event.data.get("size")
    if not isinstance(uri, str) or not isinstance(size, int):
        return None
    return Truncation(shown_bytes=len(event.text.encode(errors="replace")), total_bytes=size, uri=uri)


def _display_in(event: OutputEvent) -> Display | None:
    value = event.data.get("display")
    return Display.model_validate(value) if isinstance(value, dict) else None
