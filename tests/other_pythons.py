"""Interpreters of other versions than the tests' own, where the host has them."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from uv import find_uv_bin


def other_python(version: str) -> Path:
    """The interpreter of that version, or a skipped test."""
    python = _find(version)
    if python is None:
        pytest.skip(f"no Python {version} on this host: `uv python install {version}` brings one")
    return python


@cache
def _find(version: str) -> Path | None:
    for candidate in _candidates(version):
        code = "import sys, ssl, ctypes; print('%d.%d' % sys.version_info[:2])"
        told = subprocess.run([candidate, "-I", "-c", code], capture_output=True, text=True)
        if told.returncode == 0 and told.stdout.strip() == version:
            return Path(candidate)
    return None


def _candidates(version: str) -> Iterator[str]:
    # Before the PATH, where pyenv has a program of every version that runs only the chosen one.
    home = Path(os.environ.get("PYENV_ROOT") or Path(pwd.getpwuid(os.getuid()).pw_dir) / ".pyenv")
    yield from map(str, sorted(home.glob(f"versions/{version}.*/bin/python"), reverse=True))
    if found := shutil.which(f"python{version}"):
        yield found
    command = [find_uv_bin(), "python", "find", "--no-python-downloads", "--managed-python", version]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode == 0:
        yield told.stdout.strip()
