"""Which form of a rich output to show where: a picture a page can hold, or words. Trusts no mime type and no base64."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PLAIN, PAGE, SVG = "text/plain", "text/html", "image/svg+xml"
# What browsers draw, and the ending of its file.
RASTER = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}
# Worth reading as they are, best first.
_SOURCES = {"text/markdown": "markdown", "text/latex": "latex", "application/json": "json", PAGE: "html"}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as bytes."""

    mime: str
    content: bytes

    @property
    def uri(self) -> str:
        """The picture itself, as a URI."""
        return f"data:{self.mime};base64,{base64.b64encode(self.content).decode()}"


def picture_in(bundle: Mapping[str, Any]) -> Picture | None:
    """The first picture that can be drawn."""
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
    """Whether a plain form says what a value holds, rather than only that it is an object of some kind."""
    return isinstance(plain, str) and bool(plain) and not (plain.startswith("<") and plain.endswith(">"))


def words_in(bundle: Mapping[str, Any]) -> tuple[str, str]:
    """The form to read, and what language it is in; of a form that has no words, its name."""
    plain = bundle.get(PLAIN)
    if is_readable(plain):
        return str(plain), "text"
    for mime, language in _SOURCES.items():
        if mime in bundle:
            value = bundle[mime]
            return (value if isinstance(value, str) else json.dumps(value, indent=2)), language
    others = ", ".join(mime for mime in bundle if mime != PLAIN)
    return str(plain or (f"[{others}]" if others else "")), "text"
