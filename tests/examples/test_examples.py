"""The examples that need no other server, and the model of Azure OpenAI that drives the interpreter."""

import importlib
from pathlib import Path
from typing import Any

import anyio
import pytest
from example_runs import KEY, Show

from scripted_model import scripted_model

pytestmark = [pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("05_workflow", '"squares"'),
        ("06_form_filling", "sent -> Booked token=7f3a, name=Ada, nights=3, room=double, rules=on"),
        ("07_state_persistence", "went on at page 4 with ['a', 'b']"),
    ],
)
def test_an_example_without_servers_says_what_it_promises(show: Show, name: str, said: str) -> None:
    assert said in show(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("08_skills", "used: 0.99 €"),
        ("11_custom_workflow_and_plugin", "not @example.com: send it to colleagues only"),
        ("12_complex_workflow", "budget 500, approved by Ada"),
    ],
)
def test_a_larger_example_says_what_it_promises(show: Show, name: str, said: str) -> None:
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


def test_an_azure_example_without_a_key_says_what_to_set(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "")
    with pytest.raises(SystemExit, match="AZURE_OPENAI_ENDPOINT is not set: put AZURE_OPENAI_ENDPOINT and"):
        anyio.run(importlib.import_module("14_azure_openai_interpreter").main)
