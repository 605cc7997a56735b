"""What calls return beside plain JSON: pictures, sounds, resources, and results too large to pass on."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from pathlib import Path
from typing import Any

from .errors import error_from

_SHOWN = ("image/", "audio/", "video/")


class Media:
    """A picture, a sound, a resource, or a link to one."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.kind = str(fields.get("kind", ""))
        self.mime = str(fields.get("mime", ""))
        self.uri = str(fields.get("uri", ""))
        self.name = str(fields.get("name", ""))
        self.path = Path(fields["path"]) if "path" in fields else None
        self._text: str | None = fields.get("text")
        self._data = base64.b64decode(fields["data"]) if "data" in fields else None

    @property
    def data(self) -> bytes:
        """Its bytes."""
        if self._text is not None:
            return self._text.encode()
        if self._data is not None:
            return self._data
        if self.path is not None:
            return self.path.read_bytes()
        raise ValueError(f"{self!r} is a link: there is nothing of it here")

    @property
    def text(self) -> str:
        """Its text."""
        return self._text if self._text is not None else self.data.decode()

    def save(self, path: str | Path) -> Path:
        """Write it to a file, and give the file's path; a path without a suffix gets one."""
        target = Path(path)
        if not target.suffix:
            target = target.with_suffix(mimetypes.guess_extension(self.mime) or "")
        data = self.data
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        return target

    def __repr__(self) -> str:
        if self._text is None and self._data is None and self.path is None:
            return f"<{self.kind} {self.uri or self.name}>"
        size = self.path.stat().st_size if self.path and self.path.exists() else len(self._data or self.data)
        return f"<{' '.join(filter(None, [self.kind, self.mime, self.uri or self.name]))}, {size:,} bytes>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.forms()

    def forms(self) -> dict[str, Any]:
        """What it is shown as, by media type."""
        shown: dict[str, Any] = {"text/plain": repr(self)}
        if self.mime == "image/svg+xml":
            shown[self.mime] = self.text
        elif self.mime.startswith(_SHOWN) and self.kind != "link":
            shown[self.mime] = base64.b64encode(self.data).decode()
        return shown


class LargeResult:
    """A result that was too large to pass on: it is in a file of the session folder."""

    def __init__(self, path: str, size: int, is_json: bool) -> None:
        self.path = Path(path)
        self.size = size
        self.is_json = is_json

    def load(self) -> Any:
        """The whole of it."""
        text = self.path.read_text(encoding="utf-8")
        return json.loads(text) if self.is_json else text

    def __repr__(self) -> str:
        return f"<result of {self.size:,} bytes in {self.path}; .load() reads it>"


class Answer(dict):  # pyright: ignore[reportMissingTypeArgument]  # Python 3.9 has no other way to say it
    """A result that came with media."""

    media: list[Media]

    def __repr__(self) -> str:
        return f"{super().__repr__()} with {', '.join(map(repr, self.media))}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return _all_shown(self.media)


class Parts(list):  # pyright: ignore[reportMissingTypeArgument]  # Python 3.9 has no other way to say it
    """A result of several parts, texts and media."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        parts: list[Any] = list(self)  # pyright: ignore[reportUnknownArgumentType]
        return _all_shown([part for part in parts if isinstance(part, Media)])


def _all_shown(media: list[Media]) -> dict[str, Any]:
    """The last of what can be seen or heard as the result's own form, those before it as displays of their own."""
    *before, last = [{}, *(forms for each in media if len(forms := each.forms()) > 1)]
    ipython: Any = sys.modules.get("IPython")
    if ipython is not None:
        for forms in filter(None, before):
            ipython.display.display(forms, raw=True)
    # How it reads is the result's own matter.
    return {mime: form for mime, form in last.items() if mime != "text/plain"}


def value_from(answer: dict[str, Any]) -> Any:
    """What a call returns, or the error that it raises."""
    __tracebackhide__ = True
    if answer.get("outcome") != "value":
        raise error_from(answer)
    value: Any = answer.get("value")
    if "file" in answer:
        value = _large(answer["file"])
    parts: list[dict[str, Any]] | None = answer.get("parts")
    if parts is None:
        return value
    found = [_part(part) for part in parts]
    if not answer.get("has_value"):
        return found[0] if len(found) == 1 else Parts(found)
    if isinstance(value, dict):
        whole = Answer(value)  # pyright: ignore[reportUnknownArgumentType]
        whole.media = found
        return whole
    return Parts([value, *found])


def _part(part: dict[str, Any]) -> Any:
    if part.get("kind") == "json":
        return part.get("value")
    return _large(part) if part.get("kind") == "file" else Media(part)


def _large(fields: dict[str, Any]) -> LargeResult:
    return LargeResult(str(fields["path"]), int(fields["size"]), bool(fields.get("is_json")))
