"""The image as people start it: stdio and HTTP with nothing set, and what it says where an engine is strict."""

import ast
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from built_image import LIMITS, ROOT, build, engine, gap
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings
from waiting import until_blocking

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600), pytest.mark.skipif(bool(gap()), reason=gap() or "-")]

# What lets sessions have namespaces of their own: see docs/guides/containers.md.
NESTED = ("--security-opt", "systempaths=unconfined")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def image() -> str:
    try:
        return build("test", SCIENCE="no", COMPILE="0")
    except AssertionError as failure:
        if "Could not find a version" in str(failure) or "Failed to fetch" in str(failure):
            pytest.skip("no package index in reach of the build")
        raise


def over_stdio(image: str, *options: str) -> Client:
    program, *words = engine("run", "-i", "--rm", "--network", "none", *LIMITS, *options, image)
    return Client(stdio_client(StdioServerParameters(command=program, args=words, env=dict(os.environ))))


async def test_docker_run_i_speaks_stdio_and_seals_sessions_off(image: str) -> None:
    async with over_stdio(image, *NESTED) as client:
        code = "import os\nos.path.exists('/data/journal.sqlite'), sum(name.isdigit() for name in os.listdir('/proc'))"
        answer = await client.call_tool("execute_code", {"code": code})
        result = answer.structured_content
        assert result is not None, answer
        assert result["status"] == "ok"
        is_seen, processes = ast.literal_eval(result["result"])
        assert not is_seen
        assert processes < 10


async def test_under_the_engines_own_rules_it_serves_one_owner_and_says_what_is_missing(image: str) -> None:
    async with over_stdio(image) as client:
        answer = await client.call_tool("execute_code", {"code": "6 * 7"})
        assert answer.structured_content is not None
        assert answer.structured_content["result"] == "42"
    with over_http(image, options=()) as (_, said):
        assert "The container is the only wall" in said


async def test_a_model_is_told_of_no_isolation_and_no_fork_that_the_engine_does_not_allow(image: str) -> None:
    async with over_stdio(image) as client:
        texts = {tool.name: tool.description or "" for tool in (await client.list_tools()).tools}
        assert "fork_session" not in texts
        assert "sealed" not in f"{client.instructions}{texts}"


def test_files_of_a_run_are_told_as_the_containers_own_or_by_their_folder_outside(image: str) -> None:
    start = engine("run", "-i", "--rm", "--network", "none", *LIMITS, *NESTED, image)
    code = "open('a.csv', 'w').write('1')"
    for options, told in (
        ((), "saved in /data/downloads/"),
        (("--out", "/tmp/new", "--out-told-as", "/home/ada/new"), "saved in /home/ada/new: a.csv"),
    ):
        command = [*start, "run", *options, "-c", code]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, stdin=subprocess.DEVNULL
        )
        assert told in answer.stderr
        assert ("gone with it unless a folder is mounted there): a.csv" in answer.stderr) == (not options)


NO_NAMESPACES = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
}
WRITE = "import os\nopen('/mnt/data/x', 'w').write('kept')\nopen('x').read(), os.listdir('/mnt/data')"


@pytest.mark.parametrize("sessions", ["1", "4"])
@pytest.mark.parametrize("may_mount", [True, False], ids=["mounts", "no mounts"])
async def test_files_are_in_mnt_data_where_the_container_is_the_only_wall(
    image: str, tmp_path: Path, sessions: str, may_mount: bool
) -> None:
    (rules := tmp_path / "rules.json").write_text(json.dumps(NO_NAMESPACES))
    options = () if may_mount else ("--security-opt", f"seccomp={rules}")
    chosen = ("-e", f"BELLJAR_MAX_SESSIONS={sessions}", "-e", "BELLJAR_SANDBOX=process")
    async with over_stdio(image, *options, *chosen) as client:
        (tool,) = [tool for tool in (await client.list_tools()).tools if tool.name == "execute_code"]
        is_shown = may_mount or sessions == "1"
        assert ("/mnt/data" in (tool.description or "")) == is_shown
        for _ in range(2):
            answer = await client.call_tool("execute_code", {"code": WRITE})
            told = answer.structured_content or {}
            assert told.get("result") == ("('kept', ['x'])" if is_shown else None), answer
            if sessions == "1":
                await client.call_tool("clear_session", {"session_id": told["session_id"]})


async def test_the_surface_is_chosen_by_a_variable(image: str) -> None:
    async with over_stdio(image, *NESTED, "-e", "BELLJAR_SURFACES=executor") as client:
        assert "initialize_code_file" in [tool.name for tool in (await client.list_tools()).tools]
        answer = await client.call_tool("execute_code", {"code": "print(6 * 7)"})
        assert "42" in str(answer.content)


