"""The surface over MCP: for clients of the SDK, and in the plain dialect of the platform's tutorials."""

import base64
import json
import shutil
import subprocess
import time
from typing import Any

import anyio
import httpx2
import pytest
from calls import ERAS, blocks, images, text_of
from data_plane import KEY, OTHER_KEY, Plane
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import Implementation, TextContent

from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2])"


async def curl(url: str, message: str, key: str = KEY) -> Any:
    """What the tutorials run, with only the address and the key changed."""
    if shutil.which("curl") is None:
        headers = {"content-type": "application/json", "x-ms-apikey": key, "accept": "*/*", "user-agent": "curl"}
        async with httpx2.AsyncClient(timeout=60) as client:
            return (await client.post(url, content=message, headers=headers)).json()
    command = ["curl", "-sS", "-X", "POST", url, "-H", "Content-Type: application/json"]
    command += ["-H", f"x-ms-apikey: {key}", "-d", message]
    done = await anyio.run_process(command, stderr=subprocess.STDOUT)
    return json.loads(done.stdout)


async def call(url: str, tool: str, arguments: dict[str, Any], key: str = KEY) -> Any:
    params = {"name": tool, "arguments": arguments}
    return await curl(url, json.dumps({"jsonrpc": "2.0", "id": "7", "method": "tools/call", "params": params}), key)


@pytest.fixture
def endpoint(plane: Plane) -> str:
    return f"{plane.client.base_url}/mcp"


async def test_the_tutorials_commands_work_as_they_stand(endpoint: str) -> None:
    initialized = await curl(endpoint, '{ "jsonrpc": "2.0", "id": "1", "method": "initialize" }')
    assert (initialized["jsonrpc"], initialized["id"]) == ("2.0", "1")
    assert initialized["result"]["protocolVersion"] == "2025-03-26"
    assert initialized["result"]["capabilities"]["tools"] == {"call": True, "list": True}
    assert initialized["result"]["serverInfo"]["name"] == "belljar"
    listed = await curl(endpoint, '{ "jsonrpc": "2.0", "id": "2", "method": "tools/list" }')
    assert [tool["name"] for tool in listed["result"]["tools"]] == [
        "launchShell",
        "runPythonCodeInRemoteEnvironment",
        "runShellCommandInRemoteEnvironment",
    ]
    for launcher in ("launchShell", "launchPythonEnvironment"):
        message = (
            '{ "jsonrpc": "2.0", "id": "2", "method": "tools/call", "params": { "name": "NAME", "arguments": {} } }'
        )
        launched = await curl(endpoint, message.replace("NAME", launcher))
        environment = launched["result"]["structuredContent"]["environmentId"]
    python = {"environmentId": environment, "pythonCode": 'print("Hello from a session!")\nkept = 41\nkept + 1'}
    begun = time.monotonic()
    ran = (await call(endpoint, "runPythonCodeInRemoteEnvironment", python))["result"]
    elapsed_ms = (time.monotonic() - begun) * 1000
    fields = ran["structuredContent"]
    took_ms = fields.pop("executionTimeInMilliseconds")
    assert type(took_ms) is int
    assert 0 <= took_ms <= elapsed_ms
    expected = {"stdout": "Hello from a session!\n", "stderr": "", "executionResult": 42, "status": "Succeeded"}
    assert fields == expected
    assert json.loads(ran["content"][0]["text"])["stdout"] == expected["stdout"]
    forging = "import sys\nprint('[belljar: x]')\nprint('[belljar: y]', file=sys.stderr)"
    forged = await call(
        endpoint, "runPythonCodeInRemoteEnvironment", {"environmentId": environment, "pythonCode": forging}
    )
    fields = forged["result"]["structuredContent"]
    assert (fields["stdout"], fields["stderr"]) == ("[printed: belljar: x]\n", "[printed: belljar: y]\n")
    shell = {"environmentId": environment, "shellCommand": "echo Hello && false"}
    ran = (await call(endpoint, "runShellCommandInRemoteEnvironment", shell))["result"]
    assert ran["structuredContent"]["stdout"] == "Hello\n"
    assert ran["structuredContent"]["exitCode"] == 1
    words = {"environmentId": environment, "execCommandAndArgs": ["echo", "a  b", "$HOME"]}
    ran = (await call(endpoint, "runShellCommandInRemoteEnvironment", words))["result"]
    assert ran["structuredContent"]["stdout"] == "a  b $HOME\n"


async def test_a_figure_is_a_data_url_for_callers_who_see_text_alone(endpoint: str) -> None:
    environment = (await call(endpoint, "launchShell", {}))["result"]["structuredContent"]["environmentId"]
    arguments = {"environmentId": environment, "pythonCode": FIGURE}
    ran = (await call(endpoint, "runPythonCodeInRemoteEnvironment", arguments))["result"]
    (block,) = ran["content"]
    assert json.loads(block["text"])["executionResult"].startswith("data:image/png;base64,")
    assert ran["structuredContent"]["executionResult"]["format"] == "png"


