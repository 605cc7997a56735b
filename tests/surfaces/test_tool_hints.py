"""What tools claim of themselves: a tool that says it only reads changes nothing, not even whether a session sleeps."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from calls import Caller, connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio

# How each tool that reads is called, by the id of a session and of an execution.
READING: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "get_execution": lambda _, execution_id: {"execution_id": execution_id},
    "list_sessions": lambda _session_id, _execution_id: {},
    "list_session_files": lambda session_id, _: {"session_id": session_id},
    "check_installed_packages": lambda session_id, _: {"packages": ["ipython"], "session_id": session_id},
}


def state_of(runtime: Runtime, folder: Path) -> list[object]:
    """Everything that lasts: the journal, the files of sessions, which of them are awake and when they were used."""
    runtime.sessions.journal.commit()
    with closing(sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True)) as journal:
        dump = [*journal.iterdump()]
    files = sorted((str(path), path.lstat().st_mtime_ns) for path in (folder / "sessions").rglob("*"))
    return [
        dump,
        files,
        [(session.id, session.info().last_used_at, session.state) for session in runtime.sessions.all()],
    ]


async def test_every_tool_that_says_it_reads_is_tried_here(caller: Caller) -> None:
    tools = {tool.name: tool.annotations for tool in (await caller.client.list_tools()).tools}
    assert all(tools.values())
    assert {name for name, hints in tools.items() if hints and hints.read_only_hint} == READING.keys()


async def test_hints_are_true_for_sessions_awake_and_asleep(default_environment: Environment, tmp_path: Path) -> None:
    async with (
        opened_runtime(
            default_environment,
            tmp_path,
            hibernate=True,
            session_idle_s=0.001,
            sweep_interval_s=3600,
            pool_size=0,
            checkpoints=0,  # or one would be taken after the cell, while its session is looked at
        ) as runtime,
        connected(runtime) as caller,
    ):
        ran = await caller.execute("open('a.txt', 'w').write('a')")
        await _check(runtime, caller, tmp_path, ran.session_id, ran.execution_id)
        while not await runtime.sessions.sweep():
            pass
        await _check(runtime, caller, tmp_path, ran.session_id, ran.execution_id)
        assert runtime.sessions.all() == []


async def _check(runtime: Runtime, caller: Caller, folder: Path, session_id: str, execution_id: str) -> None:
    for name, arguments in READING.items():
        before = state_of(runtime, folder)
        await caller.fields(name, **arguments(session_id, execution_id))
        assert state_of(runtime, folder) == before, name


async def test_what_says_that_it_is_idempotent_changes_nothing_the_second_time(
    default_environment: Environment, tmp_path: Path
) -> None:
    def files() -> dict[str, str]:
        return {str(path): path.read_text() for path in (tmp_path / "sessions").rglob("*.txt")}

    async with opened_runtime(default_environment, tmp_path) as runtime, connected(runtime) as caller:
        session_id = await caller.new_session()
        seen: list[object] = []
        for _ in range(2):
            await caller.fields("upload_file", session_id=session_id, name="a.txt", text="a")
            seen.append(files())
        assert seen == [{str(next((tmp_path / "sessions").rglob("a.txt"))): "a"}] * 2
        await caller.fields("clear_session", session_id=session_id)
        cleared = state_of(runtime, tmp_path)
        await caller.refusal("clear_session", session_id=session_id)
        assert state_of(runtime, tmp_path) == cleared


async def test_templates_claim_a_type_only_where_all_resources_have_it(caller: Caller) -> None:
    templates = (await caller.client.list_resource_templates()).resource_templates
    assert {template.name: template.mime_type for template in templates} == {
        "file": None,
        "display": None,
        "output": "text/plain",
        "notebook": "application/x-ipynb+json",
    }


async def test_unknown_arguments_are_refused_by_name_and_null_stands_for_a_default(caller: Caller) -> None:
    said = await caller.refusal("execute_code", code="1", sesion_id="x")
    assert said.startswith("invalid-argument: execute_code has no argument 'sesion_id'. It takes code, session_id,")
    ran = await caller.call("execute_code", code="1", session_id=None, filename=None, wait_s=None, timeout_s=None)
    assert ran.is_error is False
    assert (await caller.call("execute_code", code=None)).is_error


async def test_code_that_raises_is_a_plain_result_where_the_settings_say_so(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with (
        opened_runtime(default_environment, tmp_path, failures_are_errors=False) as runtime,
        connected(runtime) as caller,
    ):
        answer = await caller.call("execute_code", code="1/0")
        assert answer.structured_content is not None
        assert (answer.is_error, answer.structured_content["status"]) == (False, "error")
        assert (await caller.call("execute_code", code="1", session_id="unknown")).is_error
