"""Finders of phone numbers, cards, bank accounts and e-mail addresses; the `Detector` runs those that the rules name.

There is one pass: every finder searches the text as it came. National ids are in `national_ids.py`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from belljar.privacy.national_ids import find_ids
from belljar.privacy.rules import PrivacyRules
from belljar.privacy.spans import Span, disjoint, masked

# E-mail addresses: found at their @, so that no text makes the search slow

EMAIL = "email"
LONGEST_EMAIL_CHARS = 320
"""64 characters before the @ and 255 after it, as RFC 5321 has it."""

_LOCAL_CHARS = 64
# Letters of any script, what RFC 5322 calls atext, and dots.
_LOCAL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]+\Z")
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,10}(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,63})", re.IGNORECASE)
# Quotes and the like around an address are not part of it, though the grammar would allow them.
_AROUND = "'`*{|=/."


def find_emails(text: str) -> Iterator[Span]:
    """Yield every address with a domain name."""
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        local = _LOCAL.search(text[max(0, at - _LOCAL_CHARS) : at])
        name = local.group().lstrip(_AROUND) if local else ""
        if domain and name:
            yield Span(at - len(name), domain.end(), EMAIL)
        at = text.find("@", at + 1)


BREAKERS = '\n\r\t\v\f\0,;:"<>\\'
"""None of these stands in anything that is looked for, so a text may be cut behind them and lose nothing."""
LONGEST_CHARS = LONGEST_EMAIL_CHARS + 16
"""Nothing that is looked for is longer."""

# Pieces between breakers. An escape sequence separates pieces too, or its last letter would hide the beginning of
# what follows it.
_PIECE = re.compile(rf"(?:[^{re.escape(BREAKERS)}\x1b]+)")
_ESCAPE = re.compile(r"\x1b\[[0-9;:?]{0,32}[ -/]?[@-~]")
_FEWEST_DIGITS = 5

Finder = Callable[[str], Iterable[Span]]


class Detector:
    """The finders that one set of rules names."""

    def __init__(self, rules: PrivacyRules) -> None:
        self._email_finders: list[Finder] = [find_emails] if "email" in rules.hide else []
        self._number_finders = [*_number_finders(rules)]

    def __bool__(self) -> bool:
        return bool(self._email_finders or self._number_finders)

    def find(self, text: str) -> list[Span]:
        """Return what is personal in a text, in order, none overlapping another."""
        return disjoint(
            Span(start + span.start, start + span.end, span.kind)
            for start, piece in _pieces(text)
            for span in self._in_piece(piece)
        )

    def _in_piece(self, piece: str) -> Iterator[Span]:
        """Yield what is personal in a piece. Most have neither an @ nor enough digits, and cost next to nothing."""
        emails = [span for finder in self._email_finders for span in finder(piece)] if "@" in piece else []
        yield from emails
        if len(piece) < _FEWEST_DIGITS or sum(map(str.isdecimal, piece)) < _FEWEST_DIGITS:
            return
        # Addresses are masked, because their digits next to a number must not make it look like a longer, invalid one.
        # The piece as it came is searched as well, because of a number that runs into an address nothing may stay.
        for reading in (piece, masked(piece, emails)) if emails else (piece,):
            for finder in self._number_finders:
                yield from finder(reading)


def _number_finders(rules: PrivacyRules) -> Iterator[Finder]:
    # The libraries behind these take 0.2 s to import, so only servers with such rules load them.
    if "phone" in rules.hide:
        from belljar.privacy.number_detectors import find_phones

        yield partial(find_phones, regions=rules.phone_regions)
    if "card" in rules.hide or "iban" in rules.hide:
        from belljar.privacy.number_detectors import find_accounts, find_cards

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
