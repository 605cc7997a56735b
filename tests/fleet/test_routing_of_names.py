"""Names that callers choose for sessions mean the same at every server of a machine: Foundry's identifiers, Azure's."""

from collections.abc import Generator

import httpx2
import pytest
from calls import text_of
from mcp import Client
from workers import Workers, two_workers

from belljar.environments import Environment

pytestmark = pytest.mark.anyio
SURFACES = {"BELLJAR_SURFACES": "foundry,azure-mcp"}
COUNT = "n = globals().get('n', 0) + 1; n"
VERSION = "2025-10-02-preview"


@pytest.fixture(scope="module")
def named_workers(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with two_workers(default_environment, tmp_path_factory.mktemp("named"), **SURFACES) as pair:
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
