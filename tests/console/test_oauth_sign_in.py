"""Signing in to the console at an OAuth issuer, which here is a real one over HTTP: codes, PKCE, signed tokens."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import pytest
from consoles import Place, opened_place
from cryptography.hazmat.primitives.asymmetric import ec

from belljar.environments import Environment

pytestmark = pytest.mark.anyio
AUDIENCE = "http://127.0.0.1:9/mcp"


class Issuer:
    """An authorisation server: gives a code to whoever asks, and a token for a code with its verifier."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.asked: dict[str, dict[str, str]] = {}
        self.audience = AUDIENCE
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                documents = {"/.well-known/oauth-authorization-server": issuer.metadata(), "/keys": issuer.keys()}
                self._answer(200 if self.path in documents else 404, documents.get(self.path, {}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                token = issuer.token({name: values[0] for name, values in parse_qs(body).items()})
                self._answer(200 if token else 400, {"access_token": token, "token_type": "Bearer"} if token else {})

            def _answer(self, status: int, document: dict[str, Any]) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
        }

    def keys(self) -> dict[str, Any]:
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        return {"keys": [{**public, "kid": "one", "use": "sig", "alg": "ES256"}]}

    def authorize(self, address: str) -> str:
        """Be the person who agrees; return the code."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert query["code_challenge_method"] == "S256"
        assert query["resource"] == AUDIENCE
        code = f"code-{len(self.asked)}"
        self.asked[code] = query
        return code

    def token(self, form: dict[str, str]) -> str | None:
        asked = self.asked.pop(form["code"], None)
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if asked is None or asked["code_challenge"] != challenge or asked["redirect_uri"] != form["redirect_uri"]:
            return None
        now = int(time.time())
        claims = {"iss": self.url, "aud": self.audience, "sub": "ada", "iat": now, "exp": now + 600}
        return jwt.encode(claims, self.key, algorithm="ES256", headers={"kid": "one"})


@pytest.fixture(scope="module")
def issuer() -> Generator[Issuer]:
    found = Issuer()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, issuer: Issuer, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(
        default_environment,
        tmp_path_factory.mktemp("oauth"),
        oauth_issuer=issuer.url,
        oauth_audience=AUDIENCE,
        oauth_client_id="belljar-console",
    ) as opened:
        yield opened


async def begun(browser: httpx.AsyncClient, issuer: Issuer) -> dict[str, str]:
    """The query with which the issuer sends a browser back."""
    answer = await browser.get("/console/oauth/begin?next=/console/health")
    assert answer.status_code == 303
    address = answer.headers["location"]
    assert address.startswith(f"{issuer.url}/authorize?")
    return {"code": issuer.authorize(address), "state": parse_qs(urlsplit(address).query)["state"][0]}


async def test_a_person_signs_in_at_the_issuer_and_sees_their_own_sessions(place: Place, issuer: Issuer) -> None:
    async with place.browser() as browser:
        assert "oauth/begin" in (await browser.get("/console/enter")).text
        query = await begun(browser, issuer)
        # The issuer's page is of another site.
        cross = {"Sec-Fetch-Site": "cross-site"}
        answer = await browser.get("/console/oauth/callback", params=query, headers=cross)
        assert answer.status_code == 200, answer.text
        assert 'content="0;url=/console/health"' in answer.text
        made = await browser.post("/api/v1/sessions", json={})
        assert made.json()["owner"] == f"jwt:{issuer.url}#ada"
        assert (await browser.get("/console")).status_code == 200
        # The code and the state work once.
        again = await browser.get("/console/oauth/callback", params=query, headers=cross)
        assert again.status_code == 400


async def test_a_flow_of_another_browser_and_a_token_for_somebody_else_are_refused(
    place: Place, issuer: Issuer
) -> None:
    async with place.browser() as one, place.browser() as other:
        query = await begun(one, issuer)
        assert (await other.get("/console/oauth/callback", params=query)).status_code == 400
        issuer.audience = "https://other.example/mcp"
        try:
            query = await begun(one, issuer)
            assert (await one.get("/console/oauth/callback", params=query)).status_code == 401
        finally:
            issuer.audience = AUDIENCE
        query = await begun(one, issuer)
        foreign = await one.get("/console/oauth/callback", params={**query, "iss": "https://evil.example"})
        assert foreign.status_code == 400
        assert (await one.get("/console")).status_code == 303


async def test_an_issuer_that_is_away_gives_a_page_that_says_what_to_do(
    place: Place, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.browser() as browser:
        query = await begun(browser, issuer)
        # It goes away before the code is exchanged, and then altogether.
        for path, away in [
            ("/console/oauth/callback", {"token_endpoint": "http://127.0.0.1:1/token"}),
            ("/console/oauth/begin", {"issuer": "http://127.0.0.1:1"}),
        ]:
            known = issuer.metadata()
            monkeypatch.setattr(issuer, "metadata", lambda known=known, away=away: {**known, **away})
            answer = await browser.get(path, params=query)
            assert answer.status_code == 502, answer.text
            assert f"The issuer {issuer.url} cannot be reached" in answer.text
            assert "tell who runs this server: the setting oauth_issuer" in answer.text
            assert 'href="/console/enter"' in answer.text
            monkeypatch.undo()
        assert (await browser.get("/console")).status_code == 303
