import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_each_setting_is_a_line_with_its_origin(belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("belljar.toml").write_text("max_queue = 3")
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
    assert {"name", "value", "origin", "description", "ignored"} == set(lines[0])
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
