"""The forms of a rich output: one table says what is done with each MIME type, wherever output is stored or shown.

Also which form to show as a picture or as text, and how events become Jupyter's bundles. Trusts no MIME type and no
base64. Knows neither notebooks nor connections. What the names of files say is in `files/file_types.py`.
"""

import base64
import binascii
import json
import math
import mimetypes
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast

from belljar.json_values import check_values
from belljar.models import Display, OutputEvent
from belljar.outputs.budget import clip

PLAIN, PAGE, MARKDOWN, LATEX, SVG = "text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml"
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What is done with the forms of one MIME type."""

    mime: str
    ending: str = ""
    """How the names of its files end; empty for what Python's `mimetypes` says."""
    is_prefix: bool = False
    """Whether the row is for all types that begin so, as far as they have no row of their own."""
    is_binary: bool = False
    """Whether its values are bytes in base64; all others are text or JSON, whatever their type says."""
    block: Literal["image", "audio"] | None = None
    """The content block that a client gets. Models are shown these four pictures and no others; SVG is text to them."""
    as_text: Literal["itself", "plain", "result"] = "itself"
    """What a model reads of it: itself; the plain form, which says what a page says; or the result, if it is one."""
    drawn: Literal["picture", "frame"] | None = None
    """What is safe to draw in the console: a picture, or a document in a sealed frame. Exports draw pictures, too."""
    source: str = ""
    """The language of its source, where that is worth reading."""
    is_media: bool = False
    """Whether it is to be looked at or heard, so that `belljar run`, which cannot show it, saves it as a file."""


_picture = partial(OutputForm, is_binary=True, block="image", drawn="picture", is_media=True)
# The form that a person would rather look at comes first.
_RANKED: Final = (
    _picture("image/png", ".png"),
    _picture("image/jpeg", ".jpg"),
    _picture("image/gif", ".gif"),
    _picture("image/webp", ".webp"),
    OutputForm(SVG, ".svg", drawn="picture", is_media=True),
    OutputForm(PAGE, ".html", as_text="plain", drawn="frame", source="html"),
    OutputForm(MARKDOWN, ".md", drawn="frame", source="markdown"),
    OutputForm(LATEX, ".tex", as_text="result", source="latex"),
    OutputForm("application/json", ".json", source="json"),
    OutputForm("application/pdf", is_prefix=True, is_binary=True, is_media=True),
)
# These come after them, in the order in which the cell gave them, as all types that have no row.
_OTHERS: Final = (
    # A widget's view only names what a front end has; what there is to read is its plain form.
    OutputForm(WIDGET, as_text="plain"),
    OutputForm("application/javascript", ".js"),
    OutputForm("application/octet-stream", is_prefix=True, is_binary=True),
    OutputForm("application/zip", is_prefix=True, is_binary=True),
    OutputForm("image/", is_prefix=True, is_binary=True, is_media=True),
    OutputForm("audio/", is_prefix=True, is_binary=True, block="audio", is_media=True),
    OutputForm("video/", is_prefix=True, is_binary=True, is_media=True),
    OutputForm("font/", is_prefix=True, is_binary=True),
)
FORMS: Final = {form.mime: form for form in (*_RANKED, *_OTHERS)}
_PREFIXES: Final = tuple(form for form in FORMS.values() if form.is_prefix)
_RANKS: Final = {form.mime: rank for rank, form in enumerate(_RANKED)}
_UNKNOWN: Final = OutputForm("")
# MIME types in the order of the table.
PICTURES: Final = tuple(form.mime for form in FORMS.values() if form.block == "image")
DRAWN: Final = tuple(form.mime for form in FORMS.values() if form.drawn == "picture")
FRAMED: Final = tuple(form.mime for form in FORMS.values() if form.drawn == "frame")
READ: Final = tuple(form.mime for form in FORMS.values() if form.source and form.drawn is None)
# The source of a page is read only where there is nothing else.
_SOURCES: Final = sorted((form.mime for form in FORMS.values() if form.source), key=lambda mime: mime == PAGE)
_PICTURE_NAMES: Final = {
    name: mime for mime in PICTURES for name in (mime.removeprefix("image/"), FORMS[mime].ending.removeprefix("."))
}


def form_of(mime: str) -> OutputForm:
    """Return what is done with a type. It must be written as in the table: upper case or a parameter makes another."""
    return FORMS.get(mime) or next((form for form in _PREFIXES if mime.startswith(form.mime)), _UNKNOWN)


def rank_of(mime: str) -> int:
    """Return the place of a type among the forms of one output, 0 for the best; types that have no rank are equal."""
    return _RANKS.get(mime, len(_RANKS))


def extension_of(mime: str, unknown: str = ".bin") -> str:
    """Return how the name of a file of this type ends."""
    if ending := form_of(mime).ending:
        return ending
    return ".json" if mime.endswith("+json") else mimetypes.guess_extension(mime) or unknown


def pillow_format(mime: str) -> str:
    """Return Pillow's name of the format of a picture."""
    return mime.removeprefix("image/").upper()


def picture_named(name: str) -> str | None:
    """Return the type of a picture by the name of its format, or by the ending of its file without the dot."""
    return _PICTURE_NAMES.get(name.lower())


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as bytes, with its MIME type."""

    mime: str
    content: bytes

    @property
    def uri(self) -> str:
        """The picture itself, as a data URI."""
        return f"data:{self.mime};base64,{base64.b64encode(self.content).decode()}"


def picture_in(bundle: Mapping[str, Any]) -> Picture | None:
    """Return the first picture that can be drawn."""
    for mime in PICTURES:
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
    for mime in _SOURCES:
        if mime in bundle:
            value = bundle[mime]
            return (value if isinstance(value, str) else json.dumps(value, indent=2)), FORMS[mime].source
    others = ", ".join(mime for mime in bundle if mime != PLAIN)
    return str(plain or (f"[{others}]" if others else "")), "text"


# Output events as Jupyter has them: the parts that went into answers and onto the disk, put together again

ReadDisplay = Callable[[str], bytes | None]
_JSON = re.compile(r"application/(.*\+)?json")
_MAX_DEPTH = 64


def mime_bundle(event: OutputEvent, read_display: ReadDisplay, limit_chars: int = 0) -> dict[str, Any]:
    """Return all forms of a display or a result; `limit_chars` is for its plain text, 0 for no limit."""
    bundle: dict[str, Any] = {}
    display = event.display
    if plain := _whole_text(event, read_display, limit_chars) or (display.plain if display else None):
        bundle[PLAIN] = plain
    for form in (display, *display.also) if display else ():
        content = form.text if form.text is not None else _stored(form, read_display)
        if content is not None:
            bundle[form.mime] = _parsed(content) if _JSON.fullmatch(form.mime) else content
    return bundle


def display_id_of(event: OutputEvent) -> str | None:
    """Return the id by which a later event may update an output: one that it was given, or that of its widget."""
    given = event.data.get("display_id")
    if isinstance(given, str) and given:
        return given
    display = event.display
    forms = (display, *display.also) if display is not None else ()
    view = next((_parsed(form.text) for form in forms if form.mime == WIDGET and form.text), None)
    return f"widget-{view['model_id']}" if isinstance(view, dict) and "model_id" in view else None


def error_fields(event: OutputEvent) -> dict[str, Any]:
    """Return an error as its name, its message and its traceback."""
    name, _, message = event.text.partition(": ")
    return {"ename": name, "evalue": message, "traceback": event.traceback}


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
    return base64.b64encode(content).decode() if form_of(form.mime).is_binary else content.decode(errors="replace")


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
