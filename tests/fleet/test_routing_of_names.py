"""Names that callers choose for sessions mean the same at every server of a machine: Foundry's identifiers, Azure's."""

import json
from collections.abc import Generator

import httpx2
import pytest
from calls import MODERN, text_of
from mcp import Client
from workers import Workers, two_workers

from belljar.environments import Environment
from serving_process import COLD

pytestmark = pytest.mark.anyio
SURFACES = {"BELLJAR_SURFACES": "foundry,azure-mcp"}
COUNT = "n = globals().get('n', 0) + 1; n"
VERSION = "2025-10-02-preview"


@pytest.fixture(scope="module")
def named_workers(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with two_workers(default_environment, tmp_path_factory.mktemp("named"), **SURFACES) as pair:
        yield pair


@pytest.fixture(scope="module")
def executor_workers(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    chosen = {
        "BELLJAR_SURFACES": "executor",
        "BELLJAR_ENVIRONMENTS": json.dumps({"own": {"kind": "venv", "path": str(default_environment.prefix)}}),
    }
    with two_workers(default_environment, tmp_path_factory.mktemp("executor"), **COLD, **chosen) as pair:
        yield pair


async def test_one_identifier_is_one_session(named_workers: Workers):
    async with httpx2.AsyncClient(timeout=60) as client:
        for name in ("first-name", "second-name", "third-name", "fourth-name"):
            values: list[str] = []
            for number in (1, 2, 2, 1):
                body = {
                    "code": "n = globals().get('n', 0) + 1; n",
                    "codeInputType": "Inline",
                    "executionType": "Synchronous",
                }
                address = f"{named_workers.urls[number]}/executions?api-version={VERSION}&identifier={name}"
                answer = await client.post(address, json=body)
                assert answer.status_code in (200, 202), answer.text
                values.append(str(answer.json()["result"]["executionResult"]))
            assert values == ["1", "2", "3", "4"]
            uploaded = await client.post(
                f"{named_workers.urls[1]}/files?api-version={VERSION}&identifier={name}",
                files={"file": ("up.bin", b"x" * 2_000_000)},
            )
            assert uploaded.status_code < 300, uploaded.text
            content = await client.get(
                f"{named_workers.urls[2]}/files/up.bin/content?api-version={VERSION}&identifier={name}"
            )
            assert len(content.content) == 2_000_000


async def test_a_principal_has_one_current_session_where_the_protocol_has_no_connections(named_workers: Workers):
    seen: list[str] = []
    for number in (1, 2, 2, 1):
        async with Client(f"{named_workers.urls[number]}/mcp/azure-mcp", mode="2026-07-28") as client:
            found = await client.call_tool("exec", {"code": "m = globals().get('m', 0) + 1; print('m =', m)"})
            seen.append(text_of(found))
    assert [f"m = {number}" in text for number, text in enumerate(seen, 1)] == [True] * 4, seen


async def test_an_environment_that_was_launched_is_known_at_every_server(named_workers: Workers):
    async with Client(f"{named_workers.urls[1]}/mcp/foundry", mode="2026-07-28") as client:
        launched = await client.call_tool("launchShell", {})
        assert launched.structured_content is not None
        environment = launched.structured_content["environmentId"]
    for number in (1, 2):
        async with Client(f"{named_workers.urls[number]}/mcp/foundry", mode="2026-07-28") as client:
            arguments = {"environmentId": environment, "pythonCode": f"print({number})"}
            found = await client.call_tool("runPythonCodeInRemoteEnvironment", arguments)
            assert not found.is_error, found


@pytest.mark.parametrize("era", ["legacy", "2026-07-28"])
async def test_code_files_are_run_and_read_at_whichever_server(executor_workers: Workers, era: str):
    async with executor_workers.client(1, era) as one, executor_workers.client(2, era) as two:
        for first, second in ((one, two), (two, one)):
            made = await first.fields("initialize_code_file", content="print(6 * 7)\n", filename="counted")
            path = made["file_path"]
            assert (await second.fields("append_to_code_file", file_path=path, content="print('more')"))["status"]
            assert (await second.fields("execute_code_file", file_path=path))["output"] == "42\nmore\n"
            assert "more" in str(await first.fields("read_code_file", file_path=path))


async def test_an_environment_that_was_chosen_is_so_where_the_protocol_has_no_connections(
    executor_workers: Workers, default_environment: Environment
):
    async with executor_workers.client(1, MODERN) as one, executor_workers.client(2, MODERN) as two:
        await one.fields("configure_environment", type="venv", venv_path=str(default_environment.prefix))
        seen = [await caller.fields("get_environment_config") for caller in (one, two)]
    assert seen[0] == seen[1]
    assert seen[0]["config"]["type"] == "venv"
