"""`belljar serve` as a process of its own, as clients start it, and what it leaves behind."""

import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mcp import StdioServerParameters

from belljar.environments import Environment

# For a server whose warm process would cost more than the few cells of a test: see `fork_start`.
COLD = {"BELLJAR_FORK_START": "false"}
READY = re.compile(r"belljar serves MCP at (https?://[\w.]+:\d+)/mcp")


def free_port() -> int:
    """A port of loopback that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def serve_command(environment: Environment, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "belljar", "serve", "--environment", str(environment.python), *arguments]


def serve_over_http(environment: Environment) -> list[str]:
    return serve_command(environment, "--http", "127.0.0.1:0")


def variables(folder: Path) -> dict[str, str]:
    """The server's whole environment: nothing of the developer's gets in."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "BELLJAR_DATA_DIRECTORY": str(folder),
        "BELLJAR_LOG_LEVEL": "WARNING",
        # The usual modules take two seconds of a processor in every server that forks.
        "BELLJAR_PRELOAD": "json",
    }


def stdio_server(environment: Environment, folder: Path, **more_variables: str) -> StdioServerParameters:
    program, *arguments = serve_command(environment)
    chosen = {**variables(folder), **more_variables}
    return StdioServerParameters(command=program, args=arguments, env=chosen, cwd=folder)


@contextmanager
def http_server(
    program: list[str], folder: Path, **more_variables: str
) -> Generator[tuple[str, "subprocess.Popen[str]"]]:
    """A server at a free port: its URL and its process, which is ended afterwards."""
    process = subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**variables(folder), **more_variables},
        cwd=folder,
    )
    assert process.stderr is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Read to the end, or a talkative server would stop at a full pipe.
    reader = threading.Thread(target=_pass_on, args=(process.stderr, lines))
    reader.start()
    try:
        yield _ready_url(lines), process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def _pass_on(stream: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _ready_url(lines: "queue.SimpleQueue[str]") -> str:
    said: list[str] = []
    while line := lines.get(timeout=90):
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


def supervisors(data_directory: Path) -> set[int]:
    """The processes that keep sandboxes for the servers of a data directory."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(data_directory / "keep").encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie nobody has waited for does not."""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found
