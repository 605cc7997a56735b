"""Finds telephone numbers, payment cards and bank accounts in a text.

Imported only where a policy hides one of them, because phonenumbers and stdnum take 0.2 s to import.
"""

import re
from collections.abc import Iterator, Sequence

import phonenumbers
from stdnum import iban, luhn

from belljar.privacy.spans import MASK, Span, is_fraction

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
_FEWEST, _MAX = 6, 15


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
    if not _FEWEST <= len(_DIGITS.findall(text)) <= _MAX:
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
