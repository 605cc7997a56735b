"""The real server as a process, over stdio and HTTP, with the official client in both protocol eras."""

import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from calls import ERAS, MODERN, NAMED, Caller, held, images, links, text_of
from mcp import Client
from mcp.types import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR, ElicitResult
from wires import opened_wire, tool_call

from belljar.environments import Environment
from serving_process import (
    COLD,
    alive,
    http_server,
    serve_command,
    serve_over_http,
    server_pid,
    stdio_server,
    tree,
    variables,
)
from waiting import until

pytestmark = pytest.mark.anyio
TRANSPORTS = ["stdio", "http"]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
# Everything a cell can do to the descriptors a server speaks over.
NOISE = (
    "import os, subprocess, sys\n"
    'print(\'{"jsonrpc": "2.0", "id": 1, "result": {}}\')\n'
    "os.write(1, b'Content-Length: 5\\r\\n\\r\\n{bad}\\n'); os.write(2, b'\\xff\\xfe\\n')\n"
    "subprocess.run(['sh', '-c', 'echo from a child; echo {} >&2'])\n"
    'sys.__stdout__.write(\'{"method": "ping"}\\n\')\n'
    "for descriptor in (0, 1, 2):\n"
    "  try:\n    with open(f'/proc/self/fd/{descriptor}', 'w') as file: file.write('through proc\\n')\n"
    "  except OSError: pass\n"
    "'quiet'"
)


@pytest.fixture(scope="module")
def http_url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with http_server(serve_over_http(default_environment), tmp_path_factory.mktemp("http")) as (url, _):
        yield f"{url}/mcp"


@asynccontextmanager
async def client_over(
    transport: str, environment: Environment, folder: Path, url: str, era: str, **options: Any
) -> AsyncGenerator[Caller]:
    server = stdio_server(environment, folder, **COLD) if transport == "stdio" else url
    async with Client(server, mode=era, client_info=NAMED, **options) as client:
        yield Caller(client)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_everything_works_over_the_wire(
    default_environment: Environment, tmp_path: Path, http_url: str, transport: str, era: str
):
    asked: list[str] = []
    done: list[float] = []

    async def person(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message.strip())
        return ElicitResult(action="accept", content={"answer": "Ada"})

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        done.append(progress)

    async with client_over(
        transport, default_environment, tmp_path, http_url, era, elicitation_callback=person
    ) as caller:
        assert len((await caller.client.list_tools()).tools) >= 12
        noisy = await caller.execute(NOISE)
        session_id = noisy.session_id
        assert (noisy.status, noisy.result) == ("ok", "'quiet'")
        assert "from a child\n" in noisy.stdout
        assert '{"method": "ping"}\n' in noisy.stdout
        answered = await caller.execute("input('Who? ')", session_id)
        assert answered.result == "'Ada'"
        assert asked == ["Who?"]
        arguments = {
            "code": "import time\nfor i in range(3): print(i, flush=True); time.sleep(0.3)",
            "session_id": session_id,
        }
        await caller.client.call_tool("execute_code", arguments, progress_callback=on_progress)
        assert done == sorted({*done})
        assert done
        code = f"import base64\npng = {PNG!r}\nopen('p.png', 'wb').write(base64.b64decode(png))\n"
        code += "display({'image/png': png}, raw=True)"
        answer = await caller.call("execute_code", code=code, session_id=session_id)
        assert len(images(answer)) == 1
        assert answer.structured_content is not None
        assert (await caller.read(links(answer)[0].uri)).mime_type == "image/png"
        big = await caller.execute("print('x' * 5_000_000)", session_id)
        assert big.truncated is not None
        assert big.truncated.total_bytes == 5_000_001
        part = await caller.read_text(f"{big.truncated.uri}?offset=4999990")
        assert part == "x" * 10 + "\n"
        failed = await caller.call("execute_code", code="1/0", session_id=session_id)
        assert failed.is_error
        assert "ZeroDivisionError" in text_of(failed)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_giving_up_a_call_over_the_wire_stops_its_cell_where_the_client_can_say_so(
    default_environment: Environment, tmp_path: Path, http_url: str, transport: str, era: str
):
    async with client_over(transport, default_environment, tmp_path, http_url, era) as caller:
        session_id = await caller.new_session()
        said = anyio.Event()

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            said.set()

        async def call() -> None:
            arguments = {"code": f"survived = 'no'\n{held()}survived = 'yes'", "session_id": session_id}
            await caller.client.call_tool("execute_code", arguments, progress_callback=on_progress)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            with anyio.fail_after(60):
                await said.wait()
            tasks.cancel_scope.cancel()
        # An HTTP client of the newest era closes its connection, and so does one that was lost.
        is_dropped = (transport, era) == ("http", MODERN)
        if is_dropped:
            await caller.release(session_id)
        assert (await caller.execute("survived", session_id)).result == ("'yes'" if is_dropped else "'no'")


