"""The description of the API is true: schemathesis, from PyPI, asks the server what it says can be asked."""

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import anyio
import pytest
from consoles import Place, opened_place

from belljar.environments import Environment
from belljar.settings import hash_key
from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio
KEY = "schemathesis-" + "s" * 30
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,unsupported_method"
)


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(
        default_environment,
        tmp_path_factory.mktemp("described"),
        api_keys=[f"tester:sha256:{hash_key(KEY)}"],
        max_sessions=100,
    ) as opened:
        yield opened


@pytest.mark.timeout(600)
async def test_every_request_that_the_description_allows_is_answered_as_it_says(place: Place, tmp_path: Path) -> None:
    try:
        folder = shared_settings().data_directory / "clients" / "schemathesis"
        environment = await anyio.to_thread.run_sync(partial(python_environment, folder, "schemathesis>=4,<5"))
    except Unreachable as error:
        pytest.skip(str(error))
    async with place.person(KEY) as person:
        made = (await person.post("/api/v1/sessions", json={"reason": "tried"})).json()
        path = f"/api/v1/sessions/{made['session_id']}"
        code = "from IPython.display import HTML, display\nprint('x')\ndisplay(HTML('<b>1</b>'))\n1/0"
        queued = (await person.post(f"{path}/executions", json={"code": code})).json()
        assert (await person.put(f"{path}/files/a.txt", content=b"0123456789")).status_code == 204
    # Half of the requests are about what is there; the other half about ids that schemathesis makes up.
    for ids in ({"session_id": made["session_id"], "execution_id": queued["execution_id"]}, {}):
        lines = [f'"path.{name}" = "{value}"\n' for name, value in ids.items()]
        (tmp_path / "schemathesis.toml").write_text("[parameters]\n" + "".join(lines) if lines else "")
        command = [str(environment / "bin/schemathesis"), "run", f"{place.url}/api/v1/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--checks", CHECKS, "--seed", "1", "--no-color"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "8", "--suppress-health-check", "all"]
        # Streams have no end, and the end of the session would end what the others are about.
        command += ["--exclude-path-regex", "/events$"]
        command += ["--exclude-operation-id", "delete_sessions_session_id"] if ids else []
        command += ["--request-timeout", "60", "--generation-database", "none", "--continue-on-failure"]
        done = await anyio.run_process(
            command, cwd=tmp_path, check=False, env={"HOME": str(tmp_path), "PATH": "/usr/bin"}
        )
        assert done.returncode == 0, done.stdout.decode()[-12_000:]
    async with place.person(KEY) as person:
        answer = await person.get(path)
        assert answer.json()["session_id"] == made["session_id"]
