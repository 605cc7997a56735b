"""Kernels of others, from the package index, in an environment that is made once for all test runs."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uv

from shared_environment import shared_settings

# One folder a list: a changed one is another environment.
PACKAGES = ("bash_kernel>=0.10", "xeus-python>=0.17", "deno>=2.5")


@contextmanager
def _held(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def foreign_kernels() -> Path:
    """The environment's folder; skips where there is no package index in reach."""
    folder = shared_settings().data_directory / "foreign-kernels"
    with _held(folder.with_suffix(".lock")):
        done = folder / "packages"
        if not done.is_file() or done.read_text() != "\n".join(PACKAGES):
            _make(folder)
            done.write_text("\n".join(PACKAGES))
    return folder


def _make(folder: Path) -> None:
    python = str(folder / "bin/python")
    _run(uv.find_uv_bin(), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    _run(uv.find_uv_bin(), "pip", "install", "--quiet", "--python", python, *PACKAGES)
    _run(python, "-m", "bash_kernel.install", "--prefix", str(folder))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0 and "Failed to fetch" in done.stderr:
        pytest.skip(f"no package index in reach: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
