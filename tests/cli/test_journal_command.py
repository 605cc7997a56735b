"""`belljar journal`: what an operator does about a journal that is damaged, or gone."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ran_sessions import ran

from belljar.cli.doctor import check_journal
from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.journal.journal import open_journal
from belljar.servers import run_folder

Run = Callable[..., Any]
PAGE = 4096


@pytest.fixture
def command(belljar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path))
    return belljar


def overwrite_table(folder: Path, table: str) -> None:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    with (folder / "journal.sqlite").open("r+b") as file:
        file.seek((root - 1) * PAGE)
        file.write(b"\xa5" * PAGE)


def test_a_damaged_journal_is_named_by_every_command_and_salvaged_by_one(
    command: Run, default_environment: Environment, tmp_path: Path
) -> None:
    made = ran(tmp_path, default_environment, "x = 41")
    assert command("journal", "check").out.startswith(f"ok: {tmp_path}/journal.sqlite: ")
    assert [finding.status for finding in check_journal(tmp_path / "journal.sqlite")] == ["ok"]
    overwrite_table(tmp_path, "sessions")
    checked = command("journal", "check")
    assert (checked.code, checked.out.startswith("damaged: ")) == (1, True)
    (finding,) = check_journal(tmp_path / "journal.sqlite")
    assert (finding.status, "is damaged: " in finding.detail) == ("fail", True)
    with pytest.raises(SettingsError, match="belljar journal salvage"):
        ran(tmp_path, default_environment, "x")
    salvaged = command("journal", "salvage")
    assert salvaged.code == 0
    assert "1 executions" in salvaged.out
    assert "1 more sessions are known by their executions alone" in salvaged.out
    (kept,) = tmp_path.glob("journal.damaged-*.sqlite")
    assert f"the damaged file is kept: {kept}" in salvaged.out
    assert command("journal", "check").code == 0
    (line,) = json.loads(command("sessions", "--all", "--json").out)
    assert (line["session_id"], line["owner"], line["executions"]) == (made.session_id, "somebody", 1)
    assert command("journal", "salvage").err.startswith(f"{tmp_path}/journal.sqlite is in order")


def test_folders_that_the_journal_does_not_know_are_listed_and_given_to_somebody(command: Run, tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal.sqlite"):
        pass
    folder = tmp_path / "sessions" / "abandonedabandone"
    (folder / "workspace").mkdir(parents=True)
    listed = command("sessions", "--all", "--json")
    line = next(line for line in json.loads(listed.out) if line["session_id"] == folder.name)
    assert (line["owner"], line["last_cause"]) == ("", "was found without a record in the journal")
    assert f"files are in {tmp_path}/sessions/ID/workspace" in listed.err
    assert "1 session folders without a record" in command("journal", "check").out
    assert "1 session folders have no record" in command("journal", "salvage").err
    with run_folder(tmp_path):
        assert "a server uses" in command("journal", "salvage", "--owner", "key:ada").err
    assert "are key:ada's" in command("journal", "salvage", "--owner", "key:ada").out
    (line,) = [each for each in json.loads(command("sessions", "--all", "--json").out) if each["owner"] == "key:ada"]
    assert line["session_id"] == folder.name


def test_folders_are_listed_where_the_journal_itself_is_gone(command: Run, tmp_path: Path) -> None:
    (tmp_path / "sessions" / "abandonedabandone" / "workspace").mkdir(parents=True)
    (line,) = json.loads(command("sessions", "--all", "--json").out)
    assert line["session_id"] == "abandonedabandone"
