"""Vectors of words that have been trained on how people ask for tools, so that "headlines" is near to "news".

The vector of a text is the sum of its words' vectors. The file `word_vectors.bin` has a vector for each of some
thousand stems of English words; a word that is not in it only makes the others count less.
`bench/search_training/train_words.py` made it.
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
from typing import Any, Final

from belljar.toolbox.synonyms import split_words, stemmed

if sys.version_info >= (3, 12):
    from math import sumprod as _product  # takes a third of the time
else:

    def _product(one: Sequence[float], other: Sequence[float]) -> float:
        return sum(map(mul, one, other))


FILE: Final = Path(__file__).with_name("word_vectors.bin")
HEAD: Final = 2
"""How often the words before the colon count, which are the names of the tool and its server."""
_UNKNOWN: Final = 0.8
"""The length of the vector of a word that is not known; it points nowhere that another one does."""


class WordVectors:
    """A `SentenceModel` of `search.py`, in plain Python."""

    weight = 2.5
    least_similar = 0.4

    def __init__(self, content: bytes) -> None:
        head, _, vectors = zlib.decompress(content).partition(b"\n")
        header = json.loads(head)
        self._width: int = header["width"]
        self._places = {stem: place for place, stem in enumerate(header["stems"])}
        self._lengths: list[float] = header["lengths"]
        self._vectors = array("b", vectors)

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """See `SentenceModel`."""
        return [self._vector(*text.split(":", 1)) for text in texts]

    def similarities(self, query: str, vectors: Sequence[Any]) -> list[float]:
        """See `SentenceModel`."""
        wanted = self._vector("", query)
        return [_product(wanted, vector) for vector in vectors]

    def _vector(self, head: str, rest: str = "") -> list[float]:
        """Return the vector of a text, of length 1; shorter by the part of its words that is not known."""
        counts: Counter[str] = Counter()
        for text, weight in ((head, HEAD), (rest, 1)):
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
