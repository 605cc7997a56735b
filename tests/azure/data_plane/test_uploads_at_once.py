"""Uploads to the data plane at once, alone and beside those of tools: together they get no more room than there is."""

import asyncio
import os
from base64 import b64encode
from collections.abc import AsyncGenerator

import httpx
import pytest
from calls import FORKS, connected, opened_runtime, served_over_http, text_of

from belljar.environments import Environment
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio
DISK_MB = 20
FILE_BYTES = 9_000_000


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    async with opened_runtime(
        default_environment, folder, surfaces=["interpreter", "foundry"], disk_mb=DISK_MB, **FORKS
    ) as runtime:
        yield runtime


@pytest.mark.parametrize("way", ["data plane", "both"])
async def test_uploads_at_once_share_the_room_that_is_left(runtime: Runtime, way: str):
    content = os.urandom(FILE_BYTES)
    async with (
        served_over_http(runtime) as url,
        httpx.AsyncClient(timeout=60) as client,
        connected(runtime) as caller,
    ):
        query = {"identifier": f"at-once-{way.replace(' ', '-')}", "api-version": "2025-02-02-preview"}

        async def put(name: str) -> bool:
            parts = {"file": (name, content)}
            answer = await client.post(f"{url}/files", params=query, files=parts)
            return answer.status_code < 300

        assert (await client.get(f"{url}/files", params=query)).status_code == 200
        session = next(each for each in runtime.sessions.all() if not any(each.folders.workspace.iterdir()))

        async def upload(number: int) -> bool:
            if way == "data plane" or (way == "both" and number % 2):
                return await put(f"f{number}")
            encoded = b64encode(content).decode()
            answer = await caller.call("upload_file", session_id=session.id, name=f"f{number}", base64=encoded)
            assert not answer.is_error or "too-large: disk_full" in text_of(answer)
            return not answer.is_error

        taken = await asyncio.gather(*map(upload, range(8)))
    assert sum(taken) == 2  # no fewer either: what is being written is not counted twice
    assert sum(path.stat().st_size for path in session.folders.workspace.iterdir()) == 2 * FILE_BYTES