async def test_sessions_outlive_an_http_connection(default_environment: Environment, http_url: str):
    async with Client(http_url, mode=MODERN) as client:
        running = await Caller(client).execute(held() + "'found again'", wait_s=0)
    async with Client(f"{http_url}/interpreter", mode="legacy") as client:
        caller = Caller(client)
        await caller.release(running.session_id)
        assert (await caller.ended(running.execution_id)).result == "'found again'"


async def test_a_stdio_server_leaves_nothing_behind(default_environment: Environment, tmp_path: Path):
    async with Client(stdio_server(default_environment, tmp_path), mode=MODERN) as client:
        caller = Caller(client)
        await caller.execute("import subprocess\nsubprocess.Popen(['sleep', '600']);")
        running = await caller.execute(held(), wait_s=0)
        assert running.status == "running"
        pids = tree(server_pid(tmp_path))
        assert len(pids) > 3
    await ended(pids)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_stdio_server_ends_when_its_input_does(default_environment: Environment, tmp_path: Path):
    finished = subprocess.run(
        serve_command(default_environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**variables(tmp_path), **COLD},
        timeout=60,
    )
    assert (finished.returncode, finished.stdout) == (0, b"")
    assert list((tmp_path / "runs").iterdir()) == []


def test_every_line_on_stdin_is_answered_with_its_id_or_null(default_environment: Environment, tmp_path: Path):
    def run(request_id: str, code: bytes) -> bytes:
        call = (
            b'{"jsonrpc": "2.0", "id": %s, "method": "tools/call", "params": '
            b'{"name": "execute_code", "arguments": {%s}}}'
        )
        return call % (request_id.encode(), code)

    lines: list[tuple[bytes, object, int]] = [
        (b"not json", None, PARSE_ERROR),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", ', 1, PARSE_ERROR),
        (b'{"params": {"id": 3}, "id": "a\\"b" "method"', 'a"b', PARSE_ERROR),
        (b'{"jsonrpc": "2.0", "params": {"id": 3}', None, PARSE_ERROR),
        (b"\xff\xfe", None, PARSE_ERROR),
        (run("4", b'"code": "\xff"'), 4, PARSE_ERROR),
        (run("5", b'"code": "\\ud800"'), 5, PARSE_ERROR),
        (run('"\\ud800"', b'"code": "1"'), None, PARSE_ERROR),
        (b"[" * 10_000, None, INVALID_REQUEST),
        (b"[]", None, INVALID_REQUEST),
        (b'[{"jsonrpc": "2.0", "id": 6, "method": "ping"}]', None, INVALID_REQUEST),
        (b"7", None, INVALID_REQUEST),
        (b'{"jsonrpc": "1.0", "id": 8, "method": "ping"}', 8, INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": 9}', 9, INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}', None, INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": 10.0, "method": "ping"}', 10, INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', None, INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', None, INVALID_REQUEST),
        (b'{"jsonrpc": "2.0", "id": 11, "method": "tools/call", "params": []}', 11, INVALID_PARAMS),
        (b'{"jsonrpc": "2.0", "id": 12, "method": "tools/call", "params": "x"}', 12, INVALID_PARAMS),
        (b'{"jsonrpc": "2.0", "id": 13, "method": "tools/call"}', 13, INVALID_PARAMS),
        (b'{"jsonrpc": "2.0", "id": 14, "method": "no/such"}', 14, METHOD_NOT_FOUND),
        (run("15", b'"code": "' + b"x" * 2_000_000 + b'"'), 15, INVALID_REQUEST),
    ]
    with opened_wire(default_environment, tmp_path, BELLJAR_MAX_UPLOAD_BYTES="1000") as wire:
        for line, request_id, code in lines:
            wire.send(line)
            answer = wire.receive()
            assert (answer["id"], answer["error"]["code"]) == (request_id, code), line[:100]
        # Neither an answer of the client's nor a notification is owed one.
        wire.send(b'{"jsonrpc": "2.0", "id": 16, "result": 5}', b'{"jsonrpc": "2.0", "method": "notifications/x"}')
        nan = wire.ask(json.loads(run("17", b'"code": "1", "timeout_s": NaN')))
        assert nan["result"]["isError"] is True
        assert wire.call("list_sessions") == {"sessions": []}
        # An id stands for one request until that is answered, or cancelled, after which there is no answer.
        wire.send(tool_call(18, "execute_code", code=held()))
        while wire.receive().get("params", {}).get("message") != "held":
            pass
        for twin in (18, "18"):
            wire.send({"jsonrpc": "2.0", "id": twin, "method": "ping"})
            answer = wire.answer_to(twin)
            assert (answer["error"]["code"], "take another id" in answer["error"]["message"]) == (INVALID_REQUEST, True)
        wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 18}})
        (session,) = wire.call("list_sessions")["sessions"]
        assert wire.call("execute_code", code="1", session_id=session["session_id"])["result"] == "1"
        assert wire.ask({"jsonrpc": "2.0", "id": 18, "method": "ping"})["result"] == {}
        wire.stdin.close()
        assert wire.process.wait(30) == 0


