import json
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

AWKWARD = Path(__file__).parents[1] / "toolbox" / "awkward_server.py"
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    """The awkward server, started once: what is tried here is the command."""
    with subprocess.Popen([sys.executable, str(AWKWARD), "--http"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1]
        process.terminate()


@pytest.fixture
def config(place: Path, address: str) -> str:
    file = place / "mcp.json"
    file.write_text(
        json.dumps({"mcpServers": {"awkward": {"url": address}, "missing": {"command": "/nowhere/at-all"}}})
    )
    return str(file)


def test_servers_are_listed_with_what_is_wrong_with_them(belljar: Run, config: str) -> None:
    outcome = belljar("toolbox", "list", "--mcp-config", config)
    lines = [line.split(maxsplit=2) for line in outcome.out.splitlines()]
    assert lines[:2] == [["server", "tools", "about"], ["awkward", "32", "Handle with care."]]
    assert lines[2][:2] == ["missing", "0"]
    # The command is for the operator, who reads this, and not for sessions.
    assert "cannot be started: No such file or directory (Cannot start /" in lines[2][2]
    assert outcome.code == 1


def test_a_search_prints_signatures_best_first(belljar: Run, config: str) -> None:
    outcome = belljar("toolbox", "search", "adding numbers", "--limit", "1", "--mcp-config", config)
    assert outcome.out == "servers.awkward.add(a: int, b: int) -> {sum: int}  # Adds.\n"
    assert "warning: MCP server missing cannot be started" in outcome.err
    assert outcome.code == 0


def test_a_call_prints_the_answer_and_its_status_says_how_it_went(belljar: Run, config: str, place: Path) -> None:
    outcome = belljar("toolbox", "call", "awkward", "media", "--out", str(place / "out"), "--mcp-config", config)
    assert (place / "out" / "image-1.png").read_bytes().startswith(b"\x89PNG")
    assert str(place / "out" / "image-1.png") in outcome.out
    (place / "out" / "image-1.png").write_text("mine")
    (place / "out" / "image-2.png").symlink_to(place / "elsewhere")
    again = belljar("toolbox", "call", "awkward", "media", "--out", str(place / "out"), "--mcp-config", config)
    assert (place / "out" / "image-1.png").read_text() == "mine"
    assert not (place / "elsewhere").exists()
    assert str(place / "out" / "image-3.png") in again.out
    failed = belljar("toolbox", "call", "awkward", "fail", '{"why": "because"}', "--mcp-config", config)
    assert (failed.code, failed.out, failed.err) == (1, "", "because\n")


@pytest.mark.parametrize("arguments", ["{", "[]", "3"])
def test_arguments_that_are_no_object_are_refused(belljar: Run, config: str, arguments: str) -> None:
    outcome = belljar("toolbox", "call", "missing", "x", arguments, "--mcp-config", config)
    assert outcome.code == 2
    assert outcome.err.startswith("error: the arguments are not")


def test_sync_writes_a_tree_and_leaves_what_it_did_not_write(belljar: Run, config: str, place: Path) -> None:
    outcome = belljar("toolbox", "sync", "--mcp-config", config)
    assert outcome.out == "wrote 32 tools of 2 servers to servers\n"
    assert "from .add import add  # Adds." in (place / "servers" / "awkward" / "__init__.py").read_text()
    again = belljar("toolbox", "sync", "--mcp-config", config)
    assert again.out == outcome.out
    for name in ("servers", "toolbox"):
        (place / "mine" / name).mkdir(parents=True)
        refused = belljar("toolbox", "sync", "mine", "--mcp-config", config)
        assert refused.code == 2
        assert f"mine/{name} is there and was not written by belljar" in refused.err
        assert [*(place / "mine").iterdir()] == [place / "mine" / name]
        (place / "mine" / name).rmdir()


def test_a_type_checker_finds_all_that_synced_code_imports(belljar: Run, config: str, place: Path) -> None:
    belljar("toolbox", "sync", "work", "--mcp-config", config)
    calls = "from servers.awkward import add\n\nprint(add(1, 2)['sum'] + 1)\nadd('1', 2)\n"
    (place / "work" / "calls.py").write_text(calls)
    (place / "work" / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(place / "work")]
    told = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    errors = [each for each in told if each["severity"] == "error"]
    assert [(Path(each["file"]).name, each["range"]["start"]["line"]) for each in errors] == [("calls.py", 3)]


def test_without_servers_there_is_a_hint(belljar: Run) -> None:
    outcome = belljar("toolbox", "list")
    assert outcome.code == 2
    assert "hint: Name a file with --mcp-config" in outcome.err
