"""Personal data in a text, found by what the rules name. One pass: every finder looks at the text as it came."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from belljar.privacy import emails
from belljar.privacy.ids import find_ids
from belljar.privacy.rules import PrivacyRules
from belljar.privacy.spans import Span, disjoint, masked

BREAKERS = '\n\r\t\v\f\0,;:"<>\\'
"""None of these stands in anything that is looked for: a text may be cut behind them and lose nothing."""
LONGEST_CHARS = emails.LONGEST_CHARS + 16
"""Nothing that is looked for is longer."""

# Pieces between breakers; an escape sequence is one, or its last letter would hide the beginning of what follows it.
_PIECE = re.compile(rf"(?:[^{re.escape(BREAKERS)}\x1b]+)")
_ESCAPE = re.compile(r"\x1b\[[0-9;:?]{0,32}[ -/]?[@-~]")
_FEWEST_DIGITS = 5

Finder = Callable[[str], Iterable[Span]]


class Detector:
    """Finds what one set of rules names."""

    def __init__(self, rules: PrivacyRules) -> None:
        self._in_words: list[Finder] = [emails.find_emails] if "email" in rules.hide else []
        self._in_numbers = [*_number_finders(rules)]

    def __bool__(self) -> bool:
        return bool(self._in_words or self._in_numbers)

    def find(self, text: str) -> list[Span]:
        """What is personal in a text, in order, none overlapping another."""
        return disjoint(
            Span(start + span.start, start + span.end, span.kind)
            for start, piece in _pieces(text)
            for span in self._in_piece(piece)
        )

    def _in_piece(self, piece: str) -> Iterator[Span]:
        """Most text has neither an @ nor digits enough, and costs next to nothing."""
        words = [span for finder in self._in_words for span in finder(piece)] if "@" in piece else []
        yield from words
        if len(piece) < _FEWEST_DIGITS or sum(map(str.isdecimal, piece)) < _FEWEST_DIGITS:
            return
        # Digits of an address next to a number must not make it look like a longer, wrong one. The piece as it came is
        # read as well: of a number that runs into an address nothing may stay.
        for reading in (piece, masked(piece, words)) if words else (piece,):
            for finder in self._in_numbers:
                yield from finder(reading)


def _number_finders(rules: PrivacyRules) -> Iterator[Finder]:
    # The libraries behind these take 0.2 s to import: only servers with such rules pay.
    if "phone" in rules.hide:
        from belljar.privacy.phones import find_phones

        yield partial(find_phones, regions=rules.phone_regions)
    if "card" in rules.hide or "iban" in rules.hide:
        from belljar.privacy.cards import find_accounts, find_cards

        yield from (finder for form, finder in (("card", find_cards), ("iban", find_accounts)) if form in rules.hide)
    if rules.id_names:
        yield partial(find_ids, names=rules.id_names)


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for escape in _ESCAPE.finditer(text):
        yield from _between_breakers(text, start, escape.start())
        start = escape.end()
    yield from _between_breakers(text, start, len(text))


def _between_breakers(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    for piece in _PIECE.finditer(text, start, end):
        yield piece.start(), piece.group()
