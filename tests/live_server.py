"""A server as users start it: `belljar serve --http`, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

READY = "belljar serves MCP at "


def clean_environment(**variables: object) -> dict[str, str]:
    """Our variables without any setting, and these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BELLJAR_")}
    return {**kept, "LOG_LEVEL": "ERROR", **{name: str(value) for name, value in variables.items()}}


@contextmanager
def live_server(
    data_directory: Path, environment: Path, bind: str = "127.0.0.1:0", **variables: object
) -> Generator[str]:
    """The URL of a server that has a port of its own; one without a warm process, unless it is asked for."""
    variables = {"BELLJAR_FORK_START": "false", **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "belljar", "serve", "--http", bind],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(BELLJAR_DATA_DIRECTORY=data_directory, BELLJAR_ENVIRONMENT=environment, **variables),
    ) as process:
        try:
            yield _ready_url(process)
        finally:
            process.terminate()


def _ready_url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
        said.append(line)
    raise AssertionError(f"the server did not start: {''.join(said)}")
