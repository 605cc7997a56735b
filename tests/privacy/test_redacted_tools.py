"""Tools of a real server, with redaction: what code gets, what the server gets, what callers see."""

import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from address_book import PERSON

import belljar
from belljar.environments import Environment

pytestmark = pytest.mark.anyio

BOOK = Path(__file__).with_name("address_book.py")
POLICY = """
[privacy]
hide = ["email", "card"]
fields = ["full_name", "age"]

[[privacy.reveal]]
tools = ["book.send"]
kinds = ["email", "field"]

[privacy.secrets]
TOKEN = ["book.send"]

[[tools]]
match = "book.send"
require = "arguments.text != 'careful' || !arguments.to.endsWith('@example.com')"

[[tools]]
match = "book.publish"
when = "arguments.text.startsWith('ask')"
decision = "ask"
"""
SECRET = "hunter2-hunter2"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("book")


@pytest.fixture(scope="module")
async def session(
    anyio_backend: str, default_environment: Environment, folder: Path
) -> AsyncGenerator[belljar.SessionHandle]:
    (folder / "policy.toml").write_text(POLICY)
    (folder / "secrets.toml").write_text(f'TOKEN = "{SECRET}"\n')
    server = {"command": sys.executable, "args": [str(BOOK), str(folder / "notes")]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"book": server}}))
    async with (
        belljar.open_engine(
            data_directory=folder / "data",
            environment=str(default_environment.python),
            policy=str(folder / "policy.toml"),
            secrets_file=str(folder / "secrets.toml"),
            mcp_config=str(folder / "servers.json"),
            fork_start=False,
            pool_size=0,
        ) as engine,
        engine.open_session() as session,
    ):
        ready = await session.execute("from servers.book import *\nfrom toolbox import ToolError")
        assert ready.status == "ok", ready.error
        yield session


async def told(session: belljar.SessionHandle, code: str) -> str:
    said = await session.execute(code)
    assert said.status == "ok", said.error
    everything = said.model_dump_json()
    assert not [
        value for value in (PERSON["email"], PERSON["card"], PERSON["full_name"], SECRET) if str(value) in everything
    ]
    return said.stdout


def noted(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "notes").read_text().splitlines()[-1])


async def test_code_gets_tokens_in_place_of_values(session: belljar.SessionHandle) -> None:
    assert (
        await told(session, "someone = person()\nprint(*someone.values())")
        == "[FIELD_1] [EMAIL_1] [CARD_1] [FIELD_2]\n"
    )


async def test_text_from_a_server_cannot_pass_for_ours(session: belljar.SessionHandle) -> None:
    assert await told(session, "print(letter())") == "Dear [EMAIL_1], your card is [CARD_1]. [TEXT_1] [TEXT_2]\n"


async def test_a_tool_that_may_have_them_gets_the_values_and_says_tokens(
    session: belljar.SessionHandle, folder: Path
) -> None:
    code = "print(send(to=someone['email'], text=f\"{someone['card']} {letter()}\"))"
    answer = await told(session, code)
    assert noted(folder) == {
        "tool": "send",
        "to": PERSON["email"],
        "text": "[CARD_1] Dear ann@example.com, your card is [CARD_1]. [EMAIL_1] ${secret:TOKEN}",
        "age": 0,
    }
    assert '"to": "[EMAIL_1]"' in answer


async def test_rules_hold_for_what_tokens_stand_for(session: belljar.SessionHandle, folder: Path) -> None:
    code = "try:\n    send(to=person()['email'], text={!r})\nexcept ToolError as error:\n    print(error)"
    assert "noted" not in await told(session, code.format("before"))
    before = noted(folder)
    said = await told(session, code.format("careful"))
    assert "does not allow it with what the tokens in its arguments stand for" in said
    assert noted(folder) == before


async def test_a_number_that_was_hidden_comes_back_as_one(session: belljar.SessionHandle, folder: Path) -> None:
    await told(session, "send(to='x', age=someone['age'])")
    assert noted(folder)["age"] == PERSON["age"]


async def test_a_tool_that_may_not_have_them_gets_tokens(session: belljar.SessionHandle, folder: Path) -> None:
    assert "[EMAIL_1]" in await told(session, "print(publish(text=someone['email']))")
    assert noted(folder) == {"tool": "publish", "text": "[EMAIL_1]"}


async def test_a_question_about_a_call_is_on_record_with_its_tokens(session: belljar.SessionHandle) -> None:
    asked: list[str] = []

    async def agree(prompt: str) -> str:
        asked.append(prompt)
        return "yes"

    stream = session.stream("publish(text='ask ' + someone['email'])", on_input=agree)
    record = "".join([event.model_dump_json() async for event in stream])
    assert "[EMAIL_1]" in asked[0]
    assert "ask [EMAIL_1]" in record
    assert "[TEXT_" not in record


async def test_errors_of_tools_have_tokens_too(session: belljar.SessionHandle) -> None:
    code = "try:\n    fail(before={})\nexcept ToolError as error:\n    print(error)"
    assert "[EMAIL_1], [CARD_1]" in await told(session, code.format(0))
    # Long errors are cut: nothing of a value may stand before the cut.
    for before in (7_940, 7_950, 7_960, 7_970, 7_980):
        said = await told(session, code.format(before))
        assert "4111" not in said
        assert "ann@" not in said


async def test_names_addresses_and_bytes_of_media_have_tokens_too(session: belljar.SessionHandle) -> None:
    said = await told(
        session,
        "link, file = papers()\nprint(link.uri, link.name, file.uri, file.text)\nprint(link.uri.count('ann'))",
    )
    assert "ann@" not in said
    assert said.splitlines()[0].startswith("mailto:[EMAIL_1] [EMAIL_1] ")
    assert said.splitlines()[-1] == "0"


async def test_fields_in_an_error_have_tokens_too(session: belljar.SessionHandle) -> None:
    said = await told(session, "try:\n    refuse()\nexcept ToolError as error:\n    print(str(error))")
    assert "Ann Example" not in said
    assert "[FIELD_" in said


async def test_a_secret_reaches_its_tool_and_nothing_else(session: belljar.SessionHandle, folder: Path) -> None:
    answer = await told(session, "print(send(to='x', text='Bearer ${secret:TOKEN}'))")
    assert noted(folder)["text"] == f"Bearer {SECRET}"
    assert "Bearer [SECRET TOKEN]" in answer
    refused = await told(
        session, "try:\n    publish(text='${secret:TOKEN}')\nexcept ToolError as error:\n    print(error)"
    )
    assert "book.publish: it may not have the secret TOKEN" in refused
    assert noted(folder)["tool"] == "send"


async def test_nothing_on_disk_of_the_session_has_a_value(session: belljar.SessionHandle, folder: Path) -> None:
    await told(session, "import json\njson.dump(person(), open('person.json', 'w'))")
    values = [str(PERSON[name]).encode() for name in ("email", "card", "full_name")] + [SECRET.encode()]
    kept = [path for path in (folder / "data").rglob("*") if path.is_file()]
    assert any(path.name == "person.json" for path in kept)
    assert [path for path in kept for value in values if value in path.read_bytes()] == []
