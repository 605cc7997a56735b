"""The value of a cell as the data plane sends it: JSON where it has a form there, a figure, or its printed text.

A kernel reports a value as IPython prints it. Python's own literals can be read back from that; anything that cannot,
such as a frame or a list that was printed in part, stays text. The text comes from the cell, so its size and depth are
bounded, and a value that pretends to be another one deceives only its own caller.
"""

import ast
import base64
import math
import re
from collections.abc import Callable
from typing import Any, Final, cast

from belljar.models import Display, ExecutionResult
from belljar.outputs.displays import fitted
from belljar.outputs.forms import PICTURES

MAX_CHARS: Final = 200_000
MAX_DEPTH: Final = 60
PICTURE_BYTES: Final = 16 * 1024 * 1024
URI_BYTES: Final = 6_000_000
# Numbers of numpy 2 say their type: np.float64(1.5).
_NUMPY: Final = re.compile(r"np\.(?:u?int|float|bool|str)[0-9]*_?\((?P<value>.*)\)", re.DOTALL)
# What plotting calls return: [<matplotlib.lines.Line2D at 0x7f…>], <Axes: >, Text(0.5, 1.0, 'title').
_OPAQUE: Final = re.compile(r"\(?\[?<[^\n]*|Text\(.*", re.DOTALL)
_DATA_URI: Final = re.compile(r"'(data:[A-Za-z0-9+/=_%.~;,:-]*+)'")
_MISSING: Final = object()


class FigureValue(dict[str, str]):
    """A figure as the data plane sends it."""


ReadDisplay = Callable[[str], bytes | None]


def value_of(result: ExecutionResult, read_display: ReadDisplay, *, is_old: bool = False) -> Any:
    """Return `executionResult`; in old versions lists and the like stay text, because clients split that text."""
    printed = result.result
    if (uri := _data_uri(result, read_display)) is not None:
        return uri
    if printed is not None and not _OPAQUE.fullmatch(printed):
        rich = next((display for display in result.displays if display.at is None), None)
        if rich is None or rich.mime not in PICTURES:
            return read_value(printed, is_old=is_old)
    figure = next(
        (found for display in reversed(result.displays) if (found := _figure(display, read_display)) is not None), None
    )
    return printed if figure is None else figure


def _data_uri(result: ExecutionResult, read_display: ReadDisplay) -> str | None:
    """Return a value that is a data: URI, whole although the result has only its beginning and its end."""
    printed, cut = result.result or "", result.truncated
    if cut is not None and printed.startswith("'data:") and (whole := read_display(cut.uri)) is not None:
        printed = whole[:URI_BYTES].decode(errors="replace")
    match = _DATA_URI.fullmatch(printed)
    return match[1] if match else None


def picture_in(value: Any) -> dict[str, str] | None:
    """Return a value that is a figure; None for any other, also for data that merely looks like one."""
    return value if isinstance(value, FigureValue) else None


def read_value(printed: str, *, is_old: bool = False) -> Any:
    """Return the value that IPython printed so, or the text where it has no form in JSON."""
    if numpy := _NUMPY.fullmatch(printed):
        printed = numpy["value"]
    value = _literal(printed)
    is_scalar = value is None or isinstance(value, str | int | float)
    if value is _MISSING or (is_old and not is_scalar) or not _has_json_form(value, MAX_DEPTH):
        return printed
    return value


def _literal(printed: str) -> Any:
    if len(printed) > MAX_CHARS or sum(map(printed.count, "[({")) > MAX_CHARS // 10:
        return _MISSING
    try:
        return ast.literal_eval(printed)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _MISSING


def _has_json_form(value: Any, depth: int) -> bool:
    if depth == 0:
        return False
    match value:
        case None | str() | bool() | int():
            return True
        case float():
            return math.isfinite(value)
        case list() | tuple():
            return all(_has_json_form(item, depth - 1) for item in cast("list[Any]", value))
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return all(isinstance(key, str) and _has_json_form(item, depth - 1) for key, item in items)
        case _:
            return False


def _figure(display: Display, read_display: ReadDisplay) -> "FigureValue | None":
    for form in (display, *display.also):
        content = read_display(form.uri) if form.mime in PICTURES and form.uri else None
        picture = fitted(content, form.mime, PICTURE_BYTES) if content is not None else None
        if picture is not None:
            data = base64.b64encode(picture[0]).decode()
            return FigureValue(type="image", format=picture[1].removeprefix("image/"), base64_data=data)
    return None
