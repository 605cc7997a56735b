"""No answer is larger than what clients take in one message, whatever a session holds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wires import Wire, opened_wire, tool_call

from belljar.environments import Environment

MEBIBYTE = 1 << 20
COUNT = 10_500
# The scan that runs after every cell looks at no more entries than that.
LOOKED_AT = 10_000
MANY = f"""
import os
for number in range({COUNT}):
    os.close(os.open(f"{{number:06}}" + "n" * 194, os.O_CREAT | os.O_WRONLY))
"""


class Measured:
    """A server whose every answer is measured."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._next = 0

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        self._wire.send({"jsonrpc": "2.0", "id": self._next, "method": method, "params": params})
        while True:
            line = self._wire.stdout.readline()
            assert line, "the server ended"
            assert len(line) < MEBIBYTE, line[:200]
            answer = json.loads(line)
            if answer.get("id") == self._next and "method" not in answer:
                return answer

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return self.ask(**_call(tool, arguments))["result"]


def _call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    message = tool_call(0, tool, **arguments)
    return {"method": message["method"], **message["params"]}


def text_of(result: dict[str, Any]) -> str:
    return "".join(block.get("text", "") for block in result["content"])


@pytest.fixture(scope="module")
def server(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder: Path = tmp_path_factory.mktemp("server")
    with opened_wire(default_environment, folder) as wire:
        yield Measured(wire)


def test_a_folder_of_very_many_files_is_told_in_pages_and_every_file_is_reached(server: Measured) -> None:
    result = server.call("execute_code", code=MANY, timeout_s=100, wait_s=100)
    told = result["structuredContent"]["files"]
    session_id = result["structuredContent"]["session_id"]
    assert 0 < len(told) < LOOKED_AT
    assert f"at least {LOOKED_AT - len(told):,} more files were created or changed" in text_of(result)

    names: list[str] = []
    after: str | None = ""
    while after is not None:
        page = server.call("list_session_files", session_id=session_id, after=after)
        listed = page["structuredContent"]
        names += [file["name"] for file in listed["files"]]
        shown = text_of(page).splitlines()
        if not after:
            assert f"{COUNT - len(shown) + 1:,} more: pass after={names[len(shown) - 2]!r}" in shown[-1]
        after = listed["next_after"]
    assert listed["is_complete"]
    assert names == [f"{number:06}" + "n" * 194 for number in range(COUNT)]

    assert server.ask("resources/list")["result"]["resources"] == []
    assert text_of(server.call("list_sessions"))


def test_long_values_do_not_make_long_answers(server: Measured) -> None:
    long = "x" * (MEBIBYTE + 100_000)
    refused = server.call("execute_code", code="raise ValueError('x' * 2_000_000)")
    assert refused["structuredContent"]["status"] == "error"
    session_id = refused["structuredContent"]["session_id"]
    assert server.call("execute_code", code="'y' * 2_000_000", session_id=session_id)
    assert server.call("execute_code", code=long, session_id=session_id)
    for tool, arguments in (
        ("execute_code", {"code": "1", "session_id": long}),
        ("list_session_files", {"session_id": session_id, "path": long}),
        ("list_session_files", {"session_id": long}),
        ("download_file", {"session_id": session_id, "name": long}),
        ("upload_file", {"session_id": session_id, "name": long, "text": "x"}),
        ("get_execution", {"execution_id": long}),
        ("install_dependencies", {"packages": [long], "session_id": session_id}),
        ("check_installed_packages", {"packages": [f"{n:03}" + "x" * 497 for n in range(200)]}),
        ("check_installed_packages", {"packages": [long] * 2}),
        (long, {}),
    ):
        server.ask(**_call(tool, arguments))
    server.ask("resources/read", uri=f"kernel://{session_id}/{long}")
    server.ask("resources/read", uri=f"kernel://{long}/file")
