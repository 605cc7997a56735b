"""The forms of a rich output: which one to show as a picture or as text, and how events become Jupyter's bundles.

Trusts no mime type and no base64. Knows neither notebooks nor connections.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from belljar.json_values import check_values
from belljar.models import Display, OutputEvent
from belljar.outputs.budget import clip
from belljar.outputs.events import is_binary_type

PLAIN, PAGE, SVG = "text/plain", "text/html", "image/svg+xml"
# Mime types that browsers draw, and their files' suffixes.
RASTER = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}
# Forms whose source is worth reading, best first, and its language.
_SOURCES = {"text/markdown": "markdown", "text/latex": "latex", "application/json": "json", PAGE: "html"}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as bytes, with its mime type."""

    mime: str
    content: bytes

    @property
    def uri(self) -> str:
        """The picture itself, as a data URI."""
        return f"data:{self.mime};base64,{base64.b64encode(self.content).decode()}"


def picture_in(bundle: Mapping[str, Any]) -> Picture | None:
    """Return the first picture that can be drawn."""
    for mime in RASTER:
        value = bundle.get(mime)
        try:
            if isinstance(value, str):
                return Picture(mime, base64.b64decode("".join(value.split()), validate=True))
        except (binascii.Error, ValueError):
            continue
    drawing = bundle.get(SVG)
    return Picture(SVG, drawing.encode(errors="replace")) if isinstance(drawing, str) else None


def is_readable(plain: object) -> bool:
    """Return whether a plain form says what a value holds, rather than only that it is an object of some kind."""
    return isinstance(plain, str) and bool(plain) and not (plain.startswith("<") and plain.endswith(">"))


def readable_text(bundle: Mapping[str, Any]) -> tuple[str, str]:
    """Return the form to read, and what language it is in; of a bundle without text, the names of its forms."""
    plain = bundle.get(PLAIN)
    if is_readable(plain):
        return str(plain), "text"
    for mime, language in _SOURCES.items():
        if mime in bundle:
            value = bundle[mime]
            return (value if isinstance(value, str) else json.dumps(value, indent=2)), language
    others = ", ".join(mime for mime in bundle if mime != PLAIN)
    return str(plain or (f"[{others}]" if others else "")), "text"


# Output events as Jupyter has them: the parts that went into answers and onto the disk, put together again

ReadDisplay = Callable[[str], bytes | None]
_JSON = re.compile(r"application/(.*\+)?json")
_MAX_DEPTH = 64


def mime_bundle(event: OutputEvent, read_display: ReadDisplay, limit_chars: int = 0) -> dict[str, Any]:
    """Return all forms of a display or a result; `limit_chars` is for its plain text, 0 for no limit."""
    bundle: dict[str, Any] = {}
    value = event.data.get("display")
    display = Display.model_validate(value) if isinstance(value, dict) else None
    if plain := _whole_text(event, read_display, limit_chars) or (display.plain if display else None):
        bundle[PLAIN] = plain
    for form in (display, *display.also) if display else ():
        content = form.text if form.text is not None else _stored(form, read_display)
        if content is not None:
            bundle[form.mime] = _parsed(content) if _JSON.fullmatch(form.mime) else content
    return bundle


def error_fields(event: OutputEvent) -> dict[str, Any]:
    """Return an error as its name, its message and its traceback."""
    name, _, message = event.text.partition(": ")
    lines = event.data.get("traceback")
    traceback = [str(line) for line in lines] if isinstance(lines, list) else []
    return {"ename": name, "evalue": message, "traceback": traceback}


def _whole_text(event: OutputEvent, read_display: ReadDisplay, limit_chars: int) -> str:
    """Return a result's plain text, which is read from its file where it was too long for the event."""
    uri = event.data.get("uri")
    whole = read_display(uri) if isinstance(uri, str) else None
    if whole is None:
        return event.text
    text = whole.decode(errors="replace")
    return clip(text, limit_chars) if limit_chars else text


def _stored(form: Display, read: ReadDisplay) -> str | None:
    content = read(form.uri or "")
    if content is None:
        return None
    return base64.b64encode(content).decode() if is_binary_type(form.mime) else content.decode(errors="replace")


def _parsed(content: str) -> Any:
    """Return JSON as values, as a notebook has it; what Jupyter could not read stays text."""
    try:
        check_values(content)
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return value if _is_portable(value, _MAX_DEPTH) else content


def _is_portable(value: Any, depth: int) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, dict | list):
        return True
    parts = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
    return depth > 0 and all(_is_portable(part, depth - 1) for part in parts)
