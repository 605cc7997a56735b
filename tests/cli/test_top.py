import io
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
from rich.console import Console

import belljar as package
from belljar.cli.session_table import ServersSnapshot, SessionTable
from belljar.control import ServerAnswer, SessionLine
from belljar.environments import Environment
from belljar.models import SessionInfo
from belljar.sessions.session import iso
from live_server import clean_environment

Run = Callable[..., Any]
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


def line(session_id: str = "a" * 32, *, cpu_s: float = 0.0, read_at_s: float = 0.0, **fields: Any) -> SessionLine:
    """A session that was used ten seconds ago."""
    told: dict[str, Any] = {
        "session_id": session_id,
        "environment": "/srv/science/bin/python",
        "kernel": "ipython",
        "sandbox": "namespace",
        "state": "idle",
        "created_at": iso(time.time() - 60),
        "last_used_at": iso(time.time() - 10),
        "expires_at": iso(time.time() + 60),
        "age_s": 60,
        "memory_mb": 1234.5,
        "executions": 7,
        "files": 2,
        "checkpoints": 3,
        **fields,
    }
    return SessionLine("key:ada", cpu_s, read_at_s, SessionInfo(**told))


def shown(board: SessionTable, width: int = 160, height: int = 20) -> str:
    written = io.StringIO()
    Console(width=width, height=height, file=written).print(board)
    return written.getvalue()


# One frame


@pytest.fixture
def once(belljar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """One frame of the servers that use `tmp_path`."""
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path))
    return partial(belljar, "top", "--once")


def test_no_server_is_an_answer(belljar: Run, place: Path) -> None:
    outcome = belljar("top", "--once")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith("no running server uses ")
    assert list(place.iterdir()) == []


@pytest.mark.anyio
async def test_a_frame_has_every_session_with_what_it_uses(
    once: Run, default_environment: Environment, tmp_path: Path
) -> None:
    flags = _engine(tmp_path, default_environment)
    async with package.open_engine(**flags) as engine, engine.open_session() as busy, engine.open_session() as idle:
        await idle.execute("x = 1")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(busy.execute, "while True: pass")
            with anyio.fail_after(30):
                while "running" not in (told := await anyio.to_thread.run_sync(once)).out:
                    pass
            await busy.interrupt()
    titles, *rows = told.out.splitlines()
    assert titles.split("  ")[0] == "server"
    cells = {row[8:].split()[0]: row for row in rows}
    assert cells.keys() == {busy.id, idle.id}

    def cell(session_id: str, title: str) -> str:
        return cells[session_id][titles.index(title) :].split("  ")[0].strip()

    assert [cell(busy.id, title) for title in ("server", "owner", "state", "idle")] == [
        str(os.getpid()), "local", "running", "-"
    ]  # fmt: skip
    assert (cell(idle.id, "state"), cell(idle.id, "cells"), cell(idle.id, "last cause")) == ("idle", "1", "-")
    assert int(cell(busy.id, "cpu").removesuffix("%")) > int(cell(idle.id, "cpu").removesuffix("%"))
    assert int(cell(idle.id, "memory").removesuffix(" MB")) > 10
    assert told.err == ""


def _engine(data_directory: Path, environment: Environment) -> dict[str, object]:
    """Settings of an engine without a warm process, which a handful of cells do not need."""
    return {"data_directory": data_directory, "environment": str(environment.python), "fork_start": False}


