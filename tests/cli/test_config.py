import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import pytest

from belljar.settings import Settings, variable
from trusted_settings import write_trusted

Run = Callable[..., Any]
LISTS_AND_TABLES = {
    "environments": '{geo = {kind = "venv", path = "/srv/geo"}, net = {kind = "managed", requirements = ["networkx"]}}',
    "conda_channels": '["conda-forge", "https://mirror.example.com/main"]',
    "folders": '{sales = "/srv/sales", out = {path = "/srv/out", writable = true}}',
    "surfaces": '["interpreter", "foundry"]',
    "mcp_servers": '{files = {command = "files-server"}}',
    "blocked_patterns": """["os.system", "open(_, 'w*')", '_["key"]']""",
    "api_keys": '["alice:sha256:' + 64 * "a" + '"]',
    "oauth_scopes": '["read", "write"]',
    "allowed_hosts": '["one.example", "[::1]:8000"]',
    "allowed_origins": '["https://one.example"]',
    "console_operators": '["alice", "bob"]',
    "egress": '["packages", "[2001:db8::1]:443"]',
    "preload": '["numpy", "matplotlib.pyplot"]',
    "gpus": '["0", "GPU-6e4e17a9-9e84"]',
}
"""Every setting that is a list or a table, with a value as `belljar.toml` has it."""
SECRET = {"api_keys", "mcp_servers"}
"""`belljar config` prints no secrets, so what it prints of these cannot be a value."""


def test_each_setting_is_a_line_with_its_origin(belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trusted("max_queue = 3")
    monkeypatch.setenv("BELLJAR_API_KEYS", "alice:hunter2")
    outcome = belljar("config")
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0] == ["setting", "value", "from"]
    assert ["max_queue", "3", str(place / "belljar.toml")] in lines
    assert ["api_keys", '["alice:********"]', "BELLJAR_API_KEYS"] in lines
    assert ["sandbox", '"namespace"', "default"] in lines
    assert f"read: {place / 'belljar.toml'}" in outcome.err
    assert outcome.code == 0


def test_json_has_the_same_and_the_descriptions(belljar: Run) -> None:
    lines = json.loads(belljar("config", "--json").out)
    assert {"name", "value", "origin", "description"} == set(lines[0])
    assert {line["name"]: line["value"] for line in lines}["session_idle_s"] == 1800


def test_a_slip_of_the_pen_in_a_variable_is_pointed_out(belljar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_SANDBOXX", "process")
    monkeypatch.setenv("BELLJAR_SECRET_TOKEN", "x")
    told = belljar("config").err
    assert "warning: BELLJAR_SANDBOXX is set and is no setting" in told
    assert "SECRET" not in told


def test_a_setting_that_cannot_be_used_ends_with_its_error(belljar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_MAX_QUEUE", "0")
    outcome = belljar("config")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith('error: max_queue = "0" from BELLJAR_MAX_QUEUE')
    assert "hint: max_queue takes a whole number, at least 1" in outcome.err


def of_class(*kinds: type) -> list[str]:
    return [name for name, field in Settings.model_fields.items() if get_origin(field.annotation) in kinds]


def shown(belljar: Run, name: str) -> str:
    """The value that `belljar config` prints of a setting."""
    outcome = belljar("config")
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith(f"{name} ")]
    return line.partition(" ")[2].strip().rsplit("  ", 1)[0].strip()


@pytest.mark.parametrize("name", [name for name in of_class(list, dict) if name not in SECRET])
def test_what_config_prints_of_a_list_is_taken_as_its_variable(
    belljar: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path("mine.toml").absolute()
    file.write_text(f"{name} = {LISTS_AND_TABLES[name]}\n")
    for config in (str(file), ""):  # the value that was written, and the default
        monkeypatch.setenv("BELLJAR_CONFIG", config)
        monkeypatch.delenv(variable(name), raising=False)
        printed = shown(belljar, name)
        monkeypatch.delenv("BELLJAR_CONFIG")
        monkeypatch.setenv(variable(name), printed)
        assert shown(belljar, name) == printed


@pytest.mark.parametrize("name", [*of_class(list)])
def test_a_list_in_a_variable_is_json_or_has_commas(belljar: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tomllib.loads(f"value = {LISTS_AND_TABLES[name]}")["value"]
    monkeypatch.setenv(variable(name), json.dumps(entries))
    as_json = shown(belljar, name)
    if name != "blocked_patterns":
        monkeypatch.setenv(variable(name), ", ".join(entries))
        assert shown(belljar, name) == as_json
    monkeypatch.setenv(variable(name), json.dumps(entries)[:-1])
    told = belljar("config")
    assert (told.code, told.out) == (2, "")
    assert f"{variable(name)}: it is not JSON" in told.err
    assert "aaaa" not in told.err
