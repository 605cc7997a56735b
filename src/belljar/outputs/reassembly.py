"""Output events as Jupyter has them: what was split up for answers and for the disk, whole again.

Knows neither notebooks nor connections.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from belljar.models import Display, OutputEvent
from belljar.outputs.budget import clip

ReadDisplay = Callable[[str], bytes | None]
_JSON = re.compile(r"application/(.*\+)?json")
_BINARY = ("image/", "audio/", "video/", "application/pdf", "application/octet-stream")
_MAX_DEPTH = 64


def mime_bundle(event: OutputEvent, read_display: ReadDisplay, limit_chars: int = 0) -> dict[str, Any]:
    """All forms of a display or a result; `limit_chars` is for its plain text, 0 for no limit."""
    bundle: dict[str, Any] = {}
    value = event.data.get("display")
    display = Display.model_validate(value) if isinstance(value, dict) else None
    if plain := _whole_text(event, read_display, limit_chars) or (display.plain if display else None):
        bundle["text/plain"] = plain
    for form in (display, *display.also) if display else ():
        content = form.text if form.text is not None else _stored(form, read_display)
        if content is not None:
            bundle[form.mime] = _parsed(content) if _JSON.fullmatch(form.mime) else content
    return bundle


def error_fields(event: OutputEvent) -> dict[str, Any]:
    """An error as its name, its message and its traceback."""
    name, _, message = event.text.partition(": ")
    lines = event.data.get("traceback")
    traceback = [str(line) for line in lines] if isinstance(lines, list) else []
    return {"ename": name, "evalue": message, "traceback": traceback}


def _whole_text(event: OutputEvent, read_display: ReadDisplay, limit_chars: int) -> str:
    """A result's plain text, whose whole is kept as a file where it is long."""
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
    is_binary = form.mime.startswith(_BINARY) and form.mime != "image/svg+xml"
    return base64.b64encode(content).decode() if is_binary else content.decode(errors="replace")


def _parsed(content: str) -> Any:
    """JSON as a notebook has it, as values; what Jupyter could not read stays text."""
    try:
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
