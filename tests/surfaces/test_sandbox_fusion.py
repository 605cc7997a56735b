"""The plugin that serves trainers, over HTTP: what they send, what they get, and what they must not get."""

import base64
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import FORKS, opened_runtime

from belljar.environments import Environment
from belljar.mcp.server import build_http_app

pytestmark = pytest.mark.anyio
PLUGIN = Path(__file__).parents[2] / "examples/plugins/sandbox_fusion.py"
KEY = "trainer-" + "k" * 30


@pytest.fixture(scope="module")
async def client(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "plugins").mkdir()
    shutil.copy(PLUGIN, folder / "plugins")
    chosen = {"plugins_directory": str(folder / "plugins"), "api_keys": [f"trainer:{KEY}"]}
    async with opened_runtime(default_environment, folder, **FORKS, **chosen) as runtime:
        transport = httpx.ASGITransport(build_http_app(runtime))
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            yield client


async def run(client: httpx.AsyncClient, code: str, **more: Any) -> dict[str, Any]:
    # As verl sends it.
    body = {"code": code, "language": "python", "compile_timeout": 10, "run_timeout": 10, "memory_limit_MB": 1024}
    answer = await client.post("/run_code", json={**body, "stdin": "", "files": {}, "fetch_files": [], **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_program_gets_its_input_and_its_output_goes_back(client: httpx.AsyncClient):
    told = await run(client, "n = int(input())\nprint(n * 2)\nif __name__ == '__main__': print('main')", stdin="21\n")
    assert (told["status"], told["run_result"]["status"]) == ("Success", "Finished")
    assert (told["run_result"]["return_code"], told["run_result"]["stdout"]) == (0, "42\nmain\n")


async def test_how_a_program_ends_is_told_as_python_tells_it(client: httpx.AsyncClient):
    raised = await run(client, "1 / 0")
    assert (raised["status"], raised["run_result"]["return_code"]) == ("Failed", 1)
    assert "ZeroDivisionError" in raised["run_result"]["stderr"]
    left = await run(client, "import sys; sys.exit(3)")
    assert (left["status"], left["run_result"]["return_code"]) == ("Failed", 3)
    endless = await run(client, "while True: pass", run_timeout=1)
    assert (endless["status"], endless["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    died = await run(client, "import os; os._exit(9)")
    assert (died["status"], died["run_result"]["status"], died["run_result"]["return_code"]) == (
        "Failed",
        "Error",
        None,
    )


async def test_files_go_in_and_come_out_and_nothing_stays(client: httpx.AsyncClient):
    content = base64.b64encode(b"in").decode()
    code = "open('out.txt', 'w').write(open('a/in.txt').read() * 2)"
    told = await run(client, code, files={"a/in.txt": content, "none": None}, fetch_files=["out.txt", "no.txt"])
    assert told["files"] == {"out.txt": base64.b64encode(b"inin").decode(), "no.txt": ""}
    assert (await run(client, "import os; print(os.listdir())"))["run_result"]["stdout"] == "['main.py']\n"


async def test_what_is_no_such_request_is_refused(client: httpx.AsyncClient):
    for body in ({}, {"code": "1", "language": "cpp"}, {"code": "1", "language": "python", "files": {"x": "%"}}):
        assert (await client.post("/run_code", json=body)).status_code == 422
    assert (await client.post("/run_code", content=b"x" * 5_000_000)).status_code == 413
    stranger = await client.post("/run_code", json={}, headers={"Authorization": "Bearer nobody"})
    assert stranger.status_code == 401
