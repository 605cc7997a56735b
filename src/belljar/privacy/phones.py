"""Telephone numbers in a text, as the phonenumbers library knows them."""

import re
from collections.abc import Iterator, Sequence

import phonenumbers

from belljar.privacy.spans import MASK, Span

KIND = "phone"
_EXTENSION_CHARS = 24

_PLUS = re.compile(r"[+＋]")
# From a plus on, as long as it can be one number: the matcher reads digits that follow a number as part of it, and
# passes over one that touches a letter.
_BEHIND_PLUS = re.compile(r"[+＋][ (\[]{0,2}\d+(?:[ ()\[\]/.~\-\u00a0\u2009\u202f\u2010-\u2015]{1,3}\d+){0,9}")
_GROUP = re.compile(r"\d+")
_DIGITS = re.compile(r"\d")
_DECIMAL = re.compile(r"(?<![\d.+(])(?:0|[1-9]\d*)\.\d+(?![\d.])")
_FEWEST, _MOST = 6, 15


def find_phones(text: str, regions: Sequence[str]) -> Iterator[Span]:
    """Every valid number: with a plus of any country, without one of the countries in `regions`."""
    yield from _international(text)
    if not regions:
        return
    # Tables of decimal numbers are what takes the matcher longest, 80 µs a number.
    without = _DECIMAL.sub(lambda decimal: MASK * len(decimal.group()), text)
    if len(_DIGITS.findall(without)) >= _FEWEST:
        for region in regions:
            for match in phonenumbers.PhoneNumberMatcher(without, region):
                yield Span(match.start, match.end, KIND)


def _international(text: str) -> Iterator[Span]:
    for plus in _PLUS.finditer(text):
        run = _BEHIND_PLUS.match(text, plus.start())
        if run is None or len(_DIGITS.findall(run.group())) < _FEWEST:
            continue
        ends = [group.end() for group in _GROUP.finditer(text, run.start(), run.end())]
        end = next((end for end in reversed(ends) if _is_number(text[run.start() : end])), None)
        if end is not None:
            yield Span(run.start(), end, KIND)
        for match in phonenumbers.PhoneNumberMatcher(text[run.start() : run.end() + _EXTENSION_CHARS], None):
            # Once more with the library's eyes, which see extensions.
            yield Span(run.start() + match.start, run.start() + match.end, KIND)


def _is_number(text: str) -> bool:
    """Whether it is a number that could be called; in one piece, a possible one will do."""
    if not _FEWEST <= len(_DIGITS.findall(text)) <= _MOST:
        return False
    try:
        number = phonenumbers.parse(text, None)
    except phonenumbers.NumberParseException:
        return False
    is_compact = len(_GROUP.findall(text)) == 1
    return phonenumbers.is_valid_number(number) or (is_compact and phonenumbers.is_possible_number(number))
