"""The OpenAPI document is true: schemathesis, from PyPI, asks the server what it says can be asked."""

from functools import partial
from pathlib import Path

import anyio
import pytest
from data_plane import KEY, NEW, OLD, Plane

from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


async def test_the_description_names_every_route_under_the_callers_prefix(plane: Plane) -> None:
    document = (await plane.client.get("/subscriptions/s/sessionPools/pool/openapi.json")).json()
    assert document["servers"] == [{"url": "/subscriptions/s/sessionPools/pool"}]
    assert {"/executions", "/code/execute", "/files/{name}", "/session", "/metadata"} <= set(document["paths"])
    versions = document["paths"]["/files"]["get"]["parameters"][0]["schema"]["enum"]
    assert {OLD, NEW} <= set(versions)


@pytest.mark.timeout(240)
async def test_no_request_that_the_description_allows_is_a_server_error(plane: Plane, tmp_path: Path) -> None:
    try:
        place = shared_settings().data_directory / "clients" / "schemathesis"
        environment = await anyio.to_thread.run_sync(partial(python_environment, place, "schemathesis>=4,<5"))
    except Unreachable as error:
        pytest.skip(str(error))
    # One identifier for all requests, because each would be a session of its own.
    (tmp_path / "schemathesis.toml").write_text('[parameters]\n"query.identifier" = "identifier-of-schemathesis"\n')
    command = [str(environment / "bin/schemathesis"), "run", f"{plane.client.base_url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--checks", CHECKS, "--seed", "1", "--no-color"]
    command += ["--phases", "examples,fuzzing", "--max-examples", "6", "--suppress-health-check", "all"]
    command += ["--request-timeout", "60", "--generation-database", "none"]
    done = await anyio.run_process(command, cwd=tmp_path, check=False, env={"HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert done.returncode == 0, done.stdout.decode()[-6_000:]
    assert (await plane.execute("1 + 1"))["result"]["executionResult"] == 2
