"""How many tokens a text is to a model: o200k, counted offline by npm's js-tiktoken, which brings the ranks along.

Python's tiktoken fetches them from a host of its own. Installed when it is first needed; no dependency of the project.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.registries import node, npm_folder

_COUNT = """
const { Tiktoken } = require("js-tiktoken/lite");
const encoder = new Tiktoken(require("js-tiktoken/ranks/o200k_base"));
const texts = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => encoder.encode(text, [], []).length)));
"""


def count_tokens(texts: Sequence[str], kept: Path) -> list[int]:
    """Tokens of each text; what counts them is installed under `kept`."""
    folder = npm_folder(kept / "js-tiktoken", "js-tiktoken@1")
    program, _ = node()
    command = [str(program), "--eval", _COUNT]
    done = subprocess.run(command, input=json.dumps([*texts]), cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
