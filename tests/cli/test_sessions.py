import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from ran_sessions import ran

import belljar as package
from belljar.cli.sessions import duration
from belljar.cli.streams import columns, fitted
from belljar.environments import Environment
from belljar.journal.journal import open_journal
from belljar.journal.session_records import SessionRecords

Run = Callable[..., Any]


@pytest.fixture
def ask(belljar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`belljar sessions` of the servers that use `tmp_path`."""
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path))
    return partial(belljar, "sessions")


def test_no_sessions_is_an_answer(belljar: Run, place: Path) -> None:
    outcome = belljar("sessions")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith("no sessions: ")
    assert belljar("sessions", "--json").out == "[]\n"
    assert list(place.iterdir()) == []


@pytest.mark.anyio
async def test_the_sessions_of_every_server_are_listed(
    ask: Run, default_environment: Environment, tmp_path: Path
) -> None:
    flags: dict[str, object] = {"data_directory": tmp_path, "environment": str(default_environment.python)}
    flags["fork_start"] = False
    async with (
        package.open_engine(**flags) as one,
        package.open_engine(**flags) as two,
        one.open_session() as first,
        two.open_session() as second,
    ):
        await first.execute("open('a', 'w').close()")
        await second.execute("import os\nos._exit(3)")
        told = await anyio.to_thread.run_sync(ask, "--json")
        table = await anyio.to_thread.run_sync(ask)
    lines = {line["session_id"]: line for line in json.loads(told.out)}
    assert lines.keys() == {first.id, second.id}
    assert (lines[first.id]["executions"], lines[first.id]["files"], lines[first.id]["state"]) == (1, 1, "idle")
    assert lines[first.id]["checkpoints"] == 1
    titles, *rows = table.out.splitlines()
    assert titles.split()[:3] == ["session", "state", "environment"]
    (row,) = (row for row in rows if row.startswith(first.id))
    assert row[titles.index("checkpoints") :].split()[0] == "1"
    assert {row.split()[0] for row in rows} == {first.id, second.id}
    (fallen,) = (row for row in rows if row.startswith(second.id))
    assert fallen.endswith("kernel-died: the kernel's process ended with exit status 3")
    assert lines[second.id]["last_cause"] in fallen
    assert lines[first.id]["last_cause"] is None
    assert (told.err, table.err) == ("", "")


def test_sessions_that_sleep_are_listed_with_all(ask: Run, default_environment: Environment, tmp_path: Path) -> None:
    slept = ran(tmp_path, default_environment, "x = 1")
    plain, everything, told = ask(), ask("--all"), ask("--all", "--json")
    assert plain.out == ""
    assert "--all also lists" in plain.err
    (row,) = everything.out.splitlines()[1:]
    assert row.split()[:2] == [slept.session_id, "asleep"]
    (line,) = json.loads(told.out)
    assert (line["session_id"], line["state"], line["owner"], line["executions"], line["server"]) == (
        *(slept.session_id, "asleep", "somebody", 1, None),
    )


def test_sessions_of_a_server_that_was_killed_are_listed_with_all(ask: Run, tmp_path: Path) -> None:
    async def write() -> None:
        with open_journal(tmp_path / "journal.sqlite") as journal:
            SessionRecords(journal, "1-dead").enter("abandoned", "somebody", "default", "")
            SessionRecords(journal, "1-dead").enter("pooled", "", "default", "", "unborn")

    anyio.run(write)
    (line,) = json.loads(ask("--all", "--json").out)
    assert (line["session_id"], line["owner"], line["files"]) == ("abandoned", "somebody", None)
    assert "the next one recovers it" in line["last_cause"]
    assert "the next one recovers it" in ask("--all").out


def test_a_table_loses_what_it_can_spare_and_then_the_ends_of_its_longest_cells() -> None:
    rows = [("session", "state", "owner", "last"), ("0123456789ab", "idle", "somebody", "x" * 60)]
    assert fitted(rows, 200, ("owner",)) == [[*row] for row in rows]
    narrow = fitted(rows, 80, ("owner",))
    assert narrow[0] == ["session", "state", "last"]
    assert len(columns(narrow).splitlines()[1]) == 80
    assert max(map(len, columns(fitted(rows, 40, ("owner",))).splitlines())) <= 40
    # Nothing is cut to less than a few letters, however narrow the terminal is.
    assert fitted(rows, 10, ("owner",))[1][2] == "xxxxxxx…"


def test_a_server_that_was_killed_is_passed_over(ask: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1-dead"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left_behind:
        _bind(left_behind, folder)
    answer = ask("--json")
    assert (answer.code, answer.out) == (0, "[]\n")


def test_a_server_that_hangs_does_not_hang_the_command(ask: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1-hung"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as silent:
        _bind(silent, folder)
        silent.listen()
        answer = ask()
    assert "did not answer" in answer.err
    assert "Traceback" not in answer.err


def _bind(server: socket.socket, folder: Path) -> None:
    # A relative path: the whole one may be longer than a socket's address can be.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        server.bind("operator.sock")


@pytest.mark.parametrize(("seconds", "shown"), [(0.9, "0s"), (59, "59s"), (61, "1m01s"), (3_700, "1h01m")])
def test_an_age_is_shown_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
