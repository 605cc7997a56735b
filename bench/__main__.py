"""The `bench/run` command: which measurements, how long, and where the figures go."""

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import (
    console,
    fanout,
    first_hour,
    first_result,
    fleet,
    forking,
    foundry,
    gpu,
    journal,
    lines,
    mcp_calls,
    memory,
    model_tokens,
    neighbours,
    one_plus_one,
    sandboxes,
    search,
    skills,
    slow_reader,
    start_up,
    tasks,
    toolbox,
    workflows,
)
from bench.figures import Figure, as_json, table
from bench.stage import Stage, open_stage

MEASUREMENTS: dict[str, Callable[[Stage], Awaitable[list[Figure]]]] = {
    "first-hour": first_hour.measure,
    "first-result": first_result.measure,
    "one-plus-one": one_plus_one.measure,
    "mcp": mcp_calls.measure,
    "journal": journal.measure,
    "fleet": fleet.measure,
    "memory": memory.measure,
    "lines": lines.measure,
    "slow-reader": slow_reader.measure,
    "start-up": start_up.measure,
    "sandbox": sandboxes.measure,
    "fanout": fanout.measure,
    "forking": forking.measure,
    "neighbours": neighbours.measure,
    "foundry": foundry.measure,
    "toolbox": toolbox.measure,
    "search": search.measure,
    "workflows": workflows.measure,
    "tasks": tasks.measure,
    "console": console.measure,
    "skills": skills.measure,
    "model-tokens": model_tokens.measure,
    "gpu": gpu.measure,
}
ON_DEMAND = ("first-hour", "toolbox", "console", "search", "skills", "model-tokens", "gpu")
"""Measured when they are named: they install what they are compared with, or need a GPU or a browser."""
FULL_S = 240.0
QUICK_S = 90.0
LONGER = {"console": 3, "search": 3}
"""The most that one measurement may take, and how many times that for those of many parts.

On two quiet processors all of them together take eight minutes.
"""


def main() -> int:
    """Measure; 1 when a measurement could not be made. A missed target is a mark in the table, not a failure."""
    arguments = _arguments()
    # The SDK and the engine say things that are news to an operator, not to a benchmark.
    logging.basicConfig(level=logging.ERROR)
    figures: list[Figure] = []
    failures: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_measure_all(arguments.names or _always(), arguments.quick, figures, failures))
    print(table(figures))
    for failure in failures:
        print(f"not measured: {failure}", file=sys.stderr)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(figures), indent=2) + "\n")
    return 1 if failures else 0


def _always() -> list[str]:
    return [name for name in MEASUREMENTS if name not in ON_DEMAND]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run", description="Measure belljar beside its peers, in one run.")
    parser.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []], metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args()


async def _measure_all(names: list[str], is_quick: bool, figures: list[Figure], failures: list[str]) -> None:
    limit_s = QUICK_S if is_quick else FULL_S
    async with gpu.open_gpu_stage(is_quick=is_quick) if names == ["gpu"] else open_stage(is_quick=is_quick) as stage:
        for name in names:
            print(f"{name} …", file=sys.stderr, flush=True)
            began = time.monotonic()
            try:
                async with asyncio.timeout(limit_s * LONGER.get(name, 1)):
                    figures += await MEASUREMENTS[name](stage)
            except TimeoutError:
                failures.append(f"{name}: it was not over after {limit_s * LONGER.get(name, 1):g} s")
            except Exception as error:
                cause = _innermost(error)
                logging.getLogger("bench").error("%s failed", name, exc_info=cause)
                failures.append(f"{name}: {type(cause).__name__}: {cause}")
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _innermost(error: BaseException) -> BaseException:
    """What went wrong: each client of the SDK has a group of tasks around it, which says only that something did."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
