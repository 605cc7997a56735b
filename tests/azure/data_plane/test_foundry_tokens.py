"""Tokens of an issuer at the data plane, callers who go away, and a server that is killed."""

import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import httpx
import jwt
import pytest
from calls import opened_runtime
from cryptography.hazmat.primitives.asymmetric import rsa
from data_plane import NEW, Plane, opened_plane, problem_in
from served import Served

from belljar.environments import Environment
from belljar.runtime import Runtime
from serving_process import COLD
from waiting import until

pytestmark = pytest.mark.anyio
AUDIENCE = "https://dynamicsessions.io"
HELD = "import os, time\nprint('held', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.005)"


class Issuer:
    def __init__(self, url: str, key: rsa.RSAPrivateKey) -> None:
        self.url = url
        self._key = key

    def token(self, **changes: Any) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 600, **changes}
        return jwt.encode(claims, self._key, "RS256", headers={"kid": "1"})


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    key = rsa.generate_private_key(65537, 2048)
    jwk = jwt.get_algorithm_by_name("RS256").to_jwk(key.public_key(), as_dict=True)
    body = json.dumps({"keys": [{**jwk, "kid": "1", "use": "sig", "alg": "RS256"}]}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Issuer(f"http://127.0.0.1:{server.server_port}", key)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, issuer: Issuer, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    chosen = {
        "surfaces": ["foundry"],
        "oauth_issuer": issuer.url,
        "oauth_audience": AUDIENCE,
        "oauth_jwks_url": f"{issuer.url}/keys",
        "interrupt_on": "disconnect",
    }
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **chosen) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def plane(runtime: Runtime, issuer: Issuer) -> AsyncGenerator[Plane]:
    async with opened_plane(runtime, issuer.token()) as plane:
        yield plane


async def test_azures_audience_is_the_one_that_is_asked_for(plane: Plane, issuer: Issuer) -> None:
    assert (await plane.execute("1 + 1"))["result"]["executionResult"] == 2
    for token in (issuer.token(aud="https://management.azure.com"), issuer.token(exp=int(time.time()) - 60), "junk"):
        answer = await plane.ask("GET", "/files", headers={"authorization": f"Bearer {token}"})
        problem_in(answer, 401, "Unauthorized")


async def test_a_token_that_ends_between_two_polls_loses_nothing(plane: Plane, issuer: Issuer) -> None:
    brief = {"authorization": f"Bearer {issuer.token(exp=int(time.time()) + 3)}"}
    body = {"code": HELD, "executionType": "Asynchronous"}
    begun = (await plane.ask("POST", "/executions", json=body, headers=brief)).json()

    async def is_refused() -> httpx.Response | None:
        answer = await plane.ask("GET", f"/executions/{begun['id']}", headers=brief)
        return answer if answer.status_code != 200 else None

    problem_in(await until(is_refused), 401, "Unauthorized")
    await plane.upload("go", b"")

    async def is_done() -> bool:
        return (await plane.ok("GET", f"/executions/{begun['id']}"))["status"] == "Succeeded"

    await until(is_done)


async def test_a_caller_who_goes_away_stops_the_code_where_the_settings_say_so(plane: Plane) -> None:
    one = plane.other()

    async def ask_and_leave() -> None:
        with suppress(httpx.ReadTimeout):
            body, headers = {"code": "while True: pass"}, {"operation-id": "left"}
            await one.ask("POST", "/executions", json=body, headers=headers, timeout=httpx.Timeout(60, read=1.5))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_and_leave)

    async def is_stopped() -> bool:
        answer = await one.ask("GET", "/executions/left")
        return answer.status_code == 200 and answer.json()["status"] == "Canceled"

    await until(is_stopped)


@pytest.mark.timeout(300)
async def test_an_identifier_survives_a_server_that_is_killed(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = Served(default_environment, tmp_path_factory.mktemp("served"), BELLJAR_SURFACES="foundry", **COLD)
    try:
        served.start()
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            plane = Plane(client, "identifier-of-the-killed")
            await plane.execute("kept = 1")
            await plane.upload("x.csv", b"1")
            etag = (await plane.ok("GET", "/session"))["etag"]
            body = {"code": HELD, "executionType": "Asynchronous"}
            headers = {"operation-id": "running"}
            await plane.ask("POST", "/executions", json=body, headers=headers)

            async def is_held() -> bool:
                return "held" in (await plane.ok("GET", "/executions/running"))["result"]["stdout"]

            await until(is_held)
            await plane.ask("POST", "/executions", json={**body, "code": "3"}, headers={"operation-id": "queued"})
        await served.kill()
        served.start()
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            plane = Plane(client, "identifier-of-the-killed", NEW)
            assert (await plane.ok("GET", "/session"))["etag"] == etag
            assert (await plane.ask("GET", "/files/x.csv/content")).content == b"1"
            broken = await plane.ok("GET", "/executions/running")
            assert (broken["status"], broken["error"]["error"]["code"]) == ("Failed", "SessionDied")
            queued = await plane.ok("GET", "/executions/queued")
            assert (queued["status"], queued["error"]["error"]["code"]) == ("Failed", "ExecutionNotStarted")
            after = await plane.execute("2")
            assert "kept" in after["result"]["stderr"]
            again = await plane.ask("POST", "/executions", json=body, headers=headers)
            assert again.json()["status"] == "Failed", "what may have run is not run again"
    finally:
        await served.aclose()
