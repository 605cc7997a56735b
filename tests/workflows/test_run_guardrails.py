"""Guardrails of workflows, step types of plugins, and two servers that see the same run."""

import json
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from workflow_texts import code, form, tool, workflow

from belljar.environments import Environment
from belljar.errors import BelljarError, WorkflowInvalid
from belljar.hooks import CodeStep, hookimpl
from belljar.journal.run_records import RunRecords
from belljar.runtime import Runtime, open_plugins, open_runtime
from belljar.settings import Settings
from belljar.workflows.definition import OWN_TYPES, StepKind, step_types
from belljar.workflows.live_run import LiveRun
from belljar.workflows.workflows import Workflows, workflows_of
from waiting import until

pytestmark = pytest.mark.anyio
LEDGER = Path(__file__).parents[1] / "ledger_server.py"


SHOUT = CodeStep(
    "shout",
    "config['text'].upper() + mark",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    repeat=True,
)


class Shouting:
    """A plugin that brings two step types, one of them in place of belljar's own."""

    @hookimpl
    def workflow_step_types(self) -> list[CodeStep]:
        return [SHOUT, replace(SHOUT, name="form")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    folder.chmod(0o755)
    servers = {"ledger": {"command": sys.executable, "args": [str(LEDGER), str(folder / "ledger")]}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    settings = Settings(
        environment=str(default_environment.python),
        data_directory=folder / "data",
        fork_start=False,
        preload=[],
        pool_size=0,
        log_level="ERROR",
        workflow_hold_s=0.2,
        mcp_config=str(folder / "mcp.json"),
    )
    async with open_runtime(settings) as runtime:
        yield runtime


async def ran(workflows: Workflows, text: str) -> Any:
    run = await workflows.start(workflows.library.from_text(text), "local")
    await settled(run)
    return workflows.show(run.id, "local")


def another(runtime: Runtime, server: str, types: Mapping[str, StepKind]) -> Workflows:
    """The workflows of another server on the same data directory."""
    return Workflows(runtime.sessions, RunRecords(runtime.sessions.journal, server), None, lambda _: True, types=types)


async def settled(run: LiveRun) -> None:
    with anyio.fail_after(60):
        while not run.is_over and run.state != "waiting":
            await run.wait_for_change(60)


async def test_guardrails_only_make_the_policy_stricter(runtime: Runtime):
    workflows = workflows_of(runtime)
    denied = {"tools": [{"match": "ledger.write", "decision": "deny", "reason": "not here"}]}
    info = await ran(workflows, workflow(tool("a", "write", text="x"), guardrails=denied))
    assert info.state == "failed"
    assert "not here" in info.reason
    inside = code("a", "from servers.ledger import write\nwrite(text='x')", guardrails=denied)
    info = await ran(workflows, workflow(inside))
    assert "not here" in info.reason
    assert not (runtime.settings.data_directory.parent / "ledger").exists()
    rules = {"code": [{"imports": ["socket"], "reason": "no sockets"}], "output": [{"text": "secret"}]}
    info = await ran(workflows, workflow(code("a", "import socket"), guardrails=rules))
    assert "no sockets" in info.reason
    info = await ran(
        workflows, workflow(code("a", "print('a secret')"), code("b", "steps['a']['stdout']"), guardrails=rules)
    )
    assert info.result == "a [removed]\n"
    slow = code("a", "import time\nwhile True: time.sleep(0.01)")
    info = await ran(workflows, workflow(slow, guardrails={"limits": {"max_execution_time": 0.3}}))
    assert "timeout" in str(info.steps[0].error)
    # Afterwards the session is as the server's policy has it.
    session = await runtime.sessions.reach(info.session_id, "local")
    assert session.screens() is not None
    with pytest.raises(WorkflowInvalid, match="not memory, GPUs or network"):
        await ran(workflows, workflow(slow, guardrails={"limits": {"max_memory_mb": 100}}))


async def test_personal_data_that_guardrails_name_is_hidden_in_the_whole_run(runtime: Runtime):
    workflows = workflows_of(runtime)
    mail, phone = "ann@example.com", "+41 44 668 18 00"
    show = code("show", f"who = '{mail}'\nprint(who, '{phone}')\nwho", guardrails={"privacy": {"hide": ["phone"]}})
    look = tool("look", "look", text="{{ show.result }}")
    info = await ran(workflows, workflow(show, look, code("end", "who"), guardrails={"tokenization": True}))
    assert info.result == "[EMAIL_1]", info.reason
    assert {step.step: step.result for step in info.steps}["look"] == "seen [EMAIL_1]"
    assert mail not in info.model_dump_json()
    assert phone not in info.model_dump_json()
    shown = await runtime.sessions.executions.notebook(info.session_id)
    assert "[PHONE_1]" in shown
    info = await ran(workflows, workflow(code("a", f"'{mail}'")))
    assert info.result == mail
    with pytest.raises(WorkflowInvalid, match="are hide, phone_regions, not 'reveal'"):
        await ran(workflows, workflow(show, guardrails={"privacy": {"reveal": [{"tools": ["*.*"]}]}}))
    regions = [{"privacy": {"hide": ["phone"], "phone_regions": each}} for each in (["DE", "CH", "US"], ["AT", "IT"])]
    steps = [code(f"step_{index}", "1", guardrails=each) for index, each in enumerate(regions)]
    with pytest.raises(WorkflowInvalid, match="5 phone_regions in all"):
        await ran(workflows, workflow(*steps))
    with pytest.raises(WorkflowInvalid, match=r"privacy.hide: 'mail' is none of email"):
        await ran(workflows, workflow(show, guardrails={"privacy": {"hide": ["mail"]}}))


async def test_switches_of_another_systems_files_become_rules(runtime: Runtime):
    workflows = workflows_of(runtime)
    strict = {"enabled": True, "strict_mode": True}
    info = await ran(workflows, workflow(tool("a", "look", text="x"), guardrails=strict))
    assert "no rule decides on it (strict)" in info.reason
    off = {**strict, "enabled": False, "blocked_patterns": ["os.getpid"]}
    info = await ran(workflows, workflow(tool("a", "look", text="x"), code("b", "import os"), guardrails=off))
    assert info.state == "done", info.reason
    blocked = {"blocked_patterns": ["os.system", "open(_, 'w*')"], "allowed_networks": [], "max_execution_time": 30}
    info = await ran(workflows, workflow(code("a", "open('x', 'w')"), guardrails=blocked))
    assert "one of blocked_patterns" in info.reason
    slow = code("a", "import time\nwhile True: time.sleep(0.01)")
    info = await ran(workflows, workflow(slow, guardrails={"max_execution_time": 0.3}))
    assert "timeout" in str(info.steps[0].error)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_memory_mb": 512}, "not memory, GPUs or network"),
        ({"allowed_networks": ["example.com"]}, "not memory, GPUs or network"),
        ({"strict_mode": "yes"}, "strict_mode is neither true nor false"),
        ({"blocked_patterns": [1]}, "blocked_patterns is no list of texts"),
        ({"blocked_patterns": ["a +"]}, "blocked_patterns: "),
        ({"pii_detections": True}, "no key 'pii_detections'"),
        ({"tokenization": True, "privacy": []}, "privacy"),
    ]
    for wrong, told in refused:
        with pytest.raises(WorkflowInvalid, match=told):
            await ran(workflows, workflow(slow, guardrails=wrong))


async def test_what_guardrails_ask_about_waits_for_a_person(runtime: Runtime):
    workflows = workflows_of(runtime)
    rules = {"code": [{"decision": "ask", "calls": ["os.getpid"], "reason": "curious"}]}
    info = await ran(workflows, workflow(code("a", "import os\nos.getpid() > 0"), guardrails=rules))
    assert info.state == "waiting"
    assert "May step a run?" in info.questions[0].message
    run = await workflows.answer(info.run, "local", {})
    if run is not None:
        await settled(run)
    await until(lambda: workflows.show(info.run, "local").state == "done")
    assert workflows.show(info.run, "local").result is True


async def test_a_step_type_of_a_plugin_runs_in_the_session(runtime: Runtime):
    plugins = open_plugins(runtime.settings)
    plugins.add("shouting", Shouting(), "a test")
    workflows = another(runtime, "other", step_types(plugins))
    step = {"name": "a", "type": "shout", "config": {"text": "{{ word }}"}}
    info = await ran(workflows, workflow(step, variables={"word": "hey", "mark": "!"}))
    assert (info.state, info.result) == ("done", "HEY!")
    with pytest.raises(WorkflowInvalid, match="'text' is a required property"):
        await ran(workflows, workflow({"name": "a", "type": "shout", "config": {}}))
    assert "'form' is belljar's own and cannot be replaced" in plugins.records[-1].error
    asking = await ran(workflows, workflow(form("ask", "Go on?")))
    assert asking.state == "waiting"


async def test_two_servers_never_take_one_run(runtime: Runtime):
    """Both see it free at the same moment; one gets it."""
    workflows = workflows_of(runtime)
    info = await ran(workflows, workflow(form("ask", "Go on?"), code("a", "1")))
    await until(lambda: not workflows.record(info.run, "local").server)
    one, other = (another(runtime, name, {kind.name: kind for kind in OWN_TYPES}) for name in ("one", "other"))
    seen = workflows.record(info.run, "local")
    claims = [each._records.claim(seen) for each in (one, other, workflows)]  # pyright: ignore[reportPrivateUsage]
    assert claims == [True, False, False]
    with pytest.raises(BelljarError, match="driven by another server"):
        await other.resume(info.run, "local")
