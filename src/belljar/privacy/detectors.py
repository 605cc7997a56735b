"""Finders of phone numbers, cards, bank accounts and e-mail addresses; the `Detector` runs those that the rules name.

There is one pass: every finder searches the text as it came. National ids are in `national_ids.py`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import phonenumbers
from stdnum import iban, luhn

from belljar.privacy.national_ids import find_ids
from belljar.privacy.rules import PrivacyRules
from belljar.privacy.spans import MASK, Span, disjoint, is_fraction, masked

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
_FEWEST, _MOST = 6, 15


def find_phones(text: str, regions: Sequence[str]) -> Iterator[Span]:
    """Yield every valid number: with a plus of any country, without one of the countries in `regions`."""
    yield from _international(text)
    if not regions:
        return
    # Decimal numbers are masked, because tables of them take the matcher longest, 80 µs a number.
    without = _DECIMAL.sub(lambda decimal: MASK * len(decimal.group()), text)
    if len(_DIGITS.findall(without)) >= _FEWEST:
        for region in regions:
            for match in phonenumbers.PhoneNumberMatcher(without, region):
                yield Span(match.start, match.end, PHONE)


def _international(text: str) -> Iterator[Span]:
    for plus in _PLUS.finditer(text):
        run = _BEHIND_PLUS.match(text, plus.start())
        if run is None or len(_DIGITS.findall(run.group())) < _FEWEST:
            continue
        ends = [group.end() for group in _GROUP.finditer(text, run.start(), run.end())]
        end = next((end for end in reversed(ends) if _is_number(text[run.start() : end])), None)
        if end is not None:
            yield Span(run.start(), end, PHONE)
        for match in phonenumbers.PhoneNumberMatcher(text[run.start() : run.end() + _EXTENSION_CHARS], None):
            # The library's matcher also finds extensions.
            yield Span(run.start() + match.start, run.start() + match.end, PHONE)


def _is_number(text: str) -> bool:
    """Return whether this is a number that could be called; for digits in one piece, a possible one is enough."""
    if not _FEWEST <= len(_DIGITS.findall(text)) <= _MOST:
        return False
    try:
        number = phonenumbers.parse(text, None)
    except phonenumbers.NumberParseException:
        return False
    is_compact = len(_GROUP.findall(text)) == 1
    return phonenumbers.is_valid_number(number) or (is_compact and phonenumbers.is_possible_number(number))


# Payment cards and bank accounts: groups of digits or letters whose check digits are right

CARD, IBAN = "card", "iban"

_GAP = r"[ \-.\u00a0\u2009\u202f\u2010\u2011]{1,2}"
# In one piece, in fours, or in 4-6-4 and 4-6-5. Matched by lookahead, because the first four digits of one number may
# be the last of another. What follows the fours may be a fifth group, or no part of the number.
_CARD = re.compile(
    rf"(?<!\d)(?=(\d{{12,19}}|\d{{4}}(?:{_GAP}\d{{4}}){{2}}{_GAP}\d{{1,4}}|\d{{4}}{_GAP}\d{{6}}{_GAP}\d{{4,5}})(?!\d))"
    rf"(?=(\d{{4}}(?:{_GAP}\d{{4}}){{3}}{_GAP}\d{{1,3}}(?!\d))?)"
)
# First digits and lengths of the networks, because the check digit alone would let one number in ten through.
_NETWORKS = tuple(
    (re.compile(prefix), frozenset(lengths))
    for prefix, lengths in (
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
)

# Matched by lookahead, because what seems to be the rest of one account may be the next one.
_ACCOUNT = re.compile(r"(?<![^\W_])(?=([A-Za-z]{2}\d{2}(?:[ \-\u00a0\u202f]?[A-Za-z0-9]){11,30}))")
_SHORTEST_ACCOUNT = 15


def find_cards(text: str) -> Iterator[Span]:
    """Yield every number that a payment card could have, in one piece or grouped as on cards."""
    for candidate in _CARD.finditer(text):
        for group in (1, 2):
            start, end = candidate.span(group)
            if end > start and is_card(_digits(text[start:end])) and not _is_decimals(text, start, end):
                yield Span(start, end, CARD)


def _digits(text: str) -> str:
    return "".join(str(int(character)) for character in text if character.isdecimal())


def _is_decimals(text: str, start: int, end: int) -> bool:
    return is_fraction(text, start) and text[start:end].isdecimal()


def is_card(digits: str) -> bool:
    """Return whether a card network gives out such numbers."""
    is_known = any(prefix.match(digits) and len(digits) in lengths for prefix, lengths in _NETWORKS)
    return is_known and luhn.is_valid(digits)


def find_accounts(text: str) -> Iterator[Span]:
    """Yield every IBAN, in one piece or in groups."""
    for candidate in _ACCOUNT.finditer(text):
        # What follows the number may look like more of it; the check digits and the country's length decide.
        start, end = candidate.span(1)
        while end - start >= _SHORTEST_ACCOUNT:
            is_whole = end == len(text) or not text[end].isalnum()
            if is_whole and _is_account(text[start:end]):
                yield Span(start, end, IBAN)
                break
            end -= 1


def _is_account(text: str) -> bool:
    compact = "".join(filter(str.isalnum, text))
    # Checked before the library's tables are asked, because only one number in 97 passes.
    remainder = int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97
    return remainder == 1 and iban.is_valid(compact, check_country=False)


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
        self._in_words: list[Finder] = [find_emails] if "email" in rules.hide else []
        self._in_numbers = [*_number_finders(rules)]

    def __bool__(self) -> bool:
        return bool(self._in_words or self._in_numbers)

    def find(self, text: str) -> list[Span]:
        """Return what is personal in a text, in order, none overlapping another."""
        return disjoint(
            Span(start + span.start, start + span.end, span.kind)
            for start, piece in _pieces(text)
            for span in self._in_piece(piece)
        )

    def _in_piece(self, piece: str) -> Iterator[Span]:
        """Yield what is personal in a piece. Most have neither an @ nor enough digits, and cost next to nothing."""
        words = [span for finder in self._in_words for span in finder(piece)] if "@" in piece else []
        yield from words
        if len(piece) < _FEWEST_DIGITS or sum(map(str.isdecimal, piece)) < _FEWEST_DIGITS:
            return
        # Addresses are masked, because their digits next to a number must not make it look like a longer, invalid one.
        # The piece as it came is searched as well, because of a number that runs into an address nothing may stay.
        for reading in (piece, masked(piece, words)) if words else (piece,):
            for finder in self._in_numbers:
                yield from finder(reading)


def _number_finders(rules: PrivacyRules) -> Iterator[Finder]:
    # The libraries behind these take 0.2 s to import.
    if "phone" in rules.hide:
        yield partial(find_phones, regions=rules.phone_regions)
    if "card" in rules.hide or "iban" in rules.hide:
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
