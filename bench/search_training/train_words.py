"""Trains a vector for each of some thousand words, by which tools are searched where the extra `search` is missing.

From the same phrases as `train_granite.py`. A word's vector begins as the one that Granite, as trained there, has for
it, in 64 dimensions, shorter the more common the word is. Then all are moved so that the sum of a phrase's words is
nearer to the sum of its tool's words than to those of the other tools, and above all those of its own server. They are
written as 8-bit numbers, with a length for each, to `word_vectors.bin` of the toolbox.

    uv run --extra search python -m bench.search_training.train_words

It takes some minutes. `bench/run search` tells what came of it.
"""

import json
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy

from belljar.toolbox import word_vectors
from belljar.toolbox.base import ToolDefinition
from belljar.toolbox.search import sentence
from belljar.toolbox.sentence_vectors import sentence_model
from belljar.toolbox.synonyms import split_words, stemmed

PHRASES = Path(__file__).with_name("phrases.jsonl")
WIDTH = 64
LEAST_COUNT = 2
COMMON = 1e-2
"""A word that is this part of all words begins half as long as a rare one."""
STEPS = 500
WARM_UP = 50
RATE = 6e-3
TEMPERATURE = 0.1
SERVERS = 40
MOST_TOOLS = 450
OWN_SERVER = 0.4
LEFT_OUT = 0.25
"""The part of the words that a step leaves out, by chance; of a phrase, fewer."""
KEPT_NEAR = 1e-4

Rows = Any
"""For each text a row, with how often it has each of the words."""


class Words:
    """The words that get a vector, and how texts are made of them."""

    def __init__(self, texts: list[str]) -> None:
        forms: dict[str, Counter[str]] = {}
        for text in texts:
            for word in split_words(text):
                forms.setdefault(stemmed(word), Counter())[word] += 1
        self.stems = sorted(
            stem for stem, found in forms.items() if found.total() >= LEAST_COUNT and not stem.isdigit()
        )
        self.forms = [forms[stem].most_common(1)[0][0] for stem in self.stems]
        counts = numpy.array([forms[stem].total() for stem in self.stems], "f8")
        self.shares = counts / counts.sum()
        self._places = {stem: place for place, stem in enumerate(self.stems)}

    def row(self, head: str, rest: str = "") -> Any:
        """How often a text has each word; those before the colon count as in `word_vectors.py`."""
        row = numpy.zeros(len(self.stems), "f4")
        for text, weight in ((head, word_vectors.HEAD), (rest, 1.0)):
            for word in split_words(text):
                if (place := self._places.get(stemmed(word))) is not None:
                    row[place] += weight
        return row


def _begin(words: Words) -> Any:
    """The vectors before the training."""
    model = sentence_model()
    if model is None:
        raise SystemExit("install the extra `search` first")
    known = numpy.stack(model.embed(words.forms))
    known -= known.mean(axis=0)
    _, _, axes = numpy.linalg.svd(known, full_matrices=False)
    vectors = known @ axes[:WIDTH].T
    vectors /= numpy.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors * (COMMON / (COMMON + words.shares))[:, None]).astype("f4")


def train() -> tuple[Words, Any]:
    """Return the words and their vectors."""
    random.seed(0)
    chance = numpy.random.default_rng(0)
    tools = [json.loads(line) for line in PHRASES.read_text().splitlines()]
    texts = [sentence(ToolDefinition(tool["server"], tool["tool"], tool["description"])) for tool in tools]
    words = Words([*texts, *(phrase for tool in tools for phrase in tool["phrases"])])
    shown = [words.row(*text.split(":", 1)) for text in texts]
    asked = [[words.row("", phrase) for phrase in tool["phrases"]] for tool in tools]
    servers: dict[str, list[int]] = {}
    for place, tool in enumerate(tools):
        servers.setdefault(tool["server"], []).append(place)
    start = vectors = _begin(words)
    mean, spread = numpy.zeros_like(vectors), numpy.zeros_like(vectors)
    for step in range(1, STEPS + 1):
        picked = [place for name in random.sample(sorted(servers), SERVERS) for place in servers[name]]
        random.shuffle(picked)
        picked = picked[:MOST_TOOLS]
        said = numpy.stack([random.choice(asked[place]) for place in picked])
        meant = numpy.stack([shown[place] for place in picked])
        said *= chance.random(said.shape) > 0.6 * LEFT_OUT
        meant *= chance.random(meant.shape) > LEFT_OUT
        names = numpy.array([tools[place]["server"] for place in picked])
        gradient = _gradient(said, meant, vectors, names[:, None] == names[None]) + KEPT_NEAR * (vectors - start)
        mean = 0.9 * mean + 0.1 * gradient
        spread = 0.999 * spread + 0.001 * gradient * gradient
        rate = RATE * min(1, step / WARM_UP) * (0.5 + 0.5 * numpy.cos(numpy.pi * step / STEPS))
        moved = (mean / (1 - 0.9**step)) / (numpy.sqrt(spread / (1 - 0.999**step)) + 1e-8)
        vectors = (vectors - rate * moved).astype("f4")
    return words, vectors


def _gradient(said: Rows, meant: Rows, vectors: Any, is_own: Any) -> Any:
    """How the vectors would have to change so that each phrase is farther from its tool: of the cross entropy."""
    phrases, phrase_lengths = _unit(said @ vectors)
    tools, tool_lengths = _unit(meant @ vectors)
    near = numpy.exp(phrases @ tools.T / TEMPERATURE)
    own = near * is_own
    chances = (1 - OWN_SERVER) * near / near.sum(axis=1, keepdims=True) + OWN_SERVER * own / own.sum(
        axis=1, keepdims=True
    )
    errors = (chances - numpy.eye(len(said))) / len(said) / TEMPERATURE
    by_phrases = _through_unit(errors @ tools, phrases, phrase_lengths)
    by_tools = _through_unit(errors.T @ phrases, tools, tool_lengths)
    return said.T @ by_phrases + meant.T @ by_tools


def _unit(rows: Any) -> tuple[Any, Any]:
    lengths = numpy.linalg.norm(rows, axis=1, keepdims=True) + 1e-6
    return rows / lengths, lengths


def _through_unit(gradient: Any, rows: Any, lengths: Any) -> Any:
    return (gradient - rows * (rows * gradient).sum(axis=1, keepdims=True)) / lengths


def write(words: Words, vectors: Any, path: Path) -> None:
    """Write the vectors: a line of JSON with words and lengths, then 8-bit numbers; all of it compressed."""
    steps = numpy.abs(vectors).max(axis=1) / 127
    header = {"width": WIDTH, "stems": words.stems, "lengths": [float(f"{step:.4g}") for step in steps]}
    numbers = numpy.rint(vectors / steps[:, None]).astype("i1").tobytes()
    path.write_bytes(zlib.compress(json.dumps(header).encode() + b"\n" + numbers, 9))


if __name__ == "__main__":
    write(*train(), word_vectors.FILE)
