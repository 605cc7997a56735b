"""Finders of e-mail addresses, telephone numbers, cards, bank accounts and national ids.

The `Detector` runs those that the rules name. Every finder searches the text as it came, those of numbers with the
e-mail addresses masked. What national ids look like is in `rules.py`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Protocol, cast

from belljar.privacy.rules import SHAPES, PrivacyRules

# Spans of a text, and how overlapping ones are merged


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


# E-mail addresses: found at their @, so that no text makes the search slow

EMAIL = "email"
LONGEST_EMAIL_CHARS = 320
"""64 characters before the @ and 255 after it, as RFC 5321 has it."""

_LOCAL_CHARS = 64
# Letters of any script, what RFC 5322 calls atext, and dots.
_LOCAL = re.compile(r"(?<![\w.!#$%&'*+/=?^`{|}~-])[\w.!#$%&'*+/=?^`{|}~-]++\Z")
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


# Telephone numbers, as the phonenumbers library knows them

PHONE = "phone"
_EXTENSION_CHARS = 24

_PLUS = re.compile(r"[+＋]")
# From a plus on, as long as it can be one number. The library's matcher alone is not enough: it takes digits that
# follow a number for part of it, and skips a number that touches a letter.
_BEHIND_PLUS = re.compile(r"[+＋][ (\[]{0,2}\d+(?:[ ()\[\]/.~\-\u00a0\u2009\u202f\u2010-\u2015]{1,3}\d+){0,9}")
_GROUP = re.compile(r"\d+")
_DIGITS = re.compile(r"\d")
_DECIMAL = re.compile(r"(?<![\d.+(])(?:0|[1-9]\d*)\.\d+(?![\d.])")
_FEWEST_IN_PHONE, _MAX_IN_PHONE = 6, 15
_ENOUGH_DIGITS = re.compile(rf"(?:\D*+\d){{{_FEWEST_IN_PHONE}}}")
"""Matches where there are as many; unlike a count of them, it takes no longer for four million digits."""


class PhoneFinder:
    """Finds every valid number: with a plus of any country, without one of the countries in `regions`."""

    def __init__(self, regions: Sequence[str]) -> None:
        import phonenumbers

        self._library = phonenumbers
        self._regions = regions

    def find(self, text: str) -> Iterator[Span]:
        """Yield the numbers in a text."""
        yield from self._international(text)
        if not self._regions:
            return
        # Decimal numbers are masked, because tables of them take the matcher longest, 80 µs a number.
        without = _DECIMAL.sub(lambda decimal: MASK * len(decimal.group()), text)
        if _ENOUGH_DIGITS.match(without):
            for region in self._regions:
                for match in self._library.PhoneNumberMatcher(without, region):
                    yield Span(match.start, match.end, PHONE)

    def _international(self, text: str) -> Iterator[Span]:
        for plus in _PLUS.finditer(text):
            run = _BEHIND_PLUS.match(text, plus.start())
            if run is None or not _ENOUGH_DIGITS.match(run.group()):
                continue
            ends = [group.end() for group in _GROUP.finditer(text, run.start(), run.end())]
            end = next((end for end in reversed(ends) if self._is_number(text[run.start() : end])), None)
            if end is not None:
                yield Span(run.start(), end, PHONE)
            for match in self._library.PhoneNumberMatcher(text[run.start() : run.end() + _EXTENSION_CHARS], None):
                # The library's matcher also finds extensions.
                yield Span(run.start() + match.start, run.start() + match.end, PHONE)

    def _is_number(self, text: str) -> bool:
        """Return whether this is a number that could be called; for digits in one piece, a possible one is enough."""
        if not _FEWEST_IN_PHONE <= len(_DIGITS.findall(text)) <= _MAX_IN_PHONE:
            return False
        try:
            number = self._library.parse(text, None)
        except self._library.NumberParseException:
            return False
        is_compact = len(_GROUP.findall(text)) == 1
        return self._library.is_valid_number(number) or (is_compact and self._library.is_possible_number(number))


# Payment cards and bank accounts: groups of digits or letters whose check digits are right

CARD, IBAN = "card", "iban"

_GAP = r"[ \-.\u00a0\u2009\u202f\u2010\u2011]{1,2}"
# In one piece, in fours, or in 4-6-4 and 4-6-5. Matched by lookahead, because the first four digits of one number may
# be the last of another. What follows the fours may be a fifth group, or no part of the number.
_CARD = (
    rf"(?<!\d)(?=(\d{{12,19}}|\d{{4}}(?:{_GAP}\d{{4}}){{2}}{_GAP}\d{{1,4}}|\d{{4}}{_GAP}\d{{6}}{_GAP}\d{{4,5}})(?!\d))"
    rf"(?=(\d{{4}}(?:{_GAP}\d{{4}}){{3}}{_GAP}\d{{1,3}}(?!\d))?)"
)
# First digits and lengths of the networks, because the check digit alone would let one number in ten through.
_NETWORKS = (
    (r"4", (13, 16, 19)),  # Visa
    (r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720", (16,)),  # Mastercard
    (r"3[47]", (15,)),  # American Express
    (r"30[0-5]|3[689]", range(14, 20)),  # Diners Club
    (r"6011|64[4-9]|65", range(16, 20)),  # Discover
    (r"35(?:2[89]|[3-8])", range(16, 20)),  # JCB
    (r"62|81", range(16, 20)),  # UnionPay
    (r"50|5[6-9]|6[0-9]", range(12, 20)),  # Maestro
    (r"220[0-4]", range(16, 20)),  # Mir
    (r"60|82|508|353|356", (16,)),  # RuPay
)

# Matched by lookahead, because what seems to be the rest of one account may be the next one.
_ACCOUNT = re.compile(r"(?<![^\W_])(?=([A-Za-z]{2}\d{2}(?:[ \-\u00a0\u202f]?[A-Za-z0-9]){11,30}))")
_SHORTEST_ACCOUNT = 15


@cache
def _card_patterns() -> tuple[re.Pattern[str], list[tuple[re.Pattern[str], frozenset[int]]]]:
    """Return the pattern of a card's number, and those of the networks; compiled on demand, because that takes 2 ms."""
    return re.compile(_CARD), [(re.compile(prefix), frozenset(lengths)) for prefix, lengths in _NETWORKS]