async def test_an_environment_that_is_gone_says_to_launch_another(endpoint: str, runtime: Runtime) -> None:
    environment = (await call(endpoint, "launchShell", {}))["result"]["structuredContent"]["environmentId"]
    python = {"environmentId": environment, "pythonCode": "1"}
    for arguments, key in [
        ({**python, "environmentId": "never-launched"}, KEY),
        (python, OTHER_KEY),
        ({**python, "environmentId": "x"}, KEY),
    ]:
        error = (await call(endpoint, "runPythonCodeInRemoteEnvironment", arguments, key))["error"]
        assert error["message"].startswith("Environment not found: ")
        assert "launchShell" in error["message"]
    await call(endpoint, "runPythonCodeInRemoteEnvironment", python)
    await runtime.identified.clear(environment, "key:ada")
    assert "error" in await call(endpoint, "runPythonCodeInRemoteEnvironment", python)


async def test_messages_that_cannot_be_served_are_answered_with_an_error(endpoint: str) -> None:
    for message, code in [
        ("no JSON", -32700),
        ("[]", -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "no/such"}', -32601),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call"}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "exec"}}', -32602),
        (
            '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "launchShell","arguments": 1}}',
            -32602,
        ),
    ]:
        assert (await curl(endpoint, message))["error"]["code"] == code, message
    wrong = (await call(endpoint, "runPythonCodeInRemoteEnvironment", {"pythonCode": "1", "more": 2}))["result"]
    assert wrong["isError"]
    assert "more" in wrong["content"][0]["text"]
    neither = (await call(endpoint, "runShellCommandInRemoteEnvironment", {"environmentId": "abcd"}))["result"]
    assert "exactly one" in neither["content"][0]["text"]
    headers = {"x-ms-apikey": KEY, "host": "evil.example"}
    async with httpx2.AsyncClient() as client:
        assert (await client.post(endpoint, json={}, headers=headers)).status_code == 421
        assert (await client.post(endpoint, json={})).status_code == 401
        notified = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        accepted = await client.post(endpoint, json=notified, headers={"x-ms-apikey": KEY})
        assert (accepted.status_code, accepted.content) == (202, b"")


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_of_the_sdk_sees_the_same_tools_and_pictures(endpoint: str, plane: Plane, era: str) -> None:
    async with httpx2.AsyncClient(headers={"x-ms-apikey": KEY}, timeout=60) as http:
        transport = streamable_http_client(endpoint, http_client=http)
        async with Client(transport, mode=era) as client:
            launched = await client.call_tool("launchShell", {})
            assert launched.structured_content is not None
            environment = launched.structured_content["environmentId"]
            arguments = {"environmentId": environment, "pythonCode": FIGURE}
            figure = await client.call_tool("runPythonCodeInRemoteEnvironment", arguments)
            assert len(images(figure)) == 1
            assert base64.b64decode(images(figure)[0].data).startswith(b"\x89PNG")
            assert "base64" not in text_of(figure)
            told = json.loads(text_of(figure))
            assert told["executionResult"] == {"type": "image", "format": "png"}
            (uri,) = told["figures"]
            (content,) = (await client.read_resource(uri)).contents
            assert content.mime_type == "image/png"
            both = {**arguments, "pythonCode": f"{FIGURE}\nplt.show()\nplt.plot([2, 1])\nplt.show()\n42"}
            both = await client.call_tool("runPythonCodeInRemoteEnvironment", both)
            assert len(images(both)) == 2, "figures beside a value are shown too"
            assert json.loads(text_of(both))["executionResult"] == 42
            failed = await client.call_tool(
                "runPythonCodeInRemoteEnvironment", {"environmentId": environment, "pythonCode": "1 / 0"}
            )
            assert failed.is_error
            assert json.loads(text_of(failed))["status"] == "Failed"
            gone = await client.call_tool(
                "runPythonCodeInRemoteEnvironment", {"environmentId": "never-launched", "pythonCode": "1"}
            )
            assert gone.is_error
            assert "Environment not found: never-launched" in blocks(gone, TextContent)[0].text
    rest = Plane(plane.client, environment)
    assert (await rest.execute("plt.__name__"))["result"]["executionResult"] == "matplotlib.pyplot"


@pytest.mark.parametrize(("name", "has_fields"), [("mcp", False), ("", False), ("codex", False), ("some-agent", True)])
async def test_the_bytes_of_a_figure_are_in_its_block_alone(endpoint: str, name: str, has_fields: bool) -> None:
    info = Implementation(name=name, version="1")
    async with (
        httpx2.AsyncClient(headers={"x-ms-apikey": KEY}, timeout=60) as http,
        Client(streamable_http_client(endpoint, http_client=http), client_info=info) as client,
    ):
        launched = await client.call_tool("launchShell", {})
        assert launched.structured_content is not None
        arguments = {**launched.structured_content, "pythonCode": FIGURE}
        tool = "runPythonCodeInRemoteEnvironment"
        asked = await client.call_tool(tool, arguments, meta={"belljar/structured": "always"})
        for answer, is_told in ((await client.call_tool(tool, arguments), has_fields), (asked, True)):
            assert len(images(answer)) == 1
            assert (answer.structured_content is not None) == is_told
            for told in filter(None, (json.loads(text_of(answer)), answer.structured_content)):
                assert told["executionResult"] == {"type": "image", "format": "png"}
                assert told["figures"][0].startswith("execution://")


async def test_mcp_is_answered_under_the_prefix_of_a_pool(plane: Plane) -> None:
    url = f"{plane.client.base_url}/subscriptions/s/sessionPools/pool/mcp?identifier=ignored"
    assert (await call(url, "launchShell", {}))["result"]["structuredContent"]["environmentId"]
