"""Clients that people use with Azure today, from PyPI, over TLS: only their endpoint and token provider are changed."""

import json
import os
import ssl
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from calls import opened_runtime
from data_plane import KEY

from belljar.environments import Environment
from belljar.http.app import serve_http
from belljar.http.tls import tls_context
from belljar.mcp.server import build_http_app
from certificates import make_certificate
from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio
CLIENTS = {
    "langchain": "langchain-azure-dynamic-sessions",
    "llama": "llama-index-tools-azure-code-interpreter",
}
PREFIX = "/subscriptions/s/resourceGroups/g/sessionPools/pool"


@pytest.fixture(scope="module")
async def endpoint(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[tuple[str, Path]]:
    """The address of a pool at a server that speaks TLS, and the certificate to trust."""
    files = make_certificate(tmp_path_factory.mktemp("tls"))
    chosen = {
        "surfaces": ["foundry"],
        "api_keys": [f"ada:{KEY}"],
        "tls_certificate": str(files.certificate),
        "tls_key": str(files.key),
    }
    urls, ready = list[str](), anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async with (
        opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **chosen) as runtime,
        anyio.create_task_group() as tasks,
    ):
        tls, app = tls_context(runtime.settings), build_http_app(runtime)
        tasks.start_soon(partial(serve_http, app, "127.0.0.1", 0, on_ready=on_ready, tls=tls))
        await ready.wait()
        yield f"{urls[0]}{PREFIX}", files.certificate
        tasks.cancel_scope.cancel()


async def told_by(client: str, endpoint: tuple[str, Path], folder: Path) -> dict[str, Any]:
    try:
        place = shared_settings().data_directory / "clients" / client
        environment = await anyio.to_thread.run_sync(partial(python_environment, place, CLIENTS[client]))
    except Unreachable as error:
        pytest.skip(str(error))
    url, certificate = endpoint
    script = Path(__file__).with_name("azure_clients.py")
    command = [str(environment / "bin/python"), str(script), client, url, KEY, str(folder)]
    trusting = {"REQUESTS_CA_BUNDLE": str(certificate), "PATH": os.environ["PATH"], "HOME": str(folder)}
    done = await anyio.run_process(command, env=trusting, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
async def test_langchains_client_works_as_with_azure(endpoint: tuple[str, Path], tmp_path: Path) -> None:
    told = await told_by("langchain", endpoint, tmp_path)
    assert "42" in str(told["value"])
    assert "ZeroDivisionError" in str(told["failed"])
    assert "image" in str(told["figure"])
    assert told["uploaded"] == ["sub/remote.csv", 8, "/mnt/data/sub/remote.csv"]
    assert "a,b" in str(told["read"])
    assert told["listed"] == ["sub/remote.csv"]
    assert told["downloaded"] == "a,b\n1,2\n"


@pytest.mark.timeout(300)
async def test_llama_indexs_client_works_as_with_azure(endpoint: tuple[str, Path], tmp_path: Path) -> None:
    told = await told_by("llama", endpoint, tmp_path)
    assert told["value"] == 42
    assert "ZeroDivisionError" in told["failed"]
    assert told["figure"]["saved_to_local_path"] is True
    assert told["saved"] == [".png"]
    assert told["uploaded"] == ["local.csv", 8, "/mnt/data/local.csv"]
    assert told["listed"] == ["local.csv"]
    assert told["downloaded"] == "a,b\n1,2\n"


async def test_sessions_end_over_tls_as_a_client_asks(endpoint: tuple[str, Path]) -> None:
    url, certificate = endpoint
    context = ssl.create_default_context(cafile=str(certificate))
    query = {"api-version": "2025-02-02-preview", "identifier": "closing-client"}
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(verify=context, headers=headers, timeout=60) as client:
        assert (await client.get(f"{url}/files", params=query)).json()["value"] == []
        assert (await client.delete(f"{url}/session", params=query)).status_code == 204
        assert (await client.get(f"{url}/session", params=query)).status_code == 404
