from collections.abc import Callable
from pathlib import Path
from typing import Any

from belljar.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


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
