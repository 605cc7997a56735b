"""What a column of a table holds, told from its texts: how many are missing or distinct, how they are spread, and which
fit what a person looks for.

The runner tells it of a session's tables; the server, which imports this too, of tables in files and in output.
"""

# ruff: noqa: B905 - Python 3.9 has no `strict`

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

BINS = 12
MOST_FREQUENT = 3
_START = datetime(1970, 1, 1)
_NOT_NUMBERS = ("nan", "NaN")


def summary_of(texts: "Sequence[str | None]", kind: str) -> "dict[str, Any]":
    """Return what a column holds; of numbers and times how they are spread, of others the most frequent."""
    present = [text for text in texts if text is not None and not (kind == "number" and text in _NOT_NUMBERS)]
    counts = Counter(present)
    summary: dict[str, Any] = {
        "count": len(texts),
        "missing": len(texts) - len(present),
        "distinct": len(counts),
        "least": "",
        "most": "",
        "bins": [],
        "frequent": [],
    }
    places = _places(present, kind)
    if places:
        pairs = [*zip(places, present)]
        summary["least"], summary["most"] = min(pairs)[1], max(pairs)[1]
        summary["bins"] = _bins(places)
    elif len(counts) < len(present):
        frequent = [pair for pair in counts.most_common(MOST_FREQUENT) if pair[1] > 1]
        summary["frequent"] = [{"text": text, "count": count} for text, count in frequent]
    return summary


def _places(texts: "list[str]", kind: str) -> "list[float]":
    """Return where numbers or times lie on a line; empty where one of them lies nowhere."""
    if kind not in ("number", "time"):
        return []
    with suppress(ValueError, OverflowError):
        if kind == "number":
            places = [float(text) for text in texts]
        else:
            places = [(datetime.fromisoformat(text[:19]) - _START).total_seconds() for text in texts]
        return places if all(map(math.isfinite, places)) else []
    return []


def _bins(places: "list[float]") -> "list[int]":
    """Return how many lie in each of some parts, of equal length, of the line between the first and the last."""
    least, most = min(places), max(places)
    length = most - least
    if not (0 < length < math.inf):
        return [len(places)]
    bins = [0] * BINS
    for place in places:
        bins[min(BINS - 1, int((place - least) / length * BINS))] += 1
    return bins


# Filters

_COMPARISON = re.compile(r"\s*(>=|<=|!=|=|>|<)\s*(.*)", re.DOTALL)
_COMPARE: "dict[str, Callable[[Any, Any], bool]]" = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def matcher(wanted: str, kind: str) -> "Callable[[str | None], bool]":
    """Return the test for a text that a person looks for: a part of it, or a comparison like `>= 10`.

    `=` alone stands for what is missing, `!=` alone for what is not.
    """
    comparison = _COMPARISON.fullmatch(wanted)
    if comparison is None:
        part = wanted.strip().casefold()
        return lambda text: text is not None and part in text.casefold()
    compare, operand = _COMPARE[comparison[1]], comparison[2].strip()
    if not operand:
        is_negated = comparison[1] == "!="
        return lambda text: (text is None or (kind == "number" and text in _NOT_NUMBERS)) != is_negated
    if kind == "number":
        with suppress(ValueError):
            number = float(operand.replace(",", ""))
            return lambda text: _number_fits(text, compare, number)
    operand = operand.replace(" ", "T", 1) if kind == "time" else operand
    return lambda text: text is not None and compare(text, operand)


def _number_fits(text: "str | None", compare: "Callable[[Any, Any], bool]", number: float) -> bool:
    if text is None:
        return False
    try:
        value = float(text)
    except ValueError:
        return False
    return value == value and compare(value, number)
