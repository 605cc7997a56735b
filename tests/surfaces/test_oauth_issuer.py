"""The worked issuer of docs/guides/oauth.md, really run: an MCP client signs a person in and calls belljar as them."""

import json
import re
import subprocess
from collections.abc import Generator
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import httpx2
import jwt
import pytest
from mcp import Client
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider, TokenStorage
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

from belljar.environments import Environment
from live_server import live_server
from registry_packages import Unreachable, node, node_variables, npm_folder
from serving_process import free_port
from shared_environment import shared_settings

ISSUER = Path(__file__).parents[2] / "deploy" / "oauth"
CALLBACK = "http://127.0.0.1:3030/callback"
SECRET = "secret-of-the-nightly-job-0123456789"

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def belljar_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def issuer(belljar_port: int, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    wanted = json.loads((ISSUER / "package.json").read_text())["dependencies"]
    folder = shared_settings().data_directory / "npm" / "oidc-provider"
    try:
        program, _ = node()
        npm_folder(folder, *(f"{name}@{version}" for name, version in wanted.items()))
    except Unreachable as gap:
        pytest.skip(str(gap))
    # Node looks for packages beside the script.
    place = tmp_path_factory.mktemp("issuer")
    (place / "issuer.mjs").write_bytes((ISSUER / "issuer.mjs").read_bytes())
    (place / "node_modules").symlink_to(folder / "node_modules")
    variables = {
        **node_variables(program),
        "PORT": str(free_port()),
        "BELLJAR_URL": f"http://127.0.0.1:{belljar_port}/mcp",
        "JOB_SECRET": SECRET,
    }
    with subprocess.Popen(
        [str(program), "issuer.mjs"], cwd=place, env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            assert said.startswith("issuer "), said
            yield said.split()[1].removesuffix("/.well-known/openid-configuration")
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def url(
    default_environment: Environment, issuer: str, belljar_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Generator[str]:
    chosen = {
        "BELLJAR_OAUTH_ISSUER": issuer,
        "BELLJAR_OAUTH_AUDIENCE": f"http://127.0.0.1:{belljar_port}/mcp",
        "BELLJAR_OAUTH_SCOPES": "belljar",
    }
    with live_server(
        tmp_path_factory.mktemp("server"), default_environment.python, bind=f"127.0.0.1:{belljar_port}", **chosen
    ) as url:
        yield url


class Memory(TokenStorage):
    """What a client keeps between its runs."""

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Browser:
    """A person with a browser: signs in under a name, and agrees to what the client asks for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.landed = ""
        self.asked_for: dict[str, list[str]] = {}

    async def open(self, address: str) -> None:
        self.asked_for = parse_qs(urlsplit(address).query)
        async with httpx.AsyncClient() as browser:
            while not address.startswith(CALLBACK):
                answer = await browser.get(address)
                if not answer.is_redirect:
                    action = re.search(r'action="([^"]+)"', answer.text)
                    assert action, answer.text
                    prompt = "login" if 'value="login"' in answer.text else "consent"
                    fields = {"prompt": prompt, "login": self._name, "password": "anything"}
                    answer = await browser.post(urljoin(address, unescape(action[1])), data=fields)
                address = urljoin(address, answer.headers["location"])
        self.landed = address

    async def come_back(self) -> AuthorizationCodeResult:
        answered = {name: values[0] for name, values in parse_qs(urlsplit(self.landed).query).items()}
        return AuthorizationCodeResult(code=answered["code"], state=answered.get("state"), iss=answered.get("iss"))


async def whose_sessions(url: str, browser: Browser, memory: Memory) -> list[str]:
    """Make a session, and return the ids of all that this person has."""
    metadata = OAuthClientMetadata(
        client_name="trial", redirect_uris=[AnyUrl(CALLBACK)], token_endpoint_auth_method="none"
    )
    flow = OAuthClientProvider(url, metadata, memory, browser.open, browser.come_back)
    async with (
        httpx2.AsyncClient(auth=flow, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        answer = await client.call_tool("execute_code", {"code": "6 * 7"})
        assert answer.structured_content is not None
        assert answer.structured_content["result"] == "42"
        listed = await client.call_tool("list_sessions", {})
        assert listed.structured_content is not None
        return [session["session_id"] for session in listed.structured_content["sessions"]]


async def test_a_person_signs_in_and_has_sessions_of_their_own(url: str, issuer: str) -> None:
    ada, memory = Browser("ada"), Memory()
    adas = await whose_sessions(url, ada, memory)

    assert ada.asked_for["resource"] == [url]
    assert ada.asked_for["code_challenge_method"] == ["S256"]
    assert "belljar" in ada.asked_for["scope"][0].split()
    assert memory.tokens is not None
    claims = jwt.decode(memory.tokens.access_token, options={"verify_signature": False})
    assert (claims["iss"], claims["aud"], claims["sub"]) == (issuer, url, "ada")

    bobs = await whose_sessions(url, Browser("bob"), Memory())
    assert len(adas) == len(bobs) == 1
    assert adas != bobs


async def test_a_program_gets_a_token_without_a_person_and_none_for_another_server(url: str, issuer: str) -> None:
    async with httpx.AsyncClient(auth=("nightly-job", SECRET)) as job:
        asked = {"grant_type": "client_credentials", "scope": "belljar"}
        granted = await job.post(f"{issuer}/token", data={**asked, "resource": url})
        elsewhere = await job.post(f"{issuer}/token", data={**asked, "resource": "https://elsewhere.example/"})
    headers = {"authorization": f"Bearer {granted.json()['access_token']}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        answer = await client.call_tool("execute_code", {"code": "1 + 1"})

    assert answer.structured_content is not None
    assert answer.structured_content["result"] == "2"
    assert elsewhere.status_code >= 400


async def test_without_a_token_the_server_says_where_to_get_one(url: str, issuer: str) -> None:
    async with httpx.AsyncClient() as client:
        refused = await client.post(url, json={})
        place = re.search(r'resource_metadata="([^"]+)"', refused.headers["www-authenticate"])
        assert place
        metadata = (await client.get(place[1])).json()

    assert refused.status_code == 401
    assert metadata["resource"] == url
    assert [server.rstrip("/") for server in metadata["authorization_servers"]] == [issuer]
