"""Data URIs that code prints, found in streams that come piece by piece, so that no text is cut in the middle of one.

Output is hostile: how many are kept, and how long they may be, is bounded; what is more counts as any other text.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

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
