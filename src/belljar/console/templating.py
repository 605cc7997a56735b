"""Templates and static files of the console. Jinja is imported with the first page, not when the server starts.

Everything that a template prints is escaped, and characters that would control rather than show something are made
visible first, so that no text of a session can act on our pages. The only markup that is not escaped is made by
functions of this package out of escaped text (`Markup` in `cells.py`).
"""

import gzip
import hashlib
import importlib
import re
import time
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

from belljar.outputs.export_formats import EXPORT_FORMATS
from belljar.outputs.html import CODE, TOKENS
from belljar.outputs.terminal_text import printable
from belljar.products import products

_FOLDER: Final = Path(__file__).parent
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_SHARED: Final = "shared.css"
_LEAST_POINTS: Final = 8
_GAUGE_WORDS: Final = {
    "sessions_running": "Sessions running or waiting",
    "sessions_fresh": "Sessions not used yet",
    "sessions_limit": "Sessions, at most",
    "cpus": "Processors",
}
_MEDIA: Final = frozenset({"image", "audio", "video", "font"})
_FILE_TYPES: Final = {
    "text/csv": "table (CSV)",
    "text/tab-separated-values": "table (TSV)",
    "text/html": "web page",
    "text/markdown": "Markdown",
    "text/x-python": "Python code",
    "application/json": "JSON",
    "application/pdf": "PDF",
    "application/zip": "archive",
    "application/gzip": "archive",
    "application/x-tar": "archive",
    "application/x-ipynb+json": "notebook",
    "application/vnd.apache.parquet": "table (Parquet)",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "Excel workbook",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "Word document",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "PowerPoint slides",
}
_CHECK_WORDS: Final = {
    "environment": "Python environment",
    "journal": "records on disk",
    "zygote": "quick start of sessions",
}
# Characters that nobody sees and that make two names look alike, or turn the order of what is around them. Not the
# joiners, which some scripts cannot be written without.
_INVISIBLE: Final = re.compile(
    "[\u00ad\u061c\u180e\u200b\u200e\u200f\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_RUN: Final = re.compile("(workflow .+), (run [0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file that browsers may keep for a year, because its name changes with its content."""

    content: bytes
    compressed: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Return the static files by their names. All share the digest in their folder's name, so modules find others."""
    found = {path.name: path.read_bytes() for path in sorted((_FOLDER / "static").iterdir()) if path.suffix in _TYPES}
    found[_SHARED] = (TOKENS + CODE).encode()
    return {
        name: StaticFile(content, gzip.compress(content, 6, mtime=0), _TYPES[Path(name).suffix])
        for name, content in found.items()
    }


@cache
def static_version() -> str:
    """Return a digest of all static files."""
    digest = hashlib.sha256()
    for name, file in sorted(static_files().items()):
        digest.update(name.encode() + b"\0" + file.content + b"\0")
    return digest.hexdigest()[:16]


def static_url(name: str) -> str:
    """Return where browsers find a static file."""
    if name not in static_files():
        raise KeyError(f"there is no static file {name!r}")
    return f"/console/static/{static_version()}/{name}"


@cache
def _environment() -> Any:
    jinja2 = importlib.import_module("jinja2")
    markup = importlib.import_module("markupsafe").Markup

    def shown(value: object) -> object:
        """Return a value as it is printed: markup of ours as it is, every other text with visible controls."""
        if not isinstance(value, str) or isinstance(value, markup):
            return value
        return visible(value)

    folders = [_FOLDER / "templates", *(one.templates for one in products() if one.templates is not None)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals["static"] = static_url
    environment.globals |= {
        "navigation": _navigation(),
        "ago": ago,
        "until": until,
        "titled": titled,
        "spark": spark,
        "curve": curve,
        "chart": chart,
        "export_formats": EXPORT_FORMATS,
    }
    environment.filters["bytes"] = size_text
    environment.filters["duration"] = duration_text
    environment.filters["breaking"] = breaking
    environment.filters["file_type"] = file_type
    environment.filters["short"] = short
    environment.filters["gauge"] = gauge_words
    environment.filters["check"] = check_words
    return environment


def _navigation() -> list[tuple[str, str]]:
    """Return the places that every page leads to, those of products after the inbox."""
    others = [place for product in products() for place in product.navigation.items()]
    first, last = [("/console", "Sessions"), ("/console/inbox", "Inbox")], [("/console/decisions", "Decisions")]
    return [*first, *others, *last, ("/console/health", "Health")]


def render(template: str, **values: Any) -> str:
    """Return a page or a part of one."""
    return str(_environment().get_template(template).render(**values))


def markup(escaped: str) -> Any:
    """Return text that is HTML of ours already; whoever calls this has escaped what came from a session."""
    return importlib.import_module("markupsafe").Markup(escaped)


def visible(text: str) -> str:
    """Return text with what would control, and what nobody sees, made visible."""
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", printable(text))


def short(identifier: str) -> str:
    """Return the beginning of an id, as people say it."""
    return identifier[:8]


def titled(name: str) -> tuple[str, str]:
    """Return what a session is called and, apart, the run of a workflow that it was made for, if any."""
    found = _RUN.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def size_text(size: float) -> str:
    """Return a number of bytes as people read it."""
    if size == 1:
        return "1 byte"
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return ""


def breaking(name: str) -> Any:
    """Return a name that is broken, where it has to be, behind a hyphen or an underscore."""
    return markup(re.sub("(?<=[-_])(?=[^-_])", "<wbr>", escape(visible(name))))


def file_type(mime: str) -> str:
    """Return a media type in plain words."""
    kind, _, rest = mime.partition("/")
    return _FILE_TYPES.get(mime) or ("text" if kind == "text" else kind if kind in _MEDIA else rest and "file")


def gauge_words(name: str) -> str:
    """Return the name of a gauge or a limit as people read it, with its unit."""
    if name in _GAUGE_WORDS:
        return _GAUGE_WORDS[name]
    for ending, unit in (("_mb", ", MB"), ("_s", ", seconds")):
        if name.endswith(ending):
            name = name.removesuffix(ending) + unit
    return name.replace("_", " ").capitalize().replace(", mb", ", MB")


def check_words(name: str) -> str:
    """Return the name of a check of health as people read it."""
    return _CHECK_WORDS.get(name, name)


def duration_text(seconds: float) -> str:
    """Return a duration as people read it."""
    if seconds < 0.001:
        return "under 1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def _age_s(time_iso: str) -> float:
    return time.time() - datetime.fromisoformat(time_iso).timestamp()


def ago(time_iso: str) -> str:
    """Return how long ago a time was, in words."""
    age_s = _age_s(time_iso)
    return "just now" if age_s < 5 else f"{_rough(age_s)} ago"


def until(time_iso: str) -> str:
    """Return how long until a time, in words."""
    left_s = -_age_s(time_iso)
    return f"in {_rough(left_s)}" if left_s > 0 else "now"


def _rough(seconds: float) -> str:
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{int(seconds)} s"


def spark(name: str, values: list[float], most: float = 0.001) -> Any:
    """Return a small picture of how a value went, which reaches up to `most` at least; nothing of a single value."""
    if len(values) < 2:
        return ""
    width, height, most = 72, 16, max(*values, most)
    step = width / (len(values) - 1)
    points = " ".join(
        f"{place * step:.1f},{height - 1 - value / most * (height - 2):.1f}" for place, value in enumerate(values)
    )
    return markup(
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(name)} over the last minutes"><polyline points="{points}"/></svg>'
    )


def curve(name: str, value: str, history: list[float], most: float = 0.001) -> Any:
    """Return a small curve with its name and its present value."""
    return markup(f'<span class="curve">{escape(name)} {spark(name, history, most)} <b>{escape(value)}</b></span>')


def chart(name: str, unit: str, values: list[float], interval_s: float, limit: float | None = None) -> Any:
    """Return a chart of how a value went, with its axes named, its present value and what it must not reach."""
    limited = f"of {_round(limit)} " if limit is not None else ""
    caption = (
        f"<figcaption><span>{escape(name)}</span> <b>{escape(_round(values[-1] if values else 0.0))}</b> "
        f'<span class="dim">{escape(limited + unit)}</span></figcaption>'
    )
    if len(values) < _LEAST_POINTS:
        # A line through a few points shows a rise or a fall where there is none.
        text = f"Collecting: one point every {interval_s:g} s."
        return markup(f'<figure class="chart">{caption}<p class="hint">{escape(text)}</p></figure>')
    width, height, left, bottom = 260, 100, 44, 18
    now, most, span = values[-1], max(values), _span_text(len(values) * interval_s)
    # A limit far above all values would make them a flat line; it is told in words beside the name then.
    is_near = limit is not None and limit > 0 and most >= limit / 4
    top = (limit * 1.05 if limit is not None and is_near and limit > most else most) or 1.0
    plot_width, plot_height = width - left - 4, height - bottom - 8
    step = plot_width / (len(values) - 1)
    places = [
        f"{left + place * step:.1f},{8 + plot_height * (1 - value / top):.1f}" for place, value in enumerate(values)
    ]
    floor = 8 + plot_height
    line = " ".join(places)
    edge = 8 + plot_height * (1 - limit / top) if limit is not None and is_near else 0
    parts = [
        f'<line class="axis-line" x1="{left}" y1="{floor}" x2="{width}" y2="{floor}"/>',
        f'<text x="{left - 6}" y="14" text-anchor="end">{escape(_round(top))}</text>',
        f'<text x="{left - 6}" y="{floor}" text-anchor="end">0</text>',
        f'<text x="{left}" y="{height - 3}">{escape(span)} ago</text>',
        f'<text x="{width - 2}" y="{height - 3}" text-anchor="end">now</text>',
        f'<line class="limit-line" x1="{left}" y1="{edge:.1f}" x2="{width}" y2="{edge:.1f}"/>' if is_near else "",
        f'<polyline points="{line}"/>',
    ]
    said = f"{name}: {_round(now)} {limited}{unit} now, at most {_round(most)} in the last {span}"
    return markup(
        f'<figure class="chart">{caption}'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(said)}">{"".join(parts)}</svg></figure>'
    )


def _span_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
