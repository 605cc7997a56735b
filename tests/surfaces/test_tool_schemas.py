"""The tools of each surface, their arguments and the fields of their answers, as clients' code was written for them.

`tool_schemas.json` has them. What was meant to change is written anew by `BELLJAR_WRITE=1 scripts/test tests/surfaces/
test_tool_schemas.py`, and its difference is read before it is committed.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from calls import FORKS, opened_runtime
from mcp import Client

from belljar.environments import Environment
from belljar.mcp.server import build_server

pytestmark = pytest.mark.anyio
PINNED = Path(__file__).with_name("tool_schemas.json")
SURFACES = ("interpreter", "executor", "foundry", "azure-mcp")
# Words for people and models; tests of their own read them.
WORDS = ("description", "title", "examples")


def bare(schema: Any) -> Any:
    """The schema without its words."""
    if isinstance(schema, list):
        return [bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may have the name of one of the words.
    return {
        name: {key: bare(value) for key, value in each.items()}
        if name in ("properties", "$defs") and isinstance(each, dict)
        else bare(each)
        for name, each in schema.items()
        if name not in WORDS or not isinstance(each, str | list)
    }


async def test_tools_take_and_answer_what_they_did(default_environment: Environment, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    async with opened_runtime(default_environment, tmp_path, **FORKS) as runtime:
        for surface in SURFACES:
            async with Client(build_server(runtime, [surface])) as client:
                listed = (await client.list_tools()).tools
            found[surface] = {
                tool.name: {
                    "takes": bare(tool.input_schema),
                    "answers": bare(tool.output_schema),
                    "hints": tool.annotations.model_dump(exclude_none=True, exclude={"title"})
                    if tool.annotations
                    else {},
                }
                for tool in listed
            }
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if os.environ.get("BELLJAR_WRITE"):
        PINNED.write_text(text)
    assert found == json.loads(PINNED.read_text())