def test_a_server_that_hangs_is_named(once: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1-hung"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as silent, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the whole path may be longer than a socket's address can be
        silent.bind("operator.sock")
        silent.listen()
        told = once()
    assert (told.code, told.out) == (0, "")
    assert told.err == "the server with pid 1 did not answer\n"


def test_cpu_is_what_was_used_between_two_looks() -> None:
    before = ServersSnapshot(
        [ServerAnswer(1, [line("a" * 32, cpu_s=5, read_at_s=100), line("b" * 32, cpu_s=5, read_at_s=100)])]
    )
    look = ServersSnapshot(
        [
            ServerAnswer(
                1,
                [
                    line("a" * 32, cpu_s=6, read_at_s=104),
                    line("b" * 32, cpu_s=1, read_at_s=104),  # rewound meanwhile: another process
                    line("c" * 32, cpu_s=9, read_at_s=104),
                ],
            )
        ]
    )
    board = SessionTable("/data", look, before).text()
    titles, *rows = board.splitlines()
    assert [row[titles.index("cpu") :].split()[0] for row in rows] == ["25%", "-", "-"]
    assert all(
        row[titles.index("cpu") :].split()[0] == "-" for row in SessionTable("/data", look).text().splitlines()[1:]
    )


def test_a_frame_fits_its_screen() -> None:
    look = ServersSnapshot(
        [ServerAnswer(9, [line(f"{number:032x}", last_cause="cause " * 20) for number in range(50)])]
    )
    for width, height in ((160, 20), (80, 10), (40, 6)):
        lines = shown(SessionTable("/data", look), width, height).splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert lines[-1].startswith("… and ")
    wide, narrow = shown(SessionTable("/data", look)), shown(SessionTable("/data", look), 80)
    assert "science" in wide
    assert "checkpoints" in wide
    assert "cause" in narrow
    assert "1 server, 50 sessions, 0 running" in wide


@pytest.mark.parametrize("width", [36, 40, 44, 52, 60, 72, 80, 96, 118])
def test_on_a_narrow_screen_columns_are_left_out_and_not_cut(width: int) -> None:
    look = ServersSnapshot([ServerAnswer(123456, [line("a" * 32, state="running", executions=12345)])])
    _, _, titles, row = shown(SessionTable("/data", look), width).splitlines()
    assert titles.split()[:2] in (["session", "state"], ["server", "session"])
    assert {"a" * 12, "running", "1,234"} <= set(row.split())
    assert "…" not in titles + row


def test_what_a_session_chose_cannot_move_the_cursor() -> None:
    look = ServersSnapshot([ServerAnswer(9, [line(environment="kernel:\x1b[2J", last_cause="[red]\x1b]0;title\x07")])])
    board = SessionTable("/data", look)
    for text in (board.text(), shown(board)):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]" in text


def test_servers_without_sessions_and_no_servers_say_so() -> None:
    assert SessionTable("/data", ServersSnapshot([])).notes() == ["no running server uses /data"]
    assert "no session is open" in shown(SessionTable("/data", ServersSnapshot([ServerAnswer(9, [])])))
    assert "did not answer" in shown(SessionTable("/data", ServersSnapshot([ServerAnswer(9, None)])))


# Live


class Terminal:
    """The other end of a terminal that the command runs in."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor = descriptor
        self.process = process
        self.seen = b""

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))[0], self.seen
            try:
                self.seen += os.read(self._descriptor, 65_536)
            except OSError:  # the command has closed its end
                assert text in self.seen, self.seen

    def press(self, key: bytes) -> None:
        os.write(self._descriptor, key)


@contextmanager
def terminal(data_directory: Path) -> Generator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "belljar", "top"],
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


def test_q_ends_it_and_gives_the_screen_back(tmp_path: Path) -> None:
    with terminal(tmp_path) as screen:
        screen.wait_for(b"no running server uses")
        assert ENTER_SCREEN in screen.seen
        screen.press(b"q")
        screen.wait_for(LEAVE_SCREEN)
        assert screen.process.wait(10) == 0


def test_an_interrupt_ends_it_without_a_word(tmp_path: Path) -> None:
    with terminal(tmp_path) as screen:
        screen.wait_for(b"no running server uses")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for(LEAVE_SCREEN)
        assert screen.process.wait(10) == 0
    assert b"Traceback" not in screen.seen


@pytest.mark.anyio
async def test_sessions_come_and_go_while_it_runs(default_environment: Environment, tmp_path: Path) -> None:
    flags = _engine(tmp_path, default_environment)
    with terminal(tmp_path) as screen:
        await anyio.to_thread.run_sync(screen.wait_for, b"no running server uses")
        async with package.open_engine(**flags) as engine:
            await anyio.to_thread.run_sync(screen.wait_for, b"no session is open")
            async with engine.open_session() as session:
                await anyio.to_thread.run_sync(screen.wait_for, session.id[:12].encode())
        screen.press(b"Q")
        await anyio.to_thread.run_sync(screen.wait_for, LEAVE_SCREEN)
