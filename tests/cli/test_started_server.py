"""What the start of a server over stdio costs, counted: times would be those of the machine that runs the tests."""

import subprocess
import sys
from pathlib import Path

from serving_process import variables

# These limits only go down. Whatever few need is imported when it is first asked for.
MOST_MODULES = 263
MOST_COLLECTIONS = 120

PROBE = """
import atexit, gc, sys
from belljar.cli import main

def tell():
    own = [name for name in sys.modules if name.partition(".")[0] == "belljar"]
    print(gc.get_stats()[0]["collections"], *own, file=sys.stderr)

atexit.register(tell)
main(["serve"])
"""


def test_a_server_over_stdio_starts_with_few_modules_and_hardly_ever_collects_garbage(tmp_path: Path) -> None:
    own = {"BELLJAR_SANDBOX": "process", "BELLJAR_ENVIRONMENT": sys.executable, "BELLJAR_FORK_START": "false"}
    answer = subprocess.run(
        [sys.executable, "-c", PROBE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**variables(tmp_path), **own},
    )
    collections, *modules = answer.stderr.splitlines()[-1].split()
    assert "belljar.mcp.stdio" in modules
    assert len(modules) <= MOST_MODULES, sorted(modules)
    # Nearly three times as many where the server is imported with the collector on: 0.15 s of its start.
    assert int(collections) <= MOST_COLLECTIONS
