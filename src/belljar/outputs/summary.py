"""Output events to the fields of a result: what a caller is shown, with a notebook's rules for clearing and updating.

A line that is written over, such as a progress bar, is shown as it is last; the journal has all that was printed.

Data URIs that code prints are found in streams that come piece by piece, so that no text is cut in the middle of one.
Output is hostile: how many are kept, and how long they may be, is bounded; what is more counts as any other text.

Live executions and replays from the journal go through the same code, so that they give the same results.
"""

import base64
import binascii
import re
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote_to_bytes

from belljar.models import Display, OutputEvent, ResultNotice, Truncation
from belljar.outputs.budget import clip
from belljar.outputs.displays import INLINE_CHARS
from belljar.outputs.spoofed_notices import disarmed
from belljar.outputs.terminal_text import LineFolder

MAX_DISPLAYS = 50
STREAMS = ("stdout", "stderr")
MARK = "mark"
"""The name of a mark between texts: it has no text, takes nothing of the budget, and is never left out."""
LEAST_CHARS = 256
"""A shorter one is text like any other."""
MAX_CHARS = 6_000_000
"""What all of an execution have together: 4 MB of data are 5.6 million characters of base64."""
MAX_URIS = 20
_START = "data:"
_HEADER = re.compile(
    r"data:(?P<mime>[a-z]{1,20}/[a-z0-9.+-]{1,80})(?:;[a-z0-9_=.-]{1,40}){0,3},", re.ASCII | re.IGNORECASE
)
_LONGEST_HEADER = 240
_BODY = re.compile(r"[A-Za-z0-9+/=_%.~-]*+")
_SPACE = re.compile(r"\s")


@dataclass(frozen=True, slots=True)
class DataUri:
    """A data URI; `text` is empty if it was too long to be kept."""

    text: str
    chars: int
    mime: str

    def content(self) -> bytes | None:
        """Return what it holds; None if it was not kept or is not what it says."""
        header, _, body = self.text.partition(",")
        if not header.lower().endswith(";base64"):
            return unquote_to_bytes(body) or None
        try:
            return base64.b64decode(unquote_to_bytes(body), validate=True) or None
        except (binascii.Error, ValueError):
            return None


Piece = tuple[str, str | DataUri]
"""A stream with a text or a data URI of it."""