@pytest.mark.parametrize(("number", "chosen"), [(signal.SIGTERM, {}), (signal.SIGINT, COLD)], ids=["warm", "cold"])
async def test_an_http_server_stops_on_a_signal_and_leaves_nothing_behind(
    default_environment: Environment, tmp_path: Path, number: signal.Signals, chosen: dict[str, str]
):
    with http_server(serve_over_http(default_environment), tmp_path, **chosen) as (url, process):
        async with Client(f"{url}/mcp", mode=MODERN) as client:
            caller = Caller(client)
            await caller.execute("import subprocess\nsubprocess.Popen(['sleep', '600']);")
            await caller.execute(held(), wait_s=0)
            pids = tree(process.pid)
            assert len(pids) > 3
        process.send_signal(number)
        assert await anyio.to_thread.run_sync(process.wait, 30) == 0
        await ended(pids - {process.pid})
    assert list((tmp_path / "runs").iterdir()) == []


async def test_a_killed_server_takes_its_sessions_with_it_and_the_next_one_tidies_up(
    default_environment: Environment, tmp_path: Path
):
    with http_server(serve_over_http(default_environment), tmp_path) as (url, process):
        async with Client(f"{url}/mcp", mode=MODERN) as client:
            await Caller(client).execute("import subprocess\nsubprocess.Popen(['sleep', '600']);")
            pids = tree(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(process.wait)
        await ended(pids)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    with http_server(serve_over_http(default_environment), tmp_path, **COLD) as (_, process):
        assert server_pid(tmp_path) == process.pid


async def test_a_foreign_origin_is_refused_and_health_is_public(http_url: str):
    async with httpx.AsyncClient() as client:
        refused = await client.post(http_url, json={}, headers={"Origin": "https://evil.example"})
        assert refused.status_code == 403
        healthy = await client.get(http_url.removesuffix("/mcp") + "/health")
        assert healthy.json()["status"] == "ok"


async def ended(pids: set[int]) -> None:
    await until(lambda: not alive(pids))
