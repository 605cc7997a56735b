import asyncio
import fcntl
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from ran_sessions import ran

import belljar as package
from belljar.cli.sessions import duration
from belljar.cli.streams import columns, draw_screen, fitted
from belljar.control import SessionLine, ask_servers
from belljar.environments import Environment
from belljar.journal.journal import open_journal
from belljar.journal.session_records import SessionRecords
from belljar.models import SessionInfo
from live_server import clean_environment

Run = Callable[..., Any]
SESSION = SessionInfo(
    session_id="a" * 32,
    environment="default",
    kernel="ipython",
    sandbox="namespace",
    state="idle",
    created_at="2026-11-19T12:00:00Z",
    last_used_at="2026-11-19T12:00:00Z",
    expires_at="2026-11-19T13:00:00Z",
    age_s=60,
    memory_mb=90,
    executions=7,
    files=2,
)


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


def test_a_server_of_an_earlier_version_is_named_and_one_that_is_gone_is_not(ask: Run, tmp_path: Path) -> None:
    for name, is_running in (("1-earlier", True), ("2-gone", False)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "operator.sock").touch()
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        if is_running:
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            os.close(lock)
    answer = ask()
    assert [line for line in answer.err.splitlines() if "warning" in line] == [
        "warning: the server with pid 1 did not answer"
    ]


def _bind(server: socket.socket, folder: Path) -> None:
    # A relative path: the whole one may be longer than a socket's address can be.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        server.bind("http.sock")


@pytest.mark.parametrize(("seconds", "shown"), [(0.9, "0s"), (59, "59s"), (61, "1m01s"), (3_700, "1h01m")])
def test_an_age_is_shown_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


# --watch


class Terminal:
    """The other end of a terminal that the command runs in."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor = descriptor
        self.process = process
        self.seen = b""

    def wait_for(self, text: bytes, start: int = 0) -> None:
        deadline = time.monotonic() + 30
        while text not in self.seen[start:]:
            assert select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))[0], self.seen
            try:
                self.seen += os.read(self._descriptor, 65_536)
            except OSError:  # the command has closed its end
                assert text in self.seen[start:], self.seen


@contextmanager
def terminal(data_directory: Path) -> Generator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "belljar", "sessions", "--watch"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**clean_environment(BELLJAR_DATA_DIRECTORY=data_directory), "TERM": "xterm", "COLUMNS": "120"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_an_interrupt_ends_the_watch_without_a_word(tmp_path: Path) -> None:
    with terminal(tmp_path) as screen:
        screen.wait_for(b"no running server uses")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(10) == 0
    assert b"Traceback" not in screen.seen


@pytest.mark.anyio
async def test_sessions_come_and_go_while_it_watches(default_environment: Environment, tmp_path: Path) -> None:
    flags: dict[str, object] = {"data_directory": tmp_path, "environment": str(default_environment.python)}
    with terminal(tmp_path) as screen:
        await anyio.to_thread.run_sync(screen.wait_for, b"no running server uses")
        async with package.open_engine(**flags, fork_start=False) as engine, engine.open_session() as session:
            await anyio.to_thread.run_sync(screen.wait_for, session.id[:12].encode())
        seen = len(screen.seen)
        await anyio.to_thread.run_sync(screen.wait_for, b"no running server uses", seen)


def test_where_there_is_no_terminal_each_look_is_whole_and_a_note_comes_once(tmp_path: Path) -> None:
    """Of JSON each look is a line, as of tables, and a reader that has seen enough ends the watch."""
    with subprocess.Popen(
        [sys.executable, "-m", "belljar", "sessions", "--watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(BELLJAR_DATA_DIRECTORY=tmp_path),
    ) as process:
        assert process.stdout
        assert process.stderr
        assert [process.stdout.readline() for _ in range(3)] == [b"[]\n"] * 3
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(10) == 141
    assert told.count(b"no sessions: ") == 1
    assert b"Traceback" not in told


@pytest.mark.parametrize(("width", "height"), [(160, 20), (80, 10), (40, 6)])
def test_what_is_drawn_fits_its_screen(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    for count in (height - 1, height, 50):
        drawn = io.StringIO()
        draw_screen(drawn, [f"{number} {'cause ' * 40}\x1b]0;title\x07" for number in range(count)])
        lines = drawn.getvalue().removeprefix("\x1b[H").removesuffix("\x1b[J").replace("\x1b[K", "").splitlines()
        assert len(lines) < height
        assert max(map(len, lines)) <= width
        assert "\x1b" not in "".join(lines)
        assert lines[-1].startswith("… and ") == (count >= height)


@pytest.mark.anyio
async def test_a_server_of_another_version_may_tell_more_of_its_sessions(tmp_path: Path) -> None:
    told = {"principal": "local", "cpu_s": 1.0, **SESSION.model_dump()}
    folder = tmp_path / "runs" / f"{os.getpid()}-other"
    folder.mkdir(parents=True)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"items": [told]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        server = await asyncio.start_unix_server(answer, "http.sock")
    async with server:
        (asked,) = await ask_servers(tmp_path)
    assert asked.sessions == [SessionLine("local", SESSION)]
