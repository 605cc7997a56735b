"""Servers that end while an environment is being made leave nobody at work, and the next one goes on."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wires import HELLO, Wire, tool_call

from local_index import LocalIndex, add_support
from serving_process import COLD, variables
from waiting import until_blocking

ENVIRONMENTS = '{"small": {"kind": "managed", "requirements": ["house"]}}'


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """An index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


def serve(folder: Path, index: str) -> "subprocess.Popen[bytes]":
    chosen = {"BELLJAR_ENVIRONMENTS": ENVIRONMENTS, "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(folder / "cache")}
    chosen["UV_HTTP_RETRIES"] = "0"
    return subprocess.Popen(
        [sys.executable, "-m", "belljar", "serve", "--environment", "small"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**variables(folder), **COLD, **chosen},
    )


def descendants(pid: int) -> list[int]:
    """Everybody below a process, whatever group or session they are in."""
    found: list[int] = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def close_stdin(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize("end", [close_stdin, subprocess.Popen.kill], ids=["stdin closes", "it is killed"])
def test_nobody_works_on_when_the_server_ends_and_the_next_one_goes_on(
    tmp_path: Path, silent: socket.socket, end: Callable[["subprocess.Popen[bytes]"], None]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with serve(data, f"http://127.0.0.1:{silent.getsockname()[1]}/simple") as process:
        try:
            wire = Wire(process)
            wire.send(HELLO, {"jsonrpc": "2.0", "method": "notifications/initialized"})
            wire.send(tool_call(1, "execute_code", code="1"))
            asked, _ = silent.accept()  # uv is at work
            workers = descendants(process.pid)
            assert any("uv" in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[0] for pid in workers)
            end(process)
            # Long before the index is given up.
            status = process.wait(30)
            assert status == (-signal.SIGKILL if end is subprocess.Popen.kill else 0)
            until_blocking(lambda: not any(map(is_running, workers)))
            asked.close()
        finally:
            process.kill()
            said = process.stderr.read() if process.stderr else b""
        assert b"Traceback" not in said, said
    begun = {path: path.stat().st_ino for path in data.rglob("pyvenv.cfg")}

    index = LocalIndex(tmp_path / "index")
    (tmp_path / "index").mkdir()
    add_support(index)
    index.add_wheel("house", "1.0", {"house.py": "floors = 1\n"})
    with serve(data, index.url) as process:
        try:
            wire = Wire(process)
            wire.ask(HELLO)
            wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
            listed: dict[str, Any] = wire.ask(tool_call(1, "check_installed_packages", packages=["house"]))
            assert "house: 1.0" in json.dumps(listed), listed
        finally:
            process.kill()
    made = {path: path.stat().st_ino for path in data.rglob("pyvenv.cfg")}
    assert made == begun
    assert len(made) == 1


def test_while_the_environment_is_made_calls_say_so_and_send_progress(tmp_path: Path, silent: socket.socket) -> None:
    with serve(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/simple") as process:
        try:
            wire = Wire(process)
            wire.ask(HELLO)
            wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
            asked, _ = silent.accept()  # uv is at work
            wire.send(tool_call(1, "execute_code", code="print('ran')", wait_s=2))
            told = wire.receive()
            assert told["method"] == "notifications/progress"
            assert told["params"]["message"].strip()
            answer = wire.answer_to(1)["result"]
            text, fields = answer["content"][0]["text"], answer["structuredContent"]
            assert text.startswith("It has not started yet: it waits for the environment of sessions, which is being")
            assert "(no output)" not in text
            assert fields["status"] == "running"
            assert fields["waits_for"].startswith("the environment of sessions")
            again = wire.ask(tool_call(2, "get_execution", execution_id=fields["execution_id"]))["result"]
            assert again["content"][0]["text"].startswith("It has not started yet")
            asked.close()
            silent.close()
            ended = wire.ask(tool_call(3, "get_execution", execution_id=fields["execution_id"], wait_s=60))["result"]
            assert "waits_for" not in ended["structuredContent"]
            assert "environment" in ended["content"][0]["text"]
            assert ended["structuredContent"]["status"] == "rejected"
        finally:
            process.kill()
