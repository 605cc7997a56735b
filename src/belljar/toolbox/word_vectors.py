"""Vectors of words that have been trained on how people ask for tools, so that "headlines" is near to "news".

The vector of a text is the sum of its words' vectors. The file `word_vectors.bin` has a vector for each of 5,100 stems
of English words; a word that is not in it only makes the others count less. It was made once, with a language model and
17,000 phrases; both are in the history of the repository, in `bench/search_training/` until November 2026.

Of 541 phrases of `bench/search_phrases.py`, 436 are found with the vectors, and 363 without.
"""

import json
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import hypot
from operator import add, mul
from pathlib import Path
from typing import Final

from belljar.toolbox.synonyms import split_words, stemmed

if sys.version_info >= (3, 12):
    from math import sumprod as _product  # takes a third of the time
else:

    def _product(one: Sequence[float], other: Sequence[float]) -> float:
        return sum(map(mul, one, other))


FILE: Final = Path(__file__).with_name("word_vectors.bin")
WEIGHT: Final = 2.5
"""How much a similarity counts in a search, where 1 is the score of the best tool by words."""
LEAST_SIMILAR: Final = 0.4
"""How similar a tool must be to a query to have anything to do with it."""
_NAMES: Final = 2
"""How often the names of a tool and its server count, where its description counts once."""
_UNKNOWN: Final = 0.8
"""The length of the vector of a word that is not known; it points nowhere that another one does."""


class WordVectors:
    """Makes vectors of texts and compares them, in plain Python."""

    def __init__(self, content: bytes) -> None:
        head, _, vectors = zlib.decompress(content).partition(b"\n")
        header = json.loads(head)
        self._width: int = header["width"]
        self._places = {stem: place for place, stem in enumerate(header["stems"])}
        self._lengths: list[float] = header["lengths"]
        self._vectors = array("b", vectors)

    def similarities(self, query: str, vectors: Sequence[list[float]]) -> list[float]:
        """Return how similar a query is to the tool of each vector; 1 is the same."""
        wanted = self.of_tool("", query)
        return [_product(wanted, vector) for vector in vectors]

    def of_tool(self, names: str, description: str) -> list[float]:
        """Return the vector of a tool, of length 1; shorter by the part of its words that is not known."""
        counts: Counter[str] = Counter()
        for text, weight in ((names, _NAMES), (description, 1)):
            for word in split_words(text):
                counts[stemmed(word)] += weight
        total = [0.0] * self._width
        unknown = 0.0
        for stem, count in counts.items():
            if (place := self._places.get(stem)) is None:
                unknown = hypot(unknown, count * _UNKNOWN)
                continue
            start, factor = place * self._width, count * self._lengths[place]
            total = [*map(add, total, (factor * value for value in self._vectors[start : start + self._width]))]
        length = hypot(unknown, *total) or 1.0
        return [value / length for value in total]


@cache
def word_vectors() -> WordVectors:
    """Return the vectors, read once."""
    return WordVectors(FILE.read_bytes())
