"""Spans of a text, and how overlapping ones are merged. Knows nothing of what was found there."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` of a text are of this kind."""

    start: int
    end: int
    kind: str


MASK = "\n"
"""Stands in place of masked text: nothing is found in it or across it."""


def masked(text: str, spans: Iterable[Span]) -> str:
    """Return the text with these spans masked, and everything else where it was."""
    parts: list[str] = []
    place = 0
    for span in sorted(spans, key=lambda each: each.start):
        parts += (text[place : span.start], MASK * (span.end - max(span.start, place)))
        place = max(place, span.end)
    return "".join((*parts, text[place:]))


def disjoint(found: Iterable[Span]) -> list[Span]:
    """Return the spans in order, with those that overlap merged into one, of the longest one's kind.

    Dropping the shorter of two would leave the part of it that the longer one does not cover unredacted.
    """
    merged: list[Span] = []
    longest = 0
    for span in sorted(found, key=lambda each: (each.start, -each.end)):
        length = span.end - span.start
        if not merged or span.start >= merged[-1].end:
            merged.append(span)
            longest = length
            continue
        last = merged[-1]
        kind = span.kind if length > longest else last.kind
        longest = max(longest, length)
        merged[-1] = Span(last.start, max(last.end, span.end), kind)
    return merged


def is_fraction(text: str, start: int) -> bool:
    """Return whether the digits from `start` on follow a decimal point."""
    return start >= 2 and text[start - 1] == "." and text[start - 2].isdecimal()