class CardFinder:
    """Finds every number that a payment card could have, in one piece or grouped as on cards."""

    def __init__(self) -> None:
        from stdnum import luhn

        self._has_check_digit = luhn.is_valid
        self._pattern, self._networks = _card_patterns()

    def find(self, text: str) -> Iterator[Span]:
        """Yield the numbers in a text."""
        for candidate in self._pattern.finditer(text):
            for group in (1, 2):
                start, end = candidate.span(group)
                if end > start and self._is_card(_digits(text[start:end])) and not _is_decimals(text, start, end):
                    yield Span(start, end, CARD)

    def _is_card(self, digits: str) -> bool:
        """Return whether a card network gives out such numbers."""
        is_known = any(prefix.match(digits) and len(digits) in lengths for prefix, lengths in self._networks)
        return is_known and self._has_check_digit(digits)


def _digits(text: str) -> str:
    return "".join(str(int(character)) for character in text if character.isdecimal())


def _is_decimals(text: str, start: int, end: int) -> bool:
    return is_fraction(text, start) and text[start:end].isdecimal()


class AccountFinder:
    """Finds every IBAN, in one piece or in groups."""

    def __init__(self) -> None:
        from stdnum import iban

        self._is_valid = partial(iban.is_valid, check_country=False)

    def find(self, text: str) -> Iterator[Span]:
        """Yield the accounts in a text."""
        for candidate in _ACCOUNT.finditer(text):
            # What follows the number may look like more of it; the check digits and the country's length decide.
            start, end = candidate.span(1)
            while end - start >= _SHORTEST_ACCOUNT:
                is_whole = end == len(text) or not text[end].isalnum()
                if is_whole and self._is_account(text[start:end]):
                    yield Span(start, end, IBAN)
                    break
                end -= 1

    def _is_account(self, text: str) -> bool:
        compact = "".join(filter(str.isalnum, text))
        # Checked before the library's tables are asked, because only one number in 97 passes.
        remainder = int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97
        return remainder == 1 and self._is_valid(compact)


# National ids

NATIONAL_ID = "id"


class _IdChecks(Protocol):
    def is_valid(self, number: str) -> bool: ...


@cache
def _shape(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^\W_])(?:{SHAPES[name]})(?![^\W_])", re.IGNORECASE | re.ASCII)


@cache
def _checks(name: str) -> _IdChecks:
    return cast("_IdChecks", import_module(f"stdnum.{name}"))


def find_ids(text: str, names: Sequence[str]) -> Iterator[Span]:
    """Yield every id of these kinds."""
    for name in names:
        for candidate in _shape(name).finditer(text):
            if not is_fraction(text, candidate.start()) and _checks(name).is_valid(candidate.group()):
                yield Span(candidate.start(), candidate.end(), NATIONAL_ID)


# All of them

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
    # A finder imports its library when it is made. The libraries take 0.2 s, which only servers with such rules pay.
    if "phone" in rules.hide:
        yield PhoneFinder(rules.phone_regions).find
    if "card" in rules.hide:
        yield CardFinder().find
    if "iban" in rules.hide:
        yield AccountFinder().find
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
