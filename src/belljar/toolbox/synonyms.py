"""English word knowledge for the search: synonyms, phrases, irregular forms, and a small stemmer.

The words are in `everyday_words.txt`. It holds only words that mean the same to most people, in any trade; what a
particular server calls its things is in its own descriptions.
"""

import re
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final

_WORD: Final = re.compile(r"[^\W_]+")
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def split_words(text: str) -> list[str]:
    """Return the words of a text or a name, in lower case; `getItem`, `get-item` and `get_item` are two words each."""
    return [part.lower() for word in _WORD.findall(text) for part in _HUMP.split(word)]


def stemmed(word: str) -> str:
    """Return the stem of a word's base form."""
    return stem(base_form(word))


@cache
def _entries(section: str) -> tuple[str, ...]:
    """Return the lines of a section of `everyday_words.txt`."""
    text = (files("belljar.toolbox") / "everyday_words.txt").read_text("utf-8")
    (found,) = (part for part in text.split("\n[")[1:] if part.startswith(f"{section}]\n"))
    return tuple(line for line in found.splitlines()[1:] if line and not line.startswith("#"))


@cache
def synonyms() -> dict[str, frozenset[str]]:
    """Return for each stem the stems that it may stand for."""
    found: dict[str, set[str]] = {}
    for group in _entries("same"):
        stems = {stem(word) for word in group.split()}
        for one in stems:
            found.setdefault(one, set()).update(stems - {one})
    for entry in _entries("also"):
        said, meant = entry.split(" > ")
        for one in said.split():
            found.setdefault(stem(one), set()).update(stem(word) for word in meant.split())
    return {one: frozenset(others) for one, others in found.items()}


def rephrased(query: str) -> str:
    """Return a lower-case query with the phrases of `everyday_words.txt` replaced by their words."""
    text = f" {query} "
    for said, meant in _phrases():
        text = text.replace(f" {said} ", f" {meant} ")
    return text


@cache
def _phrases() -> tuple[tuple[str, str], ...]:
    return tuple((said, meant) for said, _, meant in (entry.partition(" = ") for entry in _entries("phrases")))


def base_form(word: str) -> str:
    """Return the base form of an irregular form; any other word unchanged."""
    return _bases().get(word, word)


@cache
def _bases() -> dict[str, str]:
    return {form: base for base, *forms in (line.split() for line in _entries("irregular")) for form in forms}


# The stemmer: a few rules for endings, enough that `commits`, `committed` and `committing` find `commit`. A complete
# stemmer was tried first, but the snowball package takes half a second to import, because it has every language.

_VOWELS: Final = frozenset("aeiouy")
_KEPT_DOUBLE: Final = frozenset("lsz")
# Each ending with the number of letters that must be left without it.
_ENDINGS: Final = (("ication", 3), ("ization", 3), ("ation", 5), ("ion", 4), ("ing", 3), ("ed", 3), ("ly", 4))


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """Return the stem of a lower-case word."""
    if len(word) <= 3 or not word.isascii():
        return word
    word = _singular(word)
    for ending, least in _ENDINGS:
        rest = word.removesuffix(ending)
        if rest != word and len(rest) >= least and not _VOWELS.isdisjoint(rest):
            word = _single(rest)
            break
    # Drop the last letter in which `query` and `queries`, `stage` and `staging` may still differ.
    return word[:-1] if len(word) > 3 and word[-1] in "eyi" else word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if word.endswith(("sses", "shes", "ches", "xes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def _single(word: str) -> str:
    """Return a word without its doubled last letter: `committ` becomes `commit`, `call` stays."""
    is_double = len(word) > 3 and word[-1] == word[-2] and word[-1] not in _VOWELS | _KEPT_DOUBLE
    return word[:-1] if is_double else word
