"""Skills: what 100 of them cost a model before it looks for one, and how long it takes to find one of them.

The other side is what hosts do that show a model the name and the description of every skill at every turn. The
skills differ in nothing but their numbers.
"""

import json
import statistics
import time
from pathlib import Path

from mcp import Client

from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from belljar.skills.format import write_main
from bench.figures import Figure
from bench.registries import kept
from bench.stage import Stage
from bench.tokens import count_tokens

COUNT = 100
DESCRIPTION = (
    "Reconciles the ledger of department {number} with the bank's statements and lists what differs. Use it at the end "
    "of a month, or when somebody asks about a payment of that department."
)


async def measure(stage: Stage) -> list[Figure]:
    """The tokens of 100 skills, and the time of a search."""
    empty, full = stage.folder / "no-skills", stage.folder / "skills"
    _write(empty, 0)
    described = _write(full, COUNT)
    none, _ = await _seen(stage, empty)
    all_of_them, search_ms = await _seen(stage, full)
    before, after, listed = count_tokens([none, all_of_them, described], kept())
    return [
        Figure("skills", f"what a model sees of {COUNT} skills before it searches", "tokens", after - before, listed,
               0, "value", "the peer shows name and description of each"),
        Figure("skills", f"search_skills among {COUNT}", "ms", search_ms),
    ]  # fmt: skip


def _write(folder: Path, count: int) -> str:
    """Make a folder of skills; return what a host would show of them."""
    folder.mkdir(mode=0o755, exist_ok=True)
    lines: list[str] = []
    for number in range(count):
        name, description = f"ledger-{number}", DESCRIPTION.format(number=number)
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "SKILL.md").write_bytes(write_main(name, description, "# How\n\n" + "Step by step.\n" * 50))
        lines.append(f"- {name}: {description}")
    return "\n".join(lines)


async def _seen(stage: Stage, folder: Path) -> tuple[str, float]:
    """What a client's model is given at every turn, and the time that a search takes."""
    chosen = {"skills_directory": str(folder), "fork_start": False, "pool_size": 0}
    async with (
        open_runtime(stage.settings().model_copy(update=chosen)) as runtime,
        Client(build_server(runtime, ["interpreter"])) as client,
    ):
        tools = (await client.list_tools()).tools
        definitions = json.dumps([[tool.name, tool.description, tool.input_schema] for tool in tools])
        took: list[float] = []
        for _ in range(stage.pick(50, 10)):
            began = time.perf_counter()
            await client.call_tool("search_skills", {"query": "payments of department 42"})
            took.append((time.perf_counter() - began) * 1000)
        return f"{client.instructions or ''}\n{definitions}", statistics.median(took)
