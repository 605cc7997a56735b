"""The kernelspec, installed as users install it, and kernels that are started from it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belljar.environments import Environment
from live_server import clean_environment

pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'belljar-mcp[jupyter]'")


@contextmanager
def changed_variables(**variables: object) -> Iterator[None]:
    """Ours, and those of whatever is started from here; nothing of the developer's settings gets in."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith("BELLJAR_")]:
        patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, str(value))
    try:
        yield
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o711)
    return folder


@pytest.fixture(scope="module")
def installed(
    default_environment: Environment, data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The folder of the kernelspec `belljar`, which front ends find from here."""
    prefix = tmp_path_factory.mktemp("prefix")
    arguments = ["--prefix", str(prefix), "--environment", str(default_environment.python)]
    subprocess.run(
        [sys.executable, "-m", "belljar", "jupyter", "install", *arguments], check=True, env=clean_environment()
    )
    places = {"JUPYTER_PATH": prefix / "share/jupyter", "IPYTHONDIR": prefix / "ipython"}
    with changed_variables(BELLJAR_DATA_DIRECTORY=data_directory, **places):
        yield prefix / "share/jupyter/kernels/belljar"
