import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import COMMANDS, command_groups, load_command
from belljar.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
ENTRIES = {(name,): entry for name, entry in COMMANDS.items()} | {
    (group, name): entry for group, table in command_groups().items() for name, entry in table.commands.items()
}


def test_the_settings_page_is_what_the_command_prints(belljar: Callable[..., Any]) -> None:
    assert PAGE.read_text("utf-8") == belljar("reference").out, "run: belljar reference > docs/reference/settings.md"


def test_the_page_of_commands_is_what_the_command_prints(belljar: Callable[..., Any]) -> None:
    page = PAGE.with_name("cli.md").read_text("utf-8")
    assert page == belljar("reference", "cli").out, "run: belljar reference cli > docs/reference/cli.md"


def test_the_page_has_every_setting_and_no_path_of_this_machine(belljar: Callable[..., Any], place: Path) -> None:
    text = belljar("reference").out
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## `{n}`" for n in Settings.model_fields
    ]
    assert str(place.parent) not in text


def test_every_help_fits_80_columns(belljar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ((), *((group,) for group in command_groups()), *ENTRIES):
        text = belljar(*words, "--help").out
        assert text.startswith("Usage: belljar ")
        assert [line for line in text.splitlines() if len(line) > 80] == [], words


def test_every_argument_and_option_has_its_help() -> None:
    for words, entry in ENTRIES.items():
        for name, parameter in inspect.signature(load_command(entry), eval_str=True).parameters.items():
            said = [getattr(note, "help", "") for note in getattr(parameter.annotation, "__metadata__", ())]
            assert any(said), f"belljar {' '.join(words)}: {name}"
