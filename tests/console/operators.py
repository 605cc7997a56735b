"""A place where an agent, another key and an operator are asked, as the tests of such questions use it."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
from calls import MODERN, Caller
from consoles import Place, opened_place
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import ElicitResult

from belljar.environments import Environment
from belljar.questions.models import InboxQuestion
from waiting import until

KEYS = {"agent": "a" * 40, "bob": "b" * 40, "olga": "o" * 40}
BOOK = Path(__file__).parents[1] / "privacy" / "address_book.py"
POLICY = """
[[code]]
decision = "ask"
calls = ["os.getcwd"]
answered_in = "console"

[[tools]]
match = "book.publish"
decision = "ask"
answered_in = "console"
"""
LOOKS = "import os\nbool(os.getcwd())"


@asynccontextmanager
async def opened_operators(environment: Environment, folder: Path, **more: Any) -> AsyncGenerator[Place]:
    """A server with a console, keys, an operator, and rules whose questions are kept for operators."""
    (folder / "policy.toml").write_text(POLICY)
    async with opened_place(
        environment,
        folder,
        policy=str(folder / "policy.toml"),
        api_keys=[f"{name}:{key}" for name, key in KEYS.items()],
        console_operators=["key:olga"],
        ask_in_console="always",
        mcp_servers={"book": {"command": sys.executable, "args": [str(BOOK), str(folder / "notes")]}},
        **more,
    ) as opened:
        yield opened


async def _never(context: Any, params: Any) -> ElicitResult:
    raise AssertionError("it was put to the client")


@asynccontextmanager
async def calling(place: Place, name: str, era: str = MODERN, **options: Any) -> AsyncGenerator[Caller]:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(
            streamable_http_client(f"{place.url}/mcp", http_client=http),
            mode=era,
            elicitation_callback=_never,
            **options,
        ) as client,
    ):
        yield Caller(client)


def script(place: Place, name: str) -> httpx.AsyncClient:
    """A program that sends its key with each request."""
    return httpx.AsyncClient(base_url=place.url, headers={"authorization": f"Bearer {KEYS[name]}"}, timeout=30)


async def waiting(place: Place, **wanted: str) -> InboxQuestion:
    inbox = place.runtime.sessions.inbox

    def found() -> list[InboxQuestion]:
        return [
            each for each in inbox.waiting(None) if all(getattr(each, name) == text for name, text in wanted.items())
        ]

    (question,) = await until(found)
    assert question.in_console
    return question


async def refused(place: Place, question: InboxQuestion, name: str, status: int) -> None:
    """A key answers nothing: not with a request, nor signed in at the console with it."""
    path, answer = f"/api/v1/questions/{question.id}", {"action": "accept", "values": {}}
    async with script(place, name) as program, place.person(KEYS[name]) as browser:
        refusal = await program.post(path, json=answer)
        assert refusal.status_code == status, refusal.text
        if status == 403:
            told = refusal.json()["error"]
            assert told["code"] == "operator-needed"
            assert "kept for an operator" in told["message"]
            assert "belljar inbox" in told["hint"]
            assert "console_operators" in told["hint"]
            page = (await browser.get(f"/console/inbox/{question.id}")).text
            assert "keeps this question for an operator" in page
            assert f'action="/console/inbox/{question.id}"' not in page
        assert (await program.post(path, json={"action": "decline", "values": {}})).status_code == status
        assert (await browser.post(path, json=answer)).status_code == status
        assert (await browser.post(f"/console/inbox/{question.id}", data={"action": "accept"})).status_code == status
    assert place.runtime.sessions.inbox.find(question.id, None).state == "waiting"
