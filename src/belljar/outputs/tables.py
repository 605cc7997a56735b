"""Tables as people write them: numbers that line up, dates without empty hours, what is missing apart from the rest.

Reads the tables of text that pandas and polars show as HTML; whatever else there is in a page, such as styles of its
own or links, makes it a page and no table. All texts come from sessions, so that what is returned as HTML is escaped.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import takewhile
from typing import Any, Final

from belljar.inside.runner.columns import summary_of
from belljar.outputs.terminal_text import printable

MAX_CHARS: Final = 256 * 1024
MAX_COLUMNS: Final = 200
_MAX_SPAN: Final = 1_000
_MAX_TEXT: Final = 500
_TOKEN: Final = re.compile(r"<(?P<end>/?)(?P<tag>[a-z0-9]{1,10})(?P<rest>(?:\s[^<>]{0,200})?)>|(?P<text>[^<]+)")
_ATTRIBUTE: Final = re.compile(r'\s([a-z]+)(?:="([^"<>&]*)")?')
_TAGS: Final = frozenset({"div", "style", "small", "table", "thead", "tbody", "tr", "th", "td", "p", "br"})
_ATTRIBUTES: Final = frozenset(
    {"border", "class", "colspan", "halign", "rowspan", "scope", "scoped", "style", "valign"}
)
_ALIGNS: Final = re.compile(r"text-align: ?(?:left|right|center);?")
# Of styles that pandas and polars put before their tables, which only arrange.
_ARRANGES: Final = re.compile(r"[\s\w.:,>-]*(?:\{[\s\w:;-]*\}[\s\w.:,>-]*)*")
_COLOURS: Final = re.compile(r"color|background", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[-+−]?(\d{1,40})(\.\d{0,40})?(?:[eE][-+]?\d{1,4})?%?")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:[+-]\d\d:?\d\d|Z)?)?")
_MIDNIGHT: Final = re.compile(r"[ T]00:00(?::00(?:\.0+)?)?\Z")
_BOOLEANS: Final = frozenset({"True", "False", "true", "false"})
_MISSING: Final = frozenset({"NaN", "nan", "None", "NaT", "<NA>", "null", ""})
# Numbers that only name something are written as they are.
_NAMING: Final = re.compile(r"(?:\A|[\s_-])(?:id|key|code|zip|year|nr|no|number|order|phone|index)\Z", re.IGNORECASE)
_LARGE: Final = re.compile(r"[-+−]?\d{5,40}(?:\.\d*)?")
_SIGNIFICANT: Final = 6
_FILTERED_FROM: Final = 12
FILTER: Final = '<input type="search" data-filter aria-label="Filter the rows" placeholder="Filter these rows">'
_LEFT_OUT: Final = frozenset({"...", "…"})
_QUOTED: Final = re.compile(r'"(.*)"', re.DOTALL)


@dataclass(slots=True)
class HeadCell:
    """A cell of the head, or the label of a row."""

    text: str
    columns: int = 1
    rows: int = 1


@dataclass(slots=True)
class TableRow:
    """A row: its labels, and its texts."""

    labels: list[HeadCell] = field(default_factory=list[HeadCell])
    texts: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class ShownTable:
    """A table that a cell has shown, maybe of some rows only."""

    heads: list[list[HeadCell]]
    rows: list[TableRow]
    dtypes: list[str]
    """What polars says of its columns; empty for pandas."""
    note: str = ""

    @property
    def is_plain(self) -> bool:
        """Return whether each row stands for itself and none is left out, so that they can be sorted."""
        spans = any(label.rows > 1 for row in self.rows for label in row.labels)
        return len(self.heads) == 1 and not spans and len(self.shown_rows()) == len(self.rows)

    def shown_rows(self) -> list[TableRow]:
        """Return the rows, without the one that stands for those that are left out."""
        return [row for row in self.rows if not set(row.texts) <= _LEFT_OUT]

    def names(self) -> list[str]:
        """Return the names of the columns, as far as they are in one row of heads."""
        width = len(self.rows[0].texts) if self.rows else 0
        if not self.heads or not width:
            return [""] * width
        wide = [head.text for head in self.heads[0] for _ in range(min(head.columns, MAX_COLUMNS))]
        return [""] * (width - len(wide)) + wide[-width:]


def table_in(page: str) -> ShownTable | None:
    """Return the table that a page is; None for a page that is anything else."""
    if len(page) > MAX_CHARS or page.count("<table") != 1 or "dataframe" not in page:
        return None
    place, reader = 0, _TableReader()
    for token in _TOKEN.finditer(page):
        if token.start() != place or not reader.take(token):
            return None
        place = token.end()
    return reader.table() if place == len(page) else None


class _TableReader:
    """Takes the tags and texts of a page, one after another."""

    def __init__(self) -> None:
        self._heads: list[list[HeadCell]] = []
        self._dtypes: list[str] = []
        self._rows: list[TableRow] = []
        self._row: TableRow | None = None
        self._texts: list[str] | None = None
        self._notes: list[str] = []
        self._cell = HeadCell("")
        self._in = ""
        self._part = ""

    def take(self, token: re.Match[str]) -> bool:
        """Take the next one; return False for what no table has."""
        text = token["text"]
        if text is not None:
            return self._take_text(text)
        tag, attributes = token["tag"], _attributes(token["rest"])
        if tag not in _TAGS or attributes is None:
            return False
        if token["end"]:
            self._end(tag)
            return True
        if tag in ("thead", "tbody", "style", "p", "small"):
            self._part = tag
        elif tag == "tr":
            self._row = TableRow()
        elif tag in ("th", "td") and self._row is not None:
            self._in, self._texts = tag, []
            self._cell = HeadCell("", _span(attributes, "colspan"), _span(attributes, "rowspan"))
        elif tag == "br" and self._texts is not None:
            self._texts.append("\n")
        return True

    def _take_text(self, text: str) -> bool:
        if self._texts is not None:
            self._texts.append(unescape(text))
        elif self._part == "style":
            return not _COLOURS.search(text) and len(text) < 4_000 and bool(_ARRANGES.fullmatch(text))
        elif self._part in ("p", "small"):
            self._notes.append(unescape(text).strip())
        else:
            return not text.strip()
        return True

    def _end(self, tag: str) -> None:
        if tag in ("th", "td") and self._row is not None and self._texts is not None:
            self._cell.text = _quoted("".join(self._texts).strip())
            if self._in == "th":
                self._row.labels.append(self._cell)
            else:
                self._row.texts.append(self._cell.text)
            self._texts = None
        elif tag == "tr" and self._row is not None:
            if self._part == "thead" and self._row.labels:
                self._heads.append(self._row.labels)
            elif self._part == "thead":
                self._dtypes = self._row.texts
            else:
                self._rows.append(self._row)
            self._row = None
        elif tag in ("style", "p", "small", "thead", "tbody"):
            self._part = ""

    def table(self) -> ShownTable | None:
        """Return the table, if its rows have the same number of cells."""
        widths = {len(row.texts) for row in self._rows}
        if len(widths) != 1 or not 1 <= max(widths) <= MAX_COLUMNS or not self._heads:
            return None
        return ShownTable(_joined(self._heads), self._rows, self._dtypes, " ".join(self._notes)[:_MAX_TEXT])


def _joined(heads: list[list[HeadCell]]) -> list[list[HeadCell]]:
    """Return heads without the row in which pandas has only the names of the labels: they go before the others."""
    if len(heads) != 2 or len(heads[0]) < len(heads[1]) or any(cell.columns > 1 for row in heads for cell in row):
        return heads
    names = [cell.text for cell in heads[1]]
    labels = len([*takewhile(bool, names)])
    if any(names[labels:]):
        return heads
    first = [HeadCell(" / ".join(filter(None, pair))) for pair in zip(names[:labels], _texts(heads[0]), strict=False)]
    return [[*first, *heads[0][labels:]]]


def _texts(cells: list[HeadCell]) -> list[str]:
    return [cell.text for cell in cells]


def _attributes(rest: str) -> dict[str, str] | None:
    """Return the attributes of a tag; None where one says more than how a table is arranged."""
    found: dict[str, str] = {}
    place = 0
    for one in _ATTRIBUTE.finditer(rest):
        if one.start() != place or one[1] not in _ATTRIBUTES:
            return None
        if one[1] == "style" and not _ALIGNS.fullmatch((one[2] or "").strip()):
            return None
        found[one[1]] = one[2] or ""
        place = one.end()
    return found if not rest[place:].strip() else None


def _span(attributes: dict[str, str], name: str) -> int:
    text = attributes.get(name, "1")
    return min(_MAX_SPAN, max(1, int(text))) if text.isascii() and text.isdecimal() and len(text) < 6 else 1


def _quoted(text: str) -> str:
    """Return a text of polars without the quotation marks around it."""
    quoted = _QUOTED.fullmatch(text)
    return quoted[1] if quoted else text


# What a column holds, and how it is written


def is_missing(text: str | None) -> bool:
    """Return whether a text stands for a value that is missing."""
    return text is None or text in _MISSING


def kind_of(texts: Iterable[str | None]) -> str:
    """Return number, time, boolean or text: what all texts of a column are that are not missing."""
    present = [text for text in texts if not is_missing(text) and text not in _LEFT_OUT]
    if not present:
        return "text"
    if all(map(_NUMBER.fullmatch, map(str, present))):
        return "number"
    if all(map(_TIME.fullmatch, map(str, present))):
        return "time"
    return "boolean" if all(text in _BOOLEANS for text in present) else "text"


def has_large(columns: Iterable[Sequence[str | None]]) -> bool:
    """Return whether numbers of a table are so large that they are written with commas, which all of it then has."""
    return any(_LARGE.fullmatch(text) for texts in columns for text in texts if text)


def written(
    texts: Sequence[str | None], kind: str, name: str = "", *, has_commas: bool | None = None
) -> list[str | None]:
    """Return the texts of a column as people write them; None for what is missing."""
    present = [None if is_missing(text) else text for text in texts]
    if kind == "number":
        has_commas = has_large([present]) if has_commas is None else has_commas
        return _numbers(present, has_commas=has_commas and not _NAMING.search(name))
    if kind == "time":
        times = [text.replace("T", " ") if text is not None else None for text in present]
        if all(text is None or _MIDNIGHT.search(text) or len(text) <= len("2026-01-01") for text in times):
            return [text and _MIDNIGHT.sub("", text) for text in times]
        return times
    return present


def _numbers(texts: list[str | None], *, has_commas: bool) -> list[str | None]:
    """Return numbers with the same number of decimals: those that they have, or six significant digits."""
    found = [_NUMBER.fullmatch(text) if text is not None else None for text in texts]
    plain = [one for one in found if one and "e" not in one[0].lower() and "%" not in one[0]]
    decimals = max((len(one[2] or "") - 1 for one in plain), default=0)
    if all(one[2] in (None, ".0") for one in plain):
        decimals = 0  # whole numbers, which are floats only because some are missing
    if decimals >= _SIGNIFICANT:
        decimals = max(1, _SIGNIFICANT - max((len(one[1].lstrip("0")) for one in plain), default=0))
    return [
        _number(text, one, max(0, decimals), has_commas=has_commas)
        if text is not None and one and one in plain
        else text
        for text, one in zip(texts, found, strict=True)
    ]


def _number(text: str, found: re.Match[str] | None, decimals: int, *, has_commas: bool) -> str:
    """Return a number with as many decimals as its column has; one that they would make nothing of as it is."""
    if found is None:
        return text
    if not found[2] and not decimals:
        return f"{int(text):,}" if has_commas and text.isascii() else text
    value = float(text.replace("−", "-"))  # polars and locales may write the sign of minus
    if value and abs(value) < 0.5 * 10**-decimals:
        return f"{value:.3g}"
    return f"{value:,.{decimals}f}" if has_commas else f"{value:.{decimals}f}"


# As HTML


def table_html(table: ShownTable, *, can_sort: bool = False) -> str:
    """Return a table as HTML, with what its columns hold below it; where scripts of ours sort it, with buttons."""
    rows, columns = table_parts(table, can_sort=can_sort)
    foot = f"<p>{_text(table.note.replace(' x ', ' × '))}</p>" if table.note else ""
    if can_sort and table.is_plain and len(table.rows) >= _FILTERED_FROM:
        foot += FILTER
    if columns and len(table.rows) > 1:
        rest = "" if len(table.shown_rows()) == len(table.rows) else ", in the rows that are shown"
        foot += f"<details><summary>What the columns hold{rest}</summary>{columns}</details>"
    return f'{rows}<div class="table-foot">{foot}</div>'


def table_parts(table: ShownTable, *, can_sort: bool = False, most_rows: int | None = None) -> tuple[str, str]:
    """Return the rows of a table, or the first ones, and what its columns hold, both as HTML."""
    names = table.names()
    columns = [[row.texts[place] for row in table.rows] for place in range(len(table.rows[0].texts))]
    kinds = [kind_of(texts) for texts in columns]
    has_commas = has_large(columns)
    shown = [
        written(texts[:most_rows], kind, name, has_commas=has_commas)
        for texts, kind, name in zip(columns, kinds, names, strict=True)
    ]
    can_sort = can_sort and table.is_plain and len(table.rows) > 1
    first = sum(head.columns for head in table.heads[-1]) - len(kinds)
    heads = [_head_html(row, kinds, first, can_sort=can_sort and row is table.heads[-1]) for row in table.heads]
    if table.dtypes:
        heads.append("".join(f'<td class="dtype">{_text(dtype)}</td>' for dtype in table.dtypes[: len(kinds)]))
    rows = [
        "".join(_label_html(label) for label in row.labels)
        + "".join(_cell_html(texts[place], row.texts[column], kinds[column]) for column, texts in enumerate(shown))
        for place, row in enumerate(table.rows[:most_rows])
    ]
    head = "".join(f"<tr>{row}</tr>" for row in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Table"><table class="data">'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>",
        _columns_html(names, table.shown_rows(), kinds) if any(names) else "",
    )


def _head_html(row: list[HeadCell], kinds: list[str], first: int, *, can_sort: bool) -> str:
    parts: list[str] = []
    column = -first
    for head in row:
        kind = kinds[column] if 0 <= column < len(kinds) and head.columns == 1 else ""
        text = _text(head.text)
        if can_sort and column >= 0:
            text = f'<button type="button" data-sort="{column}">{text or "(no name)"}</button>'
        span = f' colspan="{head.columns}"' if head.columns > 1 else ""
        parts.append(f'<th scope="col" class="{_class(kind)}"{span}>{text}</th>' if text else f"<td{span}></td>")
        column += head.columns
    return "".join(parts)


def _label_html(label: HeadCell) -> str:
    span = f' rowspan="{label.rows}"' if label.rows > 1 else ""
    time = written([label.text], kind_of([label.text]), "index")[0] if _TIME.fullmatch(label.text) else label.text
    return f'<th scope="row"{span}>{_text(time or "")}</th>'


def _cell_html(shown: str | None, text: str, kind: str) -> str:
    if shown is None:
        return f'<td class="none {_class(kind)}">{_text(text or "–")}</td>'
    return f'<td class="{_class(kind)}">{_text(shown)}</td>'


def _class(kind: str) -> str:
    return {"number": "num", "time": "time"}.get(kind, "text")


def _text(text: str) -> str:
    return escape(printable(text[:_MAX_TEXT]))


# The bar that tells what the columns hold

_BAR_WIDTH, _BAR_HEIGHT = 120, 28
_MAX_FREQUENT: Final = 40


def _columns_html(names: list[str], rows: list[TableRow], kinds: list[str]) -> str:
    told: list[str] = []
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if name not in _LEFT_OUT:
            texts = [None if is_missing(row.texts[place]) else row.texts[place] for row in rows]
            told.append(column_html(name, kind, summary_of(texts, kind)))
    return f'<ul class="columns">{"".join(told)}</ul>'


def column_html(name: str, kind: str, summary: Mapping[str, Any], dtype: str = "") -> str:
    """Return what one column holds: its type, a picture of how it is spread, distinct and missing values."""
    count, missing, distinct = summary["count"], summary["missing"], summary["distinct"]
    values = f"all {count:,} distinct" if distinct == count else f"{distinct:,} distinct"
    values += f', <b class="gaps">{missing:,} missing</b>' if missing else ""
    spread = bars_html(summary["bins"], name) if len(summary["bins"]) > 1 else ""
    if summary["least"] or summary["most"]:
        ends = dict.fromkeys(written([summary["least"], summary["most"]], kind, name))
        told = " to ".join(f"<span>{_text(end or '')}</span>" for end in ends)
        spread += f'<span class="ends">{told}</span>'
    return (
        f'<li><b class="name">{_text(name) or "(no name)"}</b> <span class="dim">{_text(dtype or kind)}</span>'
        f'{spread}{_frequent_html(summary["frequent"], count)}<span class="told">{values}</span></li>'
    )


def bars_html(bins: list[int], name: str) -> str:
    """Return how values are spread, as a small picture."""
    most, width = max(bins), _BAR_WIDTH / len(bins)
    bars = "".join(
        f'<rect x="{place * width:.1f}" y="{_BAR_HEIGHT - height:.1f}" width="{width - 1:.1f}" height="{height:.1f}"/>'
        for place, count in enumerate(bins)
        if (height := max(1.0, count / most * _BAR_HEIGHT) if count else 0)
    )
    return (
        f'<svg class="bars" viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}" '
        f'role="img" aria-label="How {_text(name)} is spread">{bars}</svg>'
    )


def _frequent_html(frequent: Sequence[Mapping[str, Any]], count: int) -> str:
    parts: list[str] = []
    for one in frequent:
        share = one["count"] / max(1, count)
        parts.append(
            f"<li><span>{_text(one['text'][:_MAX_FREQUENT]) or '(empty)'}</span> {share:.0%}"
            f'<svg class="bars" viewBox="0 0 {_BAR_WIDTH} 4" width="{_BAR_WIDTH}" height="4" aria-hidden="true">'
            f'<rect width="{max(1.0, share * _BAR_WIDTH):.1f}" height="4"/></svg></li>'
        )
    return f'<ul class="frequent">{"".join(parts)}</ul>' if parts else ""
