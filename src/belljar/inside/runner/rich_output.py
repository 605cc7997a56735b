"""Preparing rich outputs for the host: values that JSON can hold, and figures as pages and pictures.

Plotly's own JSON can be drawn by notebook front ends only. The page is self-contained and opens without a network. The
picture needs kaleido and a browser that it can start; after the first failure no more pictures are tried. Also decides
quickly whether a value has text as its only representation.
"""

import base64
import contextlib
import hashlib
import importlib
import json
import sys
import weakref
from typing import Any, Optional

from IPython.lib import pretty

from .channel import MAX_DEPTH, MAX_VALUES, has_too_many_values, is_too_deep

VALUE = "application/vnd.belljar.value+json"
MAX_VALUE_CHARS = 256 * 1024
PLOTLY = "application/vnd.plotly.v1+json"
NO_PICTURE = (
    "<Plotly figure: a page without a picture, because no browser in this session can draw one. An operator adds "
    "Chromium (apt install chromium; for the image, --build-arg BROWSER=yes). matplotlib needs none.>"
)
_state: dict[str, Any] = {"has_picture": True, "pictured": "", "picture": b""}


def prepared(data: dict[str, Any]) -> dict[str, Any]:
    """Return the bundle as it goes to the host."""
    if PLOTLY in data:
        data = {**data, **_draw_plotly(data[PLOTLY])}
        del data[PLOTLY]
    encoded: dict[str, Any] = {}
    for mime, value in data.items():
        encoded[mime] = _encoded(value)
    if has_too_many_values(encoded):
        notice = f"<data of more than {MAX_VALUES:,} values was left out>"
        return {mime: value if isinstance(value, str) else notice for mime, value in encoded.items()}
    return encoded


def json_value(value: Any) -> Optional["dict[str, Any]"]:
    """Return `{"value": …}` for a value that JSON has, `{"size": …}` for one that is too large, None for any other."""
    try:
        if _weight(value, MAX_VALUE_CHARS, set()) > MAX_VALUE_CHARS:
            return {"size": len(value) if isinstance(value, str) else MAX_VALUE_CHARS + 1}
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError, OverflowError):
        return None
    return {"value": json.loads(text)} if len(text) <= MAX_VALUE_CHARS else {"size": len(text)}


_CONTAINERS: "tuple[Any, ...]" = (list, tuple, dict)


def _weight(value: Any, most: int, around: "set[int]") -> int:
    """Return about how many characters a value takes as JSON; stop counting above `most`."""
    if isinstance(value, str):
        return len(value) + 2
    if not isinstance(value, _CONTAINERS):
        return 1
    if id(value) in around:
        raise ValueError("it contains itself")
    total = 2
    inside: Any = [*value.keys(), *value.values()] if hasattr(value, "keys") else value
    for each in inside:
        total += 1 + _weight(each, most - total, {*around, id(value)})
        if total > most:
            break
    return total


def _encoded(value: Any) -> Any:
    if is_too_deep(value):
        return f"<data that is nested more than {MAX_DEPTH} deep was left out>"
    return base64.b64encode(value).decode("ascii") if isinstance(value, (bytes, bytearray)) else value


def _draw_plotly(figure: dict[str, Any]) -> dict[str, Any]:
    io = importlib.import_module("plotly.io")
    figure = {key: figure[key] for key in ("data", "layout", "frames") if key in figure}
    # The same figure must give the same bytes, because it would be shown twice after `chart.show()` and then `chart`.
    digest = hashlib.sha256(json.dumps(figure, sort_keys=True, default=str).encode()).hexdigest()[:32]
    page = io.to_html(figure, include_plotlyjs=True, full_html=True, validate=False, div_id=f"plot-{digest}")
    drawn: dict[str, Any] = {"text/html": page}
    if _state["has_picture"] and (picture := _draw_png(io, figure, digest)) is not None:
        drawn["image/png"] = picture
    else:
        drawn["text/plain"] = NO_PICTURE
    return drawn


def _draw_png(io: Any, figure: dict[str, Any], digest: str) -> Any:
    """Return the figure as PNG. The last one is kept, because drawing needs a browser and takes seconds."""
    if _state["pictured"] != digest:
        try:
            _state["picture"] = io.to_image(figure, format="png", validate=False)
        except Exception:
            _state["has_picture"] = False
            return None
        _state["pictured"] = digest
    return _state["picture"]


# Values that have text only. IPython asks each of its dozen formatters, which takes 0.1 ms; for values of builtin types
# the answer is known, unless the session has registered a formatter for such a type.
#
# What a cell runs of the following has no comprehensions, because Python before 3.12 makes a function for each run of
# one, which writes to pages that a fork then has to copy.

_BUILTIN_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
# Each with the types that it inherits from, because a formatter that is registered for `object` applies to all.
_INHERITED: "dict[type, list[tuple[type, tuple[str, str]]]]" = {
    kind: [(parent, (parent.__module__, parent.__name__)) for parent in kind.__mro__] for kind in _BUILTIN_TYPES
}


