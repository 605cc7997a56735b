"""`belljar serve` as a process of its own, as clients start it, and what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcp import StdioServerParameters

from belljar.environments import Environment

READY = re.compile(r"belljar serves MCP at (http://127\.0\.0\.1:\d+)/mcp")


def command(environment: Environment, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "belljar", "serve", "--environment", str(environment.python), *arguments]


def variables(folder: Path) -> dict[str, str]:
    """The server's whole environment: nothing of the developer's gets in."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "BELLJAR_DATA_DIRECTORY": str(folder),
        "BELLJAR_LOG_LEVEL": "WARNING",
        # A server in a sandbox of its own may find a smaller PATH of libraries; ours needs none.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def stdio_server(environment: Environment, folder: Path) -> StdioServerParameters:
    program, *arguments = command(environment)
    return StdioServerParameters(command=program, args=arguments, env=variables(folder), cwd=folder)


@contextmanager
def http_server(environment: Environment, folder: Path) -> Generator[tuple[str, "subprocess.Popen[str]"]]:
    """A server at a free port: its URL and its process, which is ended afterwards."""
    process = subprocess.Popen(
        command(environment, "--http", "127.0.0.1:0"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=variables(folder),
        cwd=folder,
    )
    assert process.stderr is not None
    with process.stderr:
        try:
            yield _ready_url(process), process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _ready_url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if found := READY.search(line):
            return found[1]
    raise AssertionError(f"the server ended before it was ready: {''.join(said)}")


def server_pid(folder: Path) -> int:
    """The one server that uses this folder."""
    (run,) = (folder / "runs").iterdir()
    return int(run.name.partition("-")[0])


def tree(pid: int) -> set[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found, pending = set[int](), [pid]
    while pending:
        one = pending.pop()
        found.add(one)
        pending += children.get(one, [])
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie nobody has waited for does not."""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found
