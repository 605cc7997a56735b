"""Samples to figures, figures to a table. Knows nothing of what is measured."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: the peer's value, ours, and the most that `bound` may be: ours / peer, or ours alone.

    With the bound "gain" the target is the least that peer / ours may be, with "least" the least that ours may be.
    """

    measurement: str
    what: str
    unit: str
    ours: float
    peer: float | None = None
    target: float | None = None
    bound: Literal["ratio", "value", "least", "gain"] = "ratio"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours / peer."""
        return self.ours / self.peer if self.peer else None

    @property
    def gain(self) -> float | None:
        """Peer / ours."""
        return self.peer / self.ours if self.peer and self.ours else None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.bound == "gain":
            return None if self.target is None or self.gain is None else round(self.gain, 1) >= self.target
        if self.bound == "least":
            return None if self.target is None else round(self.ours, 1) >= self.target
        measured = self.ratio if self.bound == "ratio" else self.ours
        if self.target is None or measured is None:
            return None
        # As precise as it is printed: 0.3004 is 0.30.
        return round(measured, 2) <= self.target


@dataclass(frozen=True, slots=True)
class Round:
    """Samples of both sides, taken one after the other."""

    peer: list[float] = field(default_factory=list[float])
    ours: list[float] = field(default_factory=list[float])


def quietest(rounds: Sequence[Round]) -> Round:
    """The round in which both sides together were fastest: other work on the machine disturbs it least."""
    return min(rounds, key=lambda one: statistics.median(one.peer) + statistics.median(one.ours))


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample that `percent` of the samples are not above."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def paired(
    measurement: str,
    what: str,
    rounds: Sequence[Round],
    *,
    target: float | None = None,
    note: str = "",
    with_p99: bool = False,
    tail: float | None = None,
) -> list[Figure]:
    """Latencies given in seconds as figures in milliseconds, from the quietest round; the p99 is of all rounds."""
    best = quietest(rounds)
    peer, ours = statistics.median(best.peer) * 1000, statistics.median(best.ours) * 1000
    found = [Figure(measurement, f"{what}, p50", "ms", ours, peer, target, note=note)]
    if with_p99:
        # A round has too few samples for one in a hundred to mean anything.
        all_peer, all_ours = (
            [one for each in rounds for one in each.peer],
            [one for each in rounds for one in each.ours],
        )
        own = percentile(all_ours, 99) * 1000
        found.append(Figure(measurement, f"{what}, p99", "ms", own, percentile(all_peer, 99) * 1000))
        if tail is not None:
            middle = statistics.median(all_ours) * 1000
            # The peer's own tail says how much of ours is the machine's and the transport's.
            theirs = percentile(all_peer, 99) / statistics.median(all_peer)
            note = f"both ours; the peer's own is {theirs:.1f}×"
            found.append(Figure(measurement, f"{what}, p99 against p50", "ms", own, middle, tail, note=note))
    return found


def table(figures: Sequence[Figure]) -> str:
    """All figures, aligned, as a Markdown table."""
    heads = ["measurement", "what", "peer", "ours", "ratio", "target", "", "note"]
    rows = [heads, *map(_cells, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def as_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """All figures with what follows from them."""
    return [{**asdict(figure), "ratio": figure.ratio, "is_met": figure.is_met} for figure in figures]


def _cells(figure: Figure) -> list[str]:
    mark = {True: "ok", False: "MISS", None: ""}[figure.is_met]
    target = ""
    if figure.target is not None:
        target = {
            "ratio": f"≤ {figure.target:g}×",
            "value": f"≤ {figure.target:g} {figure.unit}",
            "least": f"≥ {figure.target:g} {figure.unit}",
            "gain": f"≥ {figure.target:g}× less",
        }[figure.bound]
    return [
        figure.measurement,
        figure.what,
        _value(figure.peer, figure.unit),
        _value(figure.ours, figure.unit),
        _comparison(figure),
        target,
        mark,
        figure.note,
    ]


def _comparison(figure: Figure) -> str:
    if figure.bound == "gain":
        return "" if figure.gain is None else f"{figure.gain:.1f}× less"
    return "" if figure.ratio is None or figure.bound in ("value", "least") else f"{figure.ratio:.2f}×"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 0 if unit in ("bytes", "lines") or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"