_SCALARS = (int, str, bytes)
_PRINT_REPR: Any = getattr(pretty, "_repr_pprint", _BUILTIN_TYPES)
"""IPython's printer of values that are shown as their `repr`; if IPython has none of this name, no printer at all."""
_PRINTERS = ("singleton_printers", "type_printers", "deferred_printers")
_values: "dict[int, dict[str, Any]]" = {}
"""For each formatter in `_gathered`, by its id, the dict in which it holds the values of its traits."""
_gathered: "list[Any]" = []
"""The formatters of IPython. They are held here, so that no other object can get the id of one of them."""


def gather_printers(display_formatter: Any) -> None:
    """Put the dicts that `is_text_alone` looks at side by side in memory. For a zygote, whose heap has no gaps.

    A look at an object writes to its page, and each page that a fork writes to is copied. Without this every cell that
    has a value touches 60 pages for the look: with `text_of` it saves 0.16 of 3.6 MB of a kept state.
    """
    others = (display_formatter.ipython_display_formatter, display_formatter.mimebundle_formatter)
    for formatter in (*display_formatter.formatters.values(), *others):
        if not _is_ipythons(formatter) or not hasattr(formatter, "_trait_values"):
            continue
        values: dict[str, Any] = {name: dict(getattr(formatter, name)) for name in _PRINTERS}
        formatter._trait_values = _values[id(formatter)] = {**formatter._trait_values, **values}
        _gathered.append(formatter)


def is_text_alone(value: object, display_formatter: Any) -> bool:
    """Return whether the shell's formatters would find text only; False where that is not certain."""
    inherited = _INHERITED.get(type(value))
    if inherited is None or not _is_ipythons(display_formatter) or "format" in vars(display_formatter):
        return False
    formatters = display_formatter.formatters
    for mime, formatter in formatters.items():
        if mime != "text/plain" and _may_apply(formatter, inherited):
            return False
    for formatter in (display_formatter.ipython_display_formatter, display_formatter.mimebundle_formatter):
        if _may_apply(formatter, inherited):
            return False
    return "text/plain" in formatters


def text_of(value: object, formatter: Any) -> Any:
    """Return the text of a value. That of a number or a string is its `repr`, unless the session has a printer for it.

    IPython would make a printer of nested groups for it, which touches 25 pages.
    """
    values = _values.get(id(formatter))
    if (
        values is not None
        and type(value) in _SCALARS
        and values["type_printers"].get(type(value)) is _PRINT_REPR
        and id(value) not in values["singleton_printers"]
    ):
        try:
            return repr(value)
        except ValueError:  # a number of too many digits, which IPython reports
            pass
    return formatter(value)


def _may_apply(formatter: Any, inherited: "list[tuple[type, tuple[str, str]]]") -> bool:
    values = _values.get(id(formatter))
    if values is None:
        if not _is_ipythons(formatter):
            return True
        values = {name: getattr(formatter, name) for name in _PRINTERS}
    singletons, printers, deferred = map(values.__getitem__, _PRINTERS)
    if singletons:
        return True
    for kind, name in inherited:  # noqa: SIM110 - see above
        if kind in printers or name in deferred:
            return True
    return False


def _is_ipythons(formatter: Any) -> bool:
    return type(formatter).__module__.startswith("IPython.")


# Figures of matplotlib: shown as pictures, also where code has chosen the backend Agg, which shows nothing by itself.
# Code that was written for scripts often chooses Agg, and then calls `pyplot.show` all the same.

_INLINE = "matplotlib_inline.backend_inline"
_CHOICES = ("use(", "switch_backend(", "MPLBACKEND")
_shown: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The figures that `_show` has shown."""


def prepare_figures() -> None:
    """Have figures shown as pictures, as importing pyplot does."""
    if _INLINE not in sys.modules:
        # A session's own file of that name may raise anything.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(_INLINE)


def may_choose_agg(code: str) -> bool:
    """Return whether code with the letters `gg` looks as if it chose Agg."""
    return ("matplotlib" in code or "plt" in code) and any(word in code for word in _CHOICES)


def show_with_agg() -> None:
    """Have `pyplot.show` show figures where the backend is Agg; called before code that may choose it."""
    prepare_figures()
    with contextlib.suppress(Exception, SystemExit):
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        # pyplot copies the `show` of a backend when code chooses it, so ours has to be there before.
        backend.show = _show


def _show(*_: Any, **__: Any) -> None:
    """Show the current figure, and those that were not shown yet. None is closed, because Agg closes none either."""
    display: Any = importlib.import_module("IPython.display").display
    figures: Any = importlib.import_module("matplotlib._pylab_helpers").Gcf
    for manager in figures.get_all_fig_managers():
        figure = manager.canvas.figure
        if manager is figures.get_active() or figure not in _shown:
            _shown.add(figure)
            display(figure)
