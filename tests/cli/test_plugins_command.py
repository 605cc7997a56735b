import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"


def test_plugins_are_listed_with_what_they_hook_into(belljar: Callable[..., Any]):
    listed = belljar("plugins", "--plugins-directory", str(EXAMPLES), "--json")
    records = {record["name"]: record for record in json.loads(listed.out)}
    assert listed.code == 0
    assert records["mail_domain"]["hooks"] == ["judge_tool_call"]
    assert records["mail_domain"]["origin"] == str(EXAMPLES / "mail_domain.py")
    assert records["csv_profile_step"]["hooks"] == ["workflow_step_types"]
    assert records["sandboxes"]["origin"] == "belljar"
    assert records["policy"]["hooks"] == ["judge_tool_call", "judge_code", "screen_output"]


def test_a_plugin_that_fails_is_named_and_the_command_says_so(belljar: Callable[..., Any], place: Path):
    folder = place / "plugins"
    folder.mkdir(mode=0o755)
    (folder / "broken.py").write_text("raise RuntimeError('no licence')\n")
    (folder / "thief.py").write_text(
        "from belljar.hooks import hookimpl\n@hookimpl\ndef sandbox_providers(settings): return {'namespace': object}\n"
    )
    listed = belljar("plugins", "--plugins-directory", str(folder))
    assert listed.code == 1
    assert "RuntimeError: no licence" in listed.out
    assert "'namespace' is belljar's own and cannot be replaced" in listed.out


def test_a_folder_that_is_not_there_is_an_error(belljar: Callable[..., Any]):
    listed = belljar("plugins", "--plugins-directory", "nowhere")
    assert listed.code == 2
    assert "cannot be read" in listed.err
