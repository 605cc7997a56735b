"""What an interrupt leaves behind in a session that calls a tool: nothing that the next call would wait for."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from belljar.toolbox.broker import Broker, ToolCatalogue
from belljar.toolbox.fair_share import FairShares
from belljar.toolbox.session_server import SearchMessage, open_tool_server
from belljar.toolbox.toolbox import INSIDE

pytestmark = pytest.mark.anyio

NEVER = "never"
CELL = f"""
import sys, threading
from toolbox import ToolError
from toolbox.connection import host_connection

def ask(words):
    answer = host_connection().ask({{"op": "search", "query": words}})
    assert answer["text"] == words, answer

def ask_for_ever():
    while True:
        try:
            ask({NEVER!r})
        except ToolError:
            pass

def is_interrupted(place):
    # Python looks for signals when a function begins, and when one that is written in C has returned.
    left = place
    def look(frame, event, _):
        nonlocal left
        left -= event in ("call", "c_return")
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt
    sys.setprofile(look)
    try:
        ask("interrupted")
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False

if sys.argv[1] == "beside a thread":
    threading.Thread(target=ask_for_ever, daemon=True).start()
place = 0
while is_interrupted(place):
    place += 1
    ask(str(place))
print(place)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("how", ["alone", "beside a thread"])
async def test_the_call_after_an_interrupt_gets_its_own_answer_wherever_it_came(tmp_path: Path, how: str):
    async def find(asked: SearchMessage) -> dict[str, Any]:
        if asked.query == NEVER:
            await asyncio.Event().wait()
        return {"outcome": "found", "text": asked.query}

    broker = Broker("session", cast("ToolCatalogue", None), limit_bytes=1_000)
    async with open_tool_server(tmp_path, "tools", broker=broker, find=find, folder_inside="/", paces=FairShares()):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CELL, how),
            env={**os.environ, "PYTHONPATH": str(INSIDE), "BELLJAR_TOOLBOX": str(tmp_path / "tools")},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0
    assert int(said) > 10
