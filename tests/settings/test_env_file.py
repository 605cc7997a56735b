"""The `.env` that every command reads: trusted or named, never over what is set, its values never told."""

import os
from pathlib import Path

import pytest
from mcp import Client, stdio_client

from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.settings import load_with_env_file
from belljar.settings.sources import ALIASES
from belljar.settings.trust import trust
from serving_process import COLD, stdio_server

TEXT = """# ours
export BELLJAR_MAX_QUEUE=3
MADE_UP_KEY='s3cret #1'
MADE_UP_URL="https://x.test/?a=$HOME" # why
EMPTY_ONE=
"""
NEW = ("MADE_UP_KEY", "MADE_UP_URL", "EMPTY_ONE")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*os.environ, *NEW, "BELLJAR_MAX_QUEUE"):
        if name.startswith("BELLJAR_") or name in (*ALIASES.values(), *NEW):
            # Set first, so that what the file sets is undone too.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_an_untrusted_file_is_not_read_and_the_log_says_how_to_trust_it(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (work / ".env").write_text(TEXT)
    settings, said = load_with_env_file()
    assert (settings.max_queue, said) == (load_with_env_file()[0].max_queue, "")
    assert "MADE_UP_KEY" not in os.environ
    assert f"If you have read it: belljar trust {work / '.env'}" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_trusted_file_sets_what_is_not_set_and_its_names_are_told_without_values(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / ".env").write_text(TEXT)
    trust(work / ".env", TEXT.encode())
    monkeypatch.setenv("MADE_UP_URL", "mine")
    settings, said = load_with_env_file()
    assert settings.max_queue == 3
    assert os.environ["MADE_UP_KEY"] == "s3cret #1"
    assert os.environ["MADE_UP_URL"] == "mine"
    assert os.environ["EMPTY_ONE"] == ""
    assert said == f"read {work / '.env'}: BELLJAR_MAX_QUEUE, MADE_UP_KEY, EMPTY_ONE; set already: MADE_UP_URL"
    (work / ".env").write_text(TEXT + "MORE=1\n")
    monkeypatch.delenv("MADE_UP_KEY")
    assert load_with_env_file()[1] == ""


def test_a_named_file_is_read_or_its_fault_is_told_with_the_line(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_ENV_FILE", "other.env")
    with pytest.raises(SettingsError, match=r"env_file .*other\.env is not there"):
        load_with_env_file()
    (work / "other.env").write_text("BELLJAR_MAX_QUEUE=4\n")
    assert load_with_env_file()[0].max_queue == 4
    (work / "other.env").write_text("GOOD=1\nnot a name = 's3cret\n")
    with pytest.raises(SettingsError, match=r"line 2 of .*other\.env is not NAME=value") as raised:
        load_with_env_file()
    assert "s3cret" not in str(raised.value)
    monkeypatch.setenv("BELLJAR_ENV_FILE", "")
    assert load_with_env_file()[1] == ""


@pytest.mark.anyio
async def test_a_server_obeys_its_file_and_its_sessions_see_nothing_of_it(
    default_environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "own.env").write_text("BELLJAR_SURFACES=toolbox\nMADE_UP_KEY=s3cret\n")
    server = stdio_server(default_environment, tmp_path, BELLJAR_ENV_FILE="own.env", **COLD)
    async with Client(stdio_client(server)) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        answer = await client.call_tool("execute_code", {"code": "import os; print(sorted(os.environ))"})
    assert "new_session" not in tools
    assert "MADE_UP_KEY" not in str(answer.content)
    assert "BELLJAR_ENV_FILE" not in str(answer.content)
    assert "'PATH'" in str(answer.content)
