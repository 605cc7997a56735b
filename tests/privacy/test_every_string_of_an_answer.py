"""A personal datum in every text that the protocol has room for: none of it gets past the redaction."""

import json
import logging
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from talkative_server import TOOLS, WHO

import belljar
from belljar.environments import Environment

pytestmark = pytest.mark.anyio

# Everything that code can find in a result, as text: of media the fields, the bytes and how they are shown.
LOOK = """
import toolbox
def looked(value):
    if isinstance(value, toolbox.Media):
        shown = [value.kind, value.mime, value.uri, value.name, repr(value), repr(value.forms()), repr(vars(value))]
        data = value.data if value.kind != "link" else b""
        return shown + [data.decode(each, "replace") for each in ("utf-8", "latin-1", "utf-16")]
    if isinstance(value, dict):
        return [looked([*value.items()]), [looked(each) for each in getattr(value, "media", [])]]
    return [looked(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("talkative")


@pytest.fixture(scope="module")
async def session(
    anyio_backend: str, default_environment: Environment, folder: Path
) -> AsyncGenerator[belljar.SessionHandle]:
    (folder / "policy.toml").write_text('[privacy]\nhide = ["email"]\nwhere = ["tools"]\n')
    server = {"command": sys.executable, "args": [str(Path(__file__).with_name("talkative_server.py"))]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"talkative": server}}))
    async with (
        belljar.open_engine(
            data_directory=folder / "data",
            environment=str(default_environment.python),
            policy=str(folder / "policy.toml"),
            mcp_config=str(folder / "servers.json"),
            pool_size=0,
            fork_start=False,
        ) as engine,
        engine.open_session() as session,
    ):
        ready = await session.execute(LOOK)
        assert ready.status == "ok", ready.error
        yield session


def read(path: Path) -> bytes:
    """What is in a file; nothing where it is none, or the generated tree has just been replaced by another."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("tool", TOOLS)
async def test_no_text_of_an_answer_reaches_the_session_the_journal_or_the_log(
    session: belljar.SessionHandle, folder: Path, caplog: pytest.LogCaptureFixture, tool: str
) -> None:
    caplog.set_level(logging.INFO)
    code = (
        f"from servers.talkative import {tool}\ntry:\n    r = {tool}()\nexcept Exception as e:\n    r = repr(e), str(e)"
    )
    result = await session.execute(f"{code}\nprint(looked(r))\nr")
    assert result.status == "ok", result.error
    # Not even what is left of it when the characters between were only hidden ones.
    assert not [each for each in (result.model_dump_json(), caplog.text) if WHO in each or "secret@" in each]
    # `os.walk` passes over folders that the server removes meanwhile.
    kept = [Path(parent, name) for parent, _, names in os.walk(folder / "data") for name in names]
    assert not [path.name for path in kept if WHO.encode() in read(path)]
    if tool not in ("progress", "logs", "asks"):
        assert "[EMAIL_" in result.model_dump_json()


async def test_names_and_addresses_have_no_characters_that_act_and_no_media_type_that_is_none(
    session: belljar.SessionHandle,
) -> None:
    code = "from servers.talkative import content\nm = [each for each in content() if isinstance(each, toolbox.Media)]"
    result = await session.execute(f"{code}\nprint(all(o.name.isprintable() and o.uri.isprintable() for o in m))")
    assert result.stdout == "True\n", result.error
    assert (await session.execute("print({each.mime for each in m})")).stdout == "{''}\n"
