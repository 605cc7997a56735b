"""The examples, each run as its reader would run it, but in this process: starting one takes seconds otherwise."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import iscoroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from uv import find_uv_bin

from belljar.environments import Environment
from scripted_model import scripted_model

EXAMPLES = Path(__file__).parents[2] / "examples"
Show = Callable[..., str]
KEY = "s3cret-key"


@pytest.fixture(scope="module")
def servers() -> None:
    """The servers from PyPI, fetched before a test's own clock runs."""
    for pins, package in (([], "mcp-server-time"), (["--with", "mcp<2"], "mcp-server-sqlite")):
        command = [find_uv_bin(), "tool", "run", *pins, package, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        if done.returncode:
            pytest.skip(f"no package index in reach: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture
def show(
    default_environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Show]:
    """Runs an example in an empty working directory, and returns what it prints."""
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", str(default_environment.python))
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path / "data"))
    monkeypatch.setenv("BELLJAR_FORK_START", "false")
    monkeypatch.setenv("BELLJAR_PRELOAD", "json")  # the usual modules take two seconds of a processor
    monkeypatch.setenv("BELLJAR_LOG_LEVEL", "ERROR")
    for name in ("PLUGINS_DIRECTORY", "MCP_SERVERS"):  # one example sets them
        monkeypatch.setenv(f"BELLJAR_{name}", "")
        monkeypatch.delenv(f"BELLJAR_{name}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])

    def run(name: str, *arguments: str) -> str:
        if name == "12_complex_workflow":  # its branches run in forks
            monkeypatch.delenv("BELLJAR_FORK_START")
        main: Any = importlib.import_module(name).main
        try:
            if iscoroutine(started := main(*arguments)):

                async def wait() -> None:
                    await started

                anyio.run(wait)
        except SystemExit as end:
            if end.code not in (None, 0):
                pytest.fail(f"{name} ended with {end.code}: {capfd.readouterr()}")
        said = capfd.readouterr()
        assert KEY not in said.err
        return said.out

    yield run
    for name in [name for name in sys.modules if name in ("shared", "azure_agent") or re.match(r"\d\d_", name)]:
        del sys.modules[name]


pytestmark = [pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("01_basic_tool_call", "20:00 in Tokyo when it is noon in Oslo"),
        ("02_multi_tool_chaining", "BJ1 from Asia/Tokyo leaves at 00:30 UTC"),
        ("03_data_filtering", "5,000 rows came, none was printed\n"),
        ("04_control_flow", "Mars/Olympus: skipped"),
        ("09_progressive_disclosure", "a search, names only: "),
        ("10_privacy", "the code sees [EMAIL_1]\nthe database has ada@example.com"),
        ("13_comparison", "direct tool calls"),
    ],
)
@pytest.mark.usefixtures("servers")
def test_an_example_with_servers_from_pypi_says_what_it_promises(show: Show, name: str, said: str) -> None:
    out = show(name)
    assert said in out
    if name == "13_comparison":
        direct, code = (int(line.split()[-1].replace(",", "")) for line in out.strip().splitlines()[-2:])
        assert direct > 10 * code


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("05_workflow", '"squares"'),
        ("06_form_filling", "sent -> Booked token=7f3a, name=Ada, nights=3, room=double, rules=on"),
        ("07_state_persistence", "went on at page 4 with ['a', 'b']"),
        ("08_skills", "used: 0.99 €"),
        ("11_custom_workflow_and_plugin", "not @example.com: send it to colleagues only"),
        ("12_complex_workflow", "budget 500, approved by Ada"),
    ],
)
def test_an_example_without_servers_says_what_it_promises(show: Show, name: str, said: str) -> None:
    assert said in show(name)


def test_a_model_of_azure_openai_drives_the_interpreter_with_what_a_env_file_says(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from datetime import date\nprint((date(2028, 3, 1) - date(2024, 2, 29)).days, date(2028, 3, 1).strftime('%A'))"
    )

    def answer(messages: list[dict[str, Any]], tools: list[str]) -> str:
        return f"There are {messages[-1]['content'].split()[0]} days."

    with scripted_model(
        lambda messages, tools: ("execute_code", "{not json"),
        lambda messages, tools: ("execute_code", {"code": code}),
        answer,
    ) as model:
        (tmp_path / ".env").write_text(f"AZURE_OPENAI_ENDPOINT={model.url}\nAZURE_OPENAI_API_KEY={KEY}\n")
        for name in ("ENDPOINT", "API_KEY", "CHAT_DEPLOYMENT_NAME", "API_VERSION"):
            monkeypatch.setenv(f"AZURE_OPENAI_{name}", "")
            monkeypatch.delenv(f"AZURE_OPENAI_{name}")
        out = show("14_azure_openai_interpreter")
    assert out == "-> execute_code\n-> execute_code\nThere are 1462 days.\n"
    assert model.paths[0] == "/openai/deployments/gpt-4o-mini/chat/completions?2024-08-01-preview"
    assert model.keys == [KEY] * 3
    told = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert told[0].startswith("the arguments are not JSON")
    assert told[1].startswith("1462 Wednesday")


@pytest.mark.usefixtures("servers")
def test_a_model_of_azure_openai_drives_the_toolbox_with_three_tools(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = (
        "from servers.time import convert_time\nfor zone in ('Asia/Tokyo', 'America/Lima'):\n"
        "    answer = convert_time(source_timezone='Europe/Oslo', time='12:00', target_timezone=zone)\n"
        "    print(zone, answer['target']['datetime'][11:16])"
    )
    seen: list[list[str]] = []

    def think(messages: list[dict[str, Any]], tools: list[str]) -> Any:
        seen.append(sorted(tools))
        told = messages[-1]["content"]
        if "Asia/Tokyo" in told:
            return told
        # A server that has just started may still be connecting when it is first looked for.
        found = "convert_time" in told or len(seen) > 2
        return ("execute_code", {"code": cell}) if found else ("search_tools", {"query": "convert a time"})

    with scripted_model(think) as model:
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", model.url)
        monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
        monkeypatch.setenv("AZURE_OPENAI_CHAT_DEPLOYMENT_NAME", "mine")
        out = show("15_azure_openai_toolbox")
    assert seen[0] == ["execute_code", "get_execution", "search_tools"]
    assert "Asia/Tokyo 20:00" in out
    assert model.paths[0].startswith("/openai/deployments/mine/")


def test_an_azure_example_without_a_key_says_what_to_set(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "")
    with pytest.raises(SystemExit, match="AZURE_OPENAI_ENDPOINT is not set: put AZURE_OPENAI_ENDPOINT and"):
        anyio.run(importlib.import_module("14_azure_openai_interpreter").main)
