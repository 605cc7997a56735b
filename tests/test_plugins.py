"""Plugins without a server: found in packages and files, called, and named where they fail."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from belljar import hooks, plugins
from belljar.errors import PluginFailed, SettingsError
from belljar.hooks import CellFacts, CodeStep, ToolCallFacts, Verdict
from belljar.plugins import Plugins, load_plugins

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"
CALL = ToolCallFacts("session", "me", "mail", "send", {"to": ["ann@example.com"]})
CELL = CellFacts("session", "me", "execution", "1 + 1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "plugins"
    place.mkdir(mode=0o755)
    return place


def write(folder: Path, name: str, body: str) -> None:
    head = "from belljar.hooks import *\nfrom belljar.hooks import hookimpl\n"
    (folder / f"{name}.py").write_text(head + textwrap.dedent(body))


def loaded(folder: Path) -> Plugins:
    return load_plugins(hooks, str(folder), with_packages=False)


def errors(found: Plugins) -> dict[str, str]:
    return {record.name: record.error for record in found.records}


def own(verdict: Verdict, counted: list[Verdict] | None = None) -> Callable[[], Awaitable[Verdict]]:
    async def judge() -> Verdict:
        if counted is not None:
            counted.append(verdict)
        return verdict

    return judge


def test_every_hook_says_in_one_line_what_it_is_for():
    for name in Plugins(hooks).hooks:
        (line,) = (getattr(hooks, name).__doc__ or "").strip().splitlines()
        assert line.endswith("."), name


def test_files_of_the_folder_are_plugins_and_a_file_that_fails_is_named_alone(folder: Path):
    write(folder, "good", "@hookimpl\ndef judge_code(cell):\n    return None\n")
    write(folder, "broken", "raise RuntimeError('no licence')\n")
    write(folder, "leaving", "import sys\nsys.exit(3)\n")
    write(folder, "unclear", "def judge_code(:\n")
    write(folder, "typing", "@hookimpl\ndef judge_codes(cell):\n    pass\n")
    write(folder, "extra", "@hookimpl\ndef judge_code(cell, mood):\n    pass\n")
    write(folder, "empty", "")
    write(folder, "_helper", "raise RuntimeError('not a plugin')\n")
    found = errors(loaded(folder))
    assert found.pop("good") == ""
    assert found.pop("broken") == "RuntimeError: no licence"
    assert found.pop("leaving") == "SystemExit: 3"
    assert found.pop("unclear").startswith("SyntaxError: ")
    assert found.pop("typing") == "ValueError: there is no hook judge_codes, only judge_code"
    assert "mood" in found.pop("extra")
    assert "implements no hook" in found.pop("empty")
    assert found == {}


def test_what_everybody_can_write_is_not_run(folder: Path):
    write(folder, "shared", "@hookimpl\ndef judge_code(cell): return None\n")
    (folder / "shared.py").chmod(0o666)
    assert "everybody can write it" in errors(loaded(folder))["shared"]
    folder.chmod(0o777)
    with pytest.raises(SettingsError, match="can be written by everybody"):
        loaded(folder)
    with pytest.raises(SettingsError, match="cannot be read"):
        loaded(folder / "nowhere")


async def test_the_strictest_verdict_counts_and_plugins_come_before_the_policy(folder: Path):
    write(folder, "a", "@hookimpl\ndef judge_tool_call(call): return Verdict('ask', 'it costs money')\n")
    write(folder, "b", "@hookimpl\nasync def judge_tool_call(): return Verdict('allow')\n")
    found = loaded(folder)
    verdict = await found.judge_tool_call(CALL, own(Verdict("allow")))
    assert verdict == Verdict("ask", "the plugin a: it costs money", "plugin:a")
    verdict = await found.judge_tool_call(CALL, own(Verdict("ask", "it may destroy", "destructive")))
    assert verdict == Verdict("ask", "the plugin a: it costs money; it may destroy", "destructive")
    assert (await found.judge_tool_call(CALL, own(Verdict("deny", "no", "tools.1")))).rule == "tools.1"
    write(folder, "c", "@hookimpl\ndef judge_tool_call(call): return Verdict('deny', 'never')\n")
    counted: list[Verdict] = []
    verdict = await loaded(folder).judge_tool_call(CALL, own(Verdict("allow"), counted))
    assert (verdict.decision, counted) == ("deny", [])  # what a plugin refuses does not count towards the policy


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise KeyError('to')", "judge_tool_call: KeyError: 'to'"),
        ("return 'deny'", "judge_tool_call: it returned str; a Verdict is one of allow, warn, ask, deny"),
        ("return Verdict('maybe')", "judge_tool_call: it returned a Verdict of 'maybe'; a Verdict is one of"),
    ],
)
async def test_a_guardrail_that_fails_refuses(folder: Path, body: str, told: str):
    write(folder, "guard", f"@hookimpl\ndef judge_tool_call(call):\n    {body}\n")
    found = loaded(folder)
    verdict = await found.judge_tool_call(CALL)
    assert verdict.decision == "deny"
    assert "the plugin guard failed" in verdict.reason
    assert errors(found)["guard"].startswith(told)


async def test_a_hook_that_hangs_refuses_and_holds_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch):
    body = "import threading\nforever = threading.Event()\n@hookimpl\ndef judge_code(cell): forever.wait()\n"
    write(folder, "slow", body)
    monkeypatch.setattr(plugins, "HOOK_S", 0.05)
    found = loaded(folder)
    began = time.monotonic()
    (verdict,) = await found.judge_code(CELL)
    assert verdict.decision == "deny"
    assert "took over 0.05 s" in verdict.reason
    assert time.monotonic() - began < 5
    sys.modules["belljar_plugin_slow"].forever.set()
    await found.aclose()


async def test_a_plugin_may_change_arguments_and_refuses_a_call_where_it_fails(folder: Path):
    write(folder, "tenant", "@hookimpl\ndef before_tool_call(call): return {**call.arguments, 'tenant': 7}\n")
    changed = await loaded(folder).before_tool_call(CALL)
    assert changed.arguments == {**CALL.arguments, "tenant": 7}
    write(folder, "wrong", "@hookimpl\ndef before_tool_call(call): return 3\n")
    with pytest.raises(PluginFailed, match="the plugin wrong failed before the call"):
        await loaded(folder).before_tool_call(CALL)


def test_no_plugin_takes_the_name_of_a_built_in_or_of_another_plugin(folder: Path):
    class Own:
        @hooks.hookimpl
        def workflow_step_types(self) -> list[Any]:
            return [CodeStep("form", "")]

    write(folder, "a", "@hookimpl\ndef workflow_step_types(): return [CodeStep('form', '0'), CodeStep('mine', '1')]\n")
    write(folder, "b", "@hookimpl\ndef workflow_step_types(): return [CodeStep('mine', '2')]\n")
    write(folder, "c", "@hookimpl\ndef workflow_step_types(): return [3]\n")
    found = loaded(folder)
    found.add("workflow steps", Own())
    types = found.named("workflow_step_types")
    assert {name: step.code for name, step in types.items()} == {"form": "", "mine": "1"}
    assert "'form' is belljar's own and cannot be replaced" in errors(found)["a"]
    assert "'mine' is of the plugin a" in errors(found)["b"]
    assert "without a name" in errors(found)["c"]


async def test_the_example_guardrail_keeps_mail_within_the_domain():
    found = loaded(EXAMPLES)
    assert not any(errors(found).values())

    async def decision(to: object, *, has_values: bool = False) -> str:
        call = ToolCallFacts("session", "me", "mail", "send", {"to": to}, has_values=has_values)
        return (await found.judge_tool_call(call)).decision

    assert await decision("ann@example.com") == "allow"
    assert await decision(["ann@example.com", "eve@elsewhere.org"]) == "deny"
    assert await decision([f"{number}@example.com" for number in range(11)]) == "ask"
    assert await decision("[EMAIL_1]") == "allow"
    assert await decision("eve@elsewhere.org", has_values=True) == "deny"


def test_the_example_step_is_listed_with_its_schema():
    step = loaded(EXAMPLES).named("workflow_step_types")["csv_profile"]
    assert step.config_schema["required"] == ["path"]
    assert step.repeat


def test_the_template_passes_its_own_tests():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    ended = subprocess.run([*command, "."], cwd=EXAMPLES / "template", capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_a_package_brings_a_plugin_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "acme_rules.py").write_text((EXAMPLES / "template/belljar_template.py").read_text())
    metadata = tmp_path / "acme_rules-2.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rules\nVersion: 2.1\n")
    (metadata / "entry_points.txt").write_text("[belljar]\nacme = acme_rules\ngone = acme_rules_gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    records = {record.name: record for record in load_plugins(hooks).records}
    assert records["acme"].origin == "acme-rules 2.1"
    assert records["acme"].hooks == ("judge_tool_call", "judge_code", "after_tool_call")
    assert records["gone"].error == "ModuleNotFoundError: No module named 'acme_rules_gone'"