class DataUriFinder:
    """Finds the data URIs of an execution's streams. Text that may belong to one is held until that is known."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._left = MAX_CHARS
        self._found = 0

    def add(self, name: str, text: str) -> Iterator[Piece]:
        """Yield the next text of a stream, and the URIs in it that are complete."""
        for other, stream in self._streams.items():
            if other != name and stream.pending:
                # What the other stream says next comes after this.
                yield other, stream.pending
                stream.pending = ""
        stream = self._streams.setdefault(name, _Stream())
        if not stream.is_empty or _START in text or _begun(text):
            for part in stream.add(text):
                yield name, self._counted(part)
        else:
            yield name, text

    def settle(self) -> list[Piece]:
        """Return what is held, because something else comes next."""
        held = [(name, self._counted(part)) for name, part in self._held()]
        self._streams = {}
        return held

    def held(self) -> list[Piece]:
        """Return what is held, as if nothing came after it."""
        return [(name, self._counted(part, is_final=False)) for name, part in self._held()]

    def _held(self) -> list[Piece]:
        return [(name, stream.held()) for name, stream in self._streams.items() if not stream.is_empty]

    def _counted(self, part: str | DataUri, *, is_final: bool = True) -> str | DataUri:
        if isinstance(part, str):
            return part
        if part.text and (part.chars < LEAST_CHARS or self._found >= MAX_URIS):
            return part.text
        is_kept = part.chars <= self._left
        if is_final:
            self._found += 1
            self._left -= part.chars if is_kept else 0
        return part if is_kept else DataUri("", part.chars, part.mime)


class _Stream:
    """One stream: what may be the beginning of a URI, or the URI that has not ended."""

    def __init__(self) -> None:
        self.pending = ""
        self._pieces: list[str] = []
        self._chars = 0
        self._mime = ""

    @property
    def is_empty(self) -> bool:
        return not self.pending and not self._pieces

    def add(self, text: str) -> Iterator[str | DataUri]:
        text, self.pending = self.pending + text, ""
        at = shown = 0
        while at < len(text):
            if self._pieces:
                at = self._go_on(text, at)
                if at < len(text):
                    yield self._end()
                shown = at
                continue
            start = text.find(_START, at)
            if start < 0:
                start = len(text) - _begun(text)
                self.pending = text[start:]
                break
            header = _HEADER.match(text, start)
            if header is None:
                rest = text[start : start + _LONGEST_HEADER]
                if len(rest) < _LONGEST_HEADER and not _SPACE.search(rest):
                    self.pending = text[start:]
                    break
                at = start + len(_START)
                continue
            if start > shown:
                yield text[shown:start]
            self._pieces, self._chars, self._mime = [header[0]], len(header[0]), header["mime"].lower()
            at = shown = header.end()
        if not self._pieces and (rest := text[shown : len(text) - len(self.pending)]):
            yield rest

    def _go_on(self, text: str, at: int) -> int:
        body = _BODY.match(text, at)
        end = body.end() if body else at
        self._chars += end - at
        if self._chars <= MAX_CHARS:
            self._pieces.append(text[at:end])
        return end

    def _end(self) -> DataUri:
        uri = self._uri()
        self._pieces = []
        return uri

    def held(self) -> str | DataUri:
        return self._uri() if self._pieces else self.pending

    def _uri(self) -> DataUri:
        return DataUri("".join(self._pieces) if self._chars <= MAX_CHARS else "", self._chars, self._mime)


def _begun(text: str) -> int:
    """Return how many characters at the end of a text may be the first of a URI."""
    return next((count for count in range(len(_START) - 1, 0, -1) if text.endswith(_START[:count])), 0)


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
                self._rich_result = event.display if "display" in event.data else None
            case "error":
                self.error = event.text
                self.traceback = event.traceback
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

    def uris_left_out(self) -> list[DataUri]:
        """Return the data URIs that were printed and that the texts do not show."""
        return self._text.uris_left_out()

    def note_file(self, uri: str, file: str) -> None:
        """Note that the displays behind `uri` are a file of the session, too."""
        for display in (*self._displays, self._rich_result):
            if display is not None and display.uri == uri:
                display.file = file

    def _clear(self) -> None:
        self._text = TextBudget(self._budget_chars)
        self._displays = []
        self._rich_result = None
        self._left_out = 0
        self._is_clear_pending = False

    def _display(self, event: OutputEvent) -> None:
        display = event.display
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
        self._text.mark()

    def _is_last(self, display: Display) -> bool:
        """Return whether this place shows the display already, byte for byte, and neither of the two can be updated."""
        if display.uri is None or display.display_id is not None or not self._displays:
            return False
        return self._displays[-1].uri == display.uri and self._text.ends_with_mark


def _cut_of(event: OutputEvent) -> Truncation | None:
    uri, size = event.data.get("uri"), event.data.get("size")
    if not isinstance(uri, str) or not isinstance(size, int):
        return None
    return Truncation(shown_bytes=len(event.text.encode(errors="replace")), total_bytes=size, uri=uri)


# The text of a result, within its budget

Part = tuple[str, str | DataUri]
"""A stream with a text or a data URI of it, a notice, or a mark."""


class TextBudget:
    """Stream text in the order it was produced, of which at most `budget_chars` characters stay in memory.

    What is counted and kept is the text with written over lines as they are last. Data URIs count for themselves: they
    are shown whole where everything is, and else not at all, unless `has_whole_uris` says that they always are.
    """

    def __init__(self, budget_chars: int, *, has_whole_uris: bool = False) -> None:
        self._limit = budget_chars // 2
        self._has_whole_uris = has_whole_uris
        self._finder = DataUriFinder()
        self._folder = LineFolder()
        self.ends_with_mark = False
        """Whether nothing came after the latest mark."""
        self._head: list[Part] = []
        self._tail: deque[Part] = deque()
        self._head_chars = 0
        self._tail_chars = 0
        self._uri_chars = 0
        self._between: list[Part] = []
        """Marks and URIs whose text was left out between head and tail."""
        self._text_bytes = 0

    def add(self, name: str, text: str) -> None:
        """Append text of one stream, or a notice."""
        self.ends_with_mark = self.ends_with_mark and not text
        if name not in STREAMS:
            self._settle()
            self._keep(name, text)
            return
        for piece in self._finder.add(name, text):
            self._add_piece(*piece)

    def _settle(self) -> None:
        for piece in self._finder.settle():
            self._add_piece(*piece)
        self._keep_all(self._folder.settle())

    def _add_piece(self, name: str, part: str | DataUri) -> None:
        if isinstance(part, str):
            self._keep_all(self._folder.add(name, part))
            return
        self._keep_all(self._folder.settle())
        self._uri_chars += part.chars
        self._keep_place(name, part)

    def _keep_all(self, parts: Iterable[tuple[str, str]]) -> None:
        for name, text in parts:
            self._keep(name, text)

    def _keep(self, name: str, text: str) -> None:
        self._text_bytes += _size(text)
        room = self._limit - self._head_chars
        if room > 0:
            _append(self._head, name, text[:room])
            self._head_chars += min(room, len(text))
            text = text[room:]
        if text:
            text = text[-self._limit :]
            _append(self._tail, name, text)
            self._tail_chars += len(text)
            self._trim_tail()

    def _keep_place(self, name: str, thing: str | DataUri) -> None:
        (self._head if self._head_chars < self._limit else self._tail).append((name, thing))

    def mark(self) -> None:
        """Mark the place between the text so far and the text to come."""
        self._settle()
        self.ends_with_mark = True
        self._keep_place(MARK, "")

    def _trim_tail(self) -> None:
        while self._tail_chars > self._limit:
            name, text = self._tail[0]
            excess = self._tail_chars - self._limit
            if name == MARK or isinstance(text, DataUri):
                self._between.append(self._tail.popleft())
            elif excess >= len(text):
                self._tail.popleft()
                self._tail_chars -= len(text)
            else:
                self._tail[0] = (name, text[excess:])
                self._tail_chars -= excess

    def segments(self) -> list[tuple[str, str]]:
        """Return (stream, text) pairs and marks, with a line in place of what is left out."""
        return self._with_held_text()._segments()

    def truncation(self, uri: str) -> Truncation | None:
        """Return how much is missing and where the whole text is; None when nothing is missing."""
        return self._with_held_text()._truncation(uri)

    def uris_left_out(self) -> list[DataUri]:
        """Return the data URIs that were printed and that the segments do not show."""
        whole = self._with_held_text()
        return [part for _, part in whole._parts() if isinstance(part, DataUri) and not whole._is_shown(part)]

    def _with_held_text(self) -> Self:
        pieces, lines = self._finder.held(), self._folder.held()
        if not pieces and not lines:
            return self
        whole = copy(self)
        whole._head, whole._tail, whole._between = [*self._head], self._tail.copy(), [*self._between]
        whole._folder = LineFolder()
        for piece in (*lines, *pieces):
            whole._add_piece(*piece)
        whole._keep_all(whole._folder.settle())
        return whole

    def _parts(self) -> list[Part]:
        return [*self._head, *self._between, *self._tail]

    def _is_shown(self, uri: DataUri) -> bool:
        is_whole = self._text_bytes <= self._shown_bytes()
        has_room = self._head_chars + self._tail_chars + self._uri_chars <= 2 * self._limit
        return bool(uri.text) and (self._has_whole_uris or (is_whole and has_room))

    def _shown(self, part: Part) -> tuple[str, str]:
        name, text = part
        if isinstance(text, str):
            return name, text
        if self._is_shown(text):
            return name, text.text
        return "notice", f"\n[belljar: a data: URI of {text.chars:,} characters is left out here]\n"

    def _segments(self) -> list[tuple[str, str]]:
        left_out = self._text_bytes - self._shown_bytes()
        if left_out <= 0:
            return _merged(map(self._shown, self._parts()))
        cut = ("notice", f"\n[belljar: {left_out:,} bytes left out here]\n")
        return _merged([*map(self._shown, self._head), cut, *map(self._shown, [*self._between, *self._tail])])

    def _truncation(self, uri: str) -> Truncation | None:
        parts = self._parts()
        total = self._text_bytes + self._uri_chars
        shown = self._shown_bytes() + sum(
            text.chars for _, text in parts if isinstance(text, DataUri) and self._is_shown(text)
        )
        return Truncation(shown_bytes=shown, total_bytes=total, uri=uri) if shown < total else None

    def _shown_bytes(self) -> int:
        return sum(_size(text) for _, text in (*self._head, *self._tail) if isinstance(text, str))


def _append(parts: "list[Part] | deque[Part]", name: str, text: str) -> None:
    if parts and parts[-1][0] == name != MARK and isinstance(before := parts[-1][1], str):
        parts[-1] = (name, before + text)
    else:
        parts.append((name, text))


def _merged(parts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    merged: list[tuple[str, str]] = []
    for name, text in parts:
        if merged and merged[-1][0] == name != MARK:
            merged[-1] = (name, merged[-1][1] + text)
        else:
            merged.append((name, text))
    return merged


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))
