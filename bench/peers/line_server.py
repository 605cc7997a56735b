"""The loop of a peer's process: a question a line, an answer a line. Runs in the peer's environment: stdlib alone."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any


async def answer_all(answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """Until nobody asks any more. What the libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            reply = {"answer": await answer(json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:2_000]}
        print(json.dumps(reply), file=out)


def described(package: str, tools: Any) -> dict[str, Any]:
    """Which version this is, and what a model is told of each tool."""
    definitions = [
        {
            "name": tool.name,
            "description": tool.description,
            # The SDK renamed it in its second major version.
            "input_schema": getattr(tool, "input_schema", None) or tool.inputSchema,
        }
        for tool in tools
    ]
    return {"version": version(package), "definitions": definitions}
