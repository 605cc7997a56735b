"""The stem of an English word, good enough that `commits`, `committed` and `committing` find `commit`.

A few rules for the endings of words in names and descriptions of tools. A whole stemmer was tried first: the snowball
package takes half a second to import, because it brings every language it has.
"""

from functools import lru_cache
from typing import Final

_VOWELS: Final = frozenset("aeiouy")
_KEPT_DOUBLE: Final = frozenset("lsz")
# Each with how much of the word has to be left.
_ENDINGS: Final = (("ication", 3), ("ization", 3), ("ation", 5), ("ion", 4), ("ing", 3), ("ed", 3), ("ly", 4))


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """The stem of a word in lower case."""
    if len(word) <= 3 or not word.isascii():
        return word
    word = _singular(word)
    for ending, least in _ENDINGS:
        rest = word.removesuffix(ending)
        if rest != word and len(rest) >= least and not _VOWELS.isdisjoint(rest):
            word = _single(rest)
            break
    # `query` and `queries`, `stage` and `staging` have met by now, but for this letter.
    return word[:-1] if len(word) > 3 and word[-1] in "eyi" else word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if word.endswith(("sses", "shes", "ches", "xes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def _single(word: str) -> str:
    """`committ` is `commit`; `call` stays."""
    is_double = len(word) > 3 and word[-1] == word[-2] and word[-1] not in _VOWELS | _KEPT_DOUBLE
    return word[:-1] if is_double else word
