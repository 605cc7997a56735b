"""The examples whose servers come from PyPI, and the model of Azure OpenAI that drives the toolbox."""

from typing import Any

import pytest
from example_runs import KEY, Show

from scripted_model import scripted_model

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
    if name == "04_control_flow":
        assert "Invalid timezone: 'No time zone found with key Mars/Olympus'\n" in out
    if name == "09_progressive_disclosure":
        assert "# Execute a SELECT query on the SQLite database\n" in out
    if name == "13_comparison":
        direct, code = (int(line.split()[-1].replace(",", "")) for line in out.strip().splitlines()[-2:])
        assert direct > 10 * code


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
