"""What a server does about the limits it is started with, and who is killed first when memory runs out."""

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from calls import Caller
from mcp import Client

from belljar.environments import Environment
from serving_process import COLD, http_server, serve_over_http
from waiting import until

pytestmark = pytest.mark.anyio

KEY = "0123456789abcdef0123456789abcdef"


async def test_a_server_may_open_as_many_files_as_its_hard_limit_allows_and_outlives_its_sessions(
    default_environment: Environment, tmp_path: Path
) -> None:
    program = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", *serve_over_http(default_environment)]
    with http_server(program, tmp_path, **COLD) as (url, process):
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft > 256
        assert soft == 65_536 or soft == hard
        async with Client(f"{url}/mcp") as client:
            seen = await Caller(client).execute("print(open('/proc/self/oom_score_adj').read())")
        assert int(seen.stdout) > int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())


def _limited(environment: Environment, descriptors: int, log: Path) -> list[str]:
    """A server that may have so many descriptors, and writes what it says into a file as well."""
    limit = f'ulimit -n {descriptors}; exec "$@" 2> >(tee {log} >&2)'
    return ["bash", "-c", limit, "bash", *serve_over_http(environment)]


def _descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


async def test_sessions_are_admitted_by_descriptors_and_whoever_is_refused_reads_what_is_missing(
    default_environment: Environment, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with http_server(_limited(default_environment, 256, log), tmp_path, BELLJAR_HIBERNATE="false") as (url, process):
        async with Client(f"{url}/mcp") as client:
            caller = Caller(client)
            opened: list[str] = []
            while (ran := await caller.execute("x = 1")).success:
                opened.append(ran.session_id)
                assert len(opened) < 14
                assert (await caller.execute("x += 1", ran.session_id)).success  # with a checkpoint
            refused = [str(ran.error), *[await caller.refusal("fork_session", session_id=one) for one in opened[:1]]]
            for text in refused:
                assert "sessions are open, the most that the server's 256 file descriptors are enough for" in text
                assert "LimitNOFILE=" in text
            assert len(opened) >= 3
            # What is open goes on, rewinds included, and there is as much left as for connections.
            assert not (await caller.call("rewind_session", session_id=opened[0], to=1)).is_error
            assert (await caller.execute("x", opened[0])).result == "1"
            assert len(_descriptors(process.pid)) <= 256 - 256 // 4
            assert httpx.get(f"{url}/health", timeout=20).status_code == 200
            await caller.fields("clear_session", session_id=opened[0])
            assert (await caller.execute("1")).success
        assert "256 file descriptors are enough for" in log.read_text()


async def test_without_a_descriptor_left_the_server_says_how_it_is_and_refusals_have_a_name(
    default_environment: Environment, tmp_path: Path
) -> None:
    chosen = {**COLD, "BELLJAR_API_KEYS": f"ada:{KEY}"}
    with http_server(serve_over_http(default_environment), tmp_path, **chosen) as (url, process), ExitStack() as stack:
        address, headers = httpx.URL(url), {"Authorization": f"Bearer {KEY}"}
        kept = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
        made = kept.post("/api/v1/sessions", json={})
        assert made.status_code < 300, made.text
        session = made.json()["session_id"]
        put = f"/api/v1/sessions/{session}/files/f"
        assert kept.put(put, content=b"before").status_code < 300
        most = max(_descriptors(process.pid)) + 1
        hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, hard))

        def refusal() -> httpx.Response | None:
            """Take what is free by now, because what the server has open for a moment counts too, and ask."""
            for _ in range(most - len(_descriptors(process.pid))):
                stack.enter_context(socket.create_connection((address.host, address.port or 0), timeout=20))
            answer = kept.put(put, content=b"during")
            return None if answer.status_code < 300 else answer

        refused = await until(refusal)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out-of-descriptors")
        assert "LimitNOFILE=" in refused.json()["error"]["hint"]
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        await until(lambda: kept.put(put, content=b"after").status_code < 300)
        assert httpx.get(f"{url}/metrics", headers=headers, timeout=60).status_code == 200