@contextmanager
def over_http(image: str, options: tuple[str, ...] = NESTED) -> Generator[tuple[str, str]]:
    """A container that listens: its URL and what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The network of the host, because engines need its firewall to publish a port, which not every host has.
    chosen = ("--network", "host", "-e", f"BELLJAR_HTTP=0.0.0.0:{port}")
    command = engine("run", "-d", *chosen, *LIMITS, *options, image)
    container = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:

        def said() -> str:
            answer = subprocess.run(engine("logs", container), capture_output=True, text=True, check=True)
            return answer.stdout + answer.stderr

        yield f"http://127.0.0.1:{port}/mcp", until_blocking(lambda: (text := said()) and "serves MCP" in text and text)
    finally:
        subprocess.run(engine("rm", "-f", "-t", "2", container), capture_output=True, check=False)


async def test_docker_run_p_listens_with_a_key_that_it_shows(image: str) -> None:
    with over_http(image) as (url, said):
        (key,) = re.findall(r"Authorization: Bearer (\S+)", said)
        assert "sandbox: namespace" in said
        # Not the wildcard, which the guard refuses.
        assert f"belljar serves MCP at {url.replace('127.0.0.1', 'localhost')} (with `-p PORT:" in said
        async with httpx2.AsyncClient(timeout=60) as nobody:
            body: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            assert (await nobody.post(url, json=body)).status_code == 401
        async with (
            httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            answer = await client.call_tool("execute_code", {"code": "21 * 2"})
            assert answer.structured_content is not None
            assert answer.structured_content["result"] == "42"


@contextmanager
def composed(image: str, folder: Path) -> Generator[tuple[str, Callable[..., str]]]:
    """The service of `deploy/compose.yaml`: its URL, and what runs commands of compose and returns what they print."""
    try:
        program = python_environment(shared_settings().data_directory / "frameworks" / "compose", "podman-compose")
    except Unreachable as gap:
        pytest.skip(str(gap))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service: dict[str, Any] = {
        "image": image,
        # See `over_http`.
        "network_mode": "host",
        "environment": {"BELLJAR_HTTP": f"0.0.0.0:{port}"},
        "ulimits": {"nofile": 4096, "nproc": 4096},
    }
    (folder / "here.yaml").write_text(json.dumps({"services": {"belljar": service}}))
    command = [
        str(program / "bin/podman-compose"),
        f"--podman-args={' '.join(engine()[1:])}",
        "-p",
        f"belljar{port}",
    ]
    command += ["-f", str(ROOT / "deploy/compose.yaml"), "-f", str(folder / "here.yaml")]

    def compose(*words: str) -> str:
        # As `security_opt` is resolved by compose, from the folder of its file.
        answer = subprocess.run(
            [*command, *words], cwd=ROOT / "deploy", capture_output=True, text=True, timeout=100, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout + answer.stderr

    try:
        yield f"http://127.0.0.1:{port}/mcp", compose
    finally:
        compose("down", "-v", "-t", "2")


async def test_docker_compose_keeps_it_running_and_its_key_outlives_a_restart(image: str, tmp_path: Path) -> None:
    with composed(image, tmp_path) as (url, compose):
        compose("up", "-d", "--no-build")
        until_blocking(lambda: "serves MCP" in compose("logs", "belljar"))
        said = compose("logs", "belljar")
        (key,) = re.findall(r"Authorization: Bearer ([\w-]+)", said)  # colours follow it
        assert "sandbox: namespace" in said
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as http:
            async with Client(streamable_http_client(url, http_client=http)) as client:
                answer = await client.call_tool("execute_code", {"code": "kept = 42"})
                session_id = str((answer.structured_content or {})["session_id"])
            compose("restart", "-t", "10")
            until_blocking(lambda: compose("logs", "belljar").count("serves MCP") == 2)
            assert compose("logs", "belljar").count(key) == 1
            async with Client(streamable_http_client(url, http_client=http)) as client:
                answer = await client.call_tool("execute_code", {"code": "kept", "session_id": session_id})
                assert (answer.structured_content or {})["result"] == "42"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-e", "BELLJAR_API_KEYS=ada:secret-of-ada,bob:secret-of-bob"), ("several people's", "container --seccomp")),
        (("-e", "BELLJAR_SANDBOX=namespace"), ("Sandbox namespace cannot run here", "systempaths=unconfined")),
        ((*NESTED, "--read-only"), ("data_directory /data cannot be used",)),
        ((*NESTED, "-v", "/root:/data:ro"), ("data_directory /data belongs to user 0",)),
    ],
)
def test_what_the_engine_does_not_allow_is_told(image: str, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    command = engine("run", "--rm", "--network", "none", *LIMITS, *options, image)
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)
    assert answer.returncode != 0
    assert "Traceback" not in answer.stderr
    assert all(word in answer.stderr for word in words), answer.stderr
