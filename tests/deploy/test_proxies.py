"""The configurations of Caddy and nginx in deploy/, as they are: TLS outside, and streams that nothing holds up."""

import shutil
import ssl
import subprocess
from collections.abc import Generator

import anyio
import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from belljar.environments import Environment
from certificates import CertificateFiles, make_certificate
from live_server import live_server
from proxies import NAME, ROOT, caddy, nginx, started
from serving_process import free_port
from waiting import until

KEY = "key-of-the-proxies-0123456789"
# Goes on only once its caller has seen that it began, which a proxy that buffers would not let it see.
CELL = "import os, time\nprint('began', flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n'went on'"

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def behind(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The address of a server that answers to the name of the proxies."""
    chosen = {"BELLJAR_ALLOWED_HOSTS": f"{NAME},localhost", "BELLJAR_API_KEYS": f"ada:{KEY}"}
    with live_server(tmp_path_factory.mktemp("server"), default_environment.python, **chosen) as url:
        yield url.removeprefix("http://").removesuffix("/mcp")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module", params=[caddy, nginx], ids=["caddy", "nginx"])
def front(
    request: pytest.FixtureRequest, behind: str, files: CertificateFiles, tmp_path_factory: pytest.TempPathFactory
) -> Generator[str]:
    """The address of a proxy before that server."""
    with started(request.param, tmp_path_factory.mktemp("proxy"), files, free_port(), behind) as url:
        yield url


async def answers(front: str, trusted: ssl.SSLContext) -> bool:
    async with httpx.AsyncClient(verify=trusted) as client:
        try:
            return (await client.get(f"{front}/health")).status_code == 200
        except httpx.ConnectError:
            return False


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_what_a_cell_says_comes_through_before_it_has_ended(
    front: str, files: CertificateFiles, mode: str
) -> None:
    trusted = ssl.create_default_context(cafile=str(files.certificate))
    await until(lambda: answers(front, trusted))
    began = anyio.Event()

    async def heard(_progress: float, _total: float | None, message: str | None) -> None:
        if "began" in (message or ""):
            began.set()

    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        httpx2.AsyncClient(headers=headers, verify=trusted, timeout=60) as http,
        Client(streamable_http_client(f"{front}/mcp", http_client=http), mode=mode) as client,
    ):
        opened = await client.call_tool("new_session", {})
        assert opened.structured_content is not None
        session = opened.structured_content["session_id"]
        async with anyio.create_task_group() as tasks:

            async def release() -> None:
                with anyio.fail_after(30):
                    await began.wait()
                await client.call_tool("upload_file", {"session_id": session, "name": "go", "text": ""})

            tasks.start_soon(release)
            answer = await client.call_tool(
                "execute_code", {"session_id": session, "code": CELL}, progress_callback=heard
            )
    assert answer.structured_content is not None
    assert answer.structured_content["result"] == "'went on'"


async def test_a_large_upload_passes_and_metrics_stay_inside(front: str, files: CertificateFiles) -> None:
    trusted = ssl.create_default_context(cafile=str(files.certificate))
    await until(lambda: answers(front, trusted))
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        httpx2.AsyncClient(headers=headers, verify=trusted, timeout=60) as http,
        Client(streamable_http_client(f"{front}/mcp", http_client=http)) as client,
    ):
        opened = await client.call_tool("new_session", {})
        assert opened.structured_content is not None
        where = {"session_id": opened.structured_content["session_id"], "name": "large.txt"}
        answer = await client.call_tool("upload_file", {**where, "text": "x" * 20_000_000})
    async with httpx.AsyncClient(verify=trusted, headers=headers) as client:
        metrics = await client.get(f"{front}/metrics")

    assert not answer.is_error
    assert metrics.status_code == 403


def test_the_unit_is_one_that_systemd_reads() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    unit = ROOT / "deploy" / "belljar.service"
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60).stderr
    # Only what is to be installed first may be missing.
    assert [line for line in said.splitlines() if "belljar.service" in line and "not executable" not in line] == []
