"""Signing in to the console at a real issuer, npm's `oidc-provider` as deploy/oauth has it, with a real browser."""

import json
import subprocess
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsers import opened_chromium
from playwright.async_api import Browser, Page, expect

from belljar.environments import Environment
from live_server import live_server
from registry_packages import Unreachable, node, node_variables, npm_folder
from serving_process import free_port
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio
ISSUER = Path(__file__).parents[2] / "deploy" / "oauth"


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def issuer(port: int, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    wanted = json.loads((ISSUER / "package.json").read_text())["dependencies"]
    folder = shared_settings().data_directory / "npm" / "oidc-provider"
    try:
        program, _ = node()
        npm_folder(folder, *(f"{name}@{version}" for name, version in wanted.items()))
    except Unreachable as gap:
        pytest.skip(str(gap))
    place = tmp_path_factory.mktemp("issuer")
    (place / "issuer.mjs").write_bytes((ISSUER / "issuer.mjs").read_bytes())
    (place / "node_modules").symlink_to(folder / "node_modules")
    variables = {**node_variables(program), "PORT": str(free_port()), "BELLJAR_URL": f"http://127.0.0.1:{port}/mcp"}
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
    default_environment: Environment, issuer: str, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Generator[str]:
    # The console is a public client, registered by whoever sets it up.
    registered = httpx.post(
        f"{issuer}/reg",
        json={
            "client_name": "belljar's console",
            "redirect_uris": [f"http://127.0.0.1:{port}/console/oauth/callback"],
            "token_endpoint_auth_method": "none",
            "application_type": "native",
        },
    )
    assert registered.status_code == 201, registered.text
    chosen = {
        "BELLJAR_OAUTH_ISSUER": issuer,
        "BELLJAR_OAUTH_AUDIENCE": f"http://127.0.0.1:{port}/mcp",
        "BELLJAR_OAUTH_SCOPES": "belljar",
        "BELLJAR_OAUTH_CLIENT_ID": registered.json()["client_id"],
    }
    with live_server(
        tmp_path_factory.mktemp("server"), default_environment.python, bind=f"127.0.0.1:{port}", **chosen
    ) as found:
        yield found.removesuffix("/mcp")


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    async with opened_chromium() as browser:
        yield browser


async def signed_in_as(name: str, url: str, chromium: Browser) -> Page:
    """Go from a page of the console to the issuer, agree there, and come back to that page."""
    page = await (await chromium.new_context()).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"{url}/console/health")
    await page.get_by_role("link", name="Sign in with your organisation").click()
    await page.locator("input[name=login]").fill(name)
    await page.locator("input[name=password]").fill("anything")
    await page.locator("button[type=submit]").click()
    await page.locator("button[type=submit]").click()
    await page.wait_for_url("**/console/health")
    (first,) = [one for one in asked if "code_challenge=" in one and "/auth?" in one]
    assert "code_challenge_method=S256" in first
    assert "resource=" in first
    # Neither the code nor the state is left where a history could have it.
    assert page.url == f"{url}/console/health"
    return page


async def sessions(page: Page, url: str) -> list[dict[str, Any]]:
    answer = await page.request.get(f"{url}/api/v1/sessions")
    assert answer.status == 200
    return (await answer.json())["items"]


async def test_people_sign_in_at_the_issuer_and_see_their_own_sessions(
    url: str, issuer: str, chromium: Browser
) -> None:
    ada, bob = await signed_in_as("ada", url, chromium), await signed_in_as("bob", url, chromium)
    await expect(ada.locator(".who")).to_contain_text("ada")
    made = await ada.evaluate(
        "() => fetch('/api/v1/sessions', {method: 'POST', body: '{}'}).then((answer) => answer.json())"
    )
    assert made["owner"] == f"jwt:{issuer}#ada"
    assert [one["session_id"] for one in await sessions(ada, url)] == [made["session_id"]]
    assert await sessions(bob, url) == []
    answer = await bob.goto(f"{url}/console/sessions/{made['session_id']}")
    assert answer is not None
    assert answer.status == 404
    # Signed out here, though not at the issuer.
    await ada.get_by_role("button", name="Sign out").click()
    await ada.wait_for_url("**/console/enter")
    assert (await ada.request.get(f"{url}/api/v1/sessions")).status == 401
    cookies = {cookie["name"]: cookie for cookie in await bob.context.cookies(url)}
    (own,) = [cookie for name, cookie in cookies.items() if name.startswith("belljar-")]
    assert own["httpOnly"] is True
    assert own["sameSite"] == "Strict"


async def test_somebody_who_says_no_at_the_issuer_gets_a_clear_page(url: str, chromium: Browser) -> None:
    page = await (await chromium.new_context()).new_page()
    await page.goto(f"{url}/console/oauth/begin")
    await page.get_by_role("link", name="Cancel").click()
    await expect(page.get_by_role("heading")).to_contain_text("the issuer did not let you in")
    assert (await page.request.get(f"{url}/api/v1/sessions")).status == 401
