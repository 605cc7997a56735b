"""The core without its products: their folders can be removed, and nothing else of belljar minds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import belljar
from belljar.products import PRODUCTS

PACKAGE = Path(belljar.__file__).parent


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without the folders of products."""
    folder = tmp_path_factory.mktemp("core")
    gone = [name.removeprefix("belljar.") for name in PRODUCTS]
    shutil.copytree(PACKAGE, folder / "belljar", ignore=lambda place, _: gone if Path(place) == PACKAGE else [])
    return folder


def ran(core: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BELLJAR_", "AZURE_"))}
    environment = {**kept, "PYTHONPATH": str(core), **variables}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=core
    )


def test_every_module_of_the_core_can_be_imported_without_its_products(core: Path) -> None:
    code = (
        "import importlib, pathlib, pkgutil, belljar\n"
        "assert pathlib.Path(belljar.__file__).is_relative_to(pathlib.Path.cwd()), belljar.__file__\n"
        "from belljar.products import products\n"
        "assert products() == ()\n"
        "for module in pkgutil.walk_packages(belljar.__path__, 'belljar.'):\n"
        "    if '.inside.' not in module.name and not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
    )
    done = ran(core, "-c", code)
    assert done.returncode == 0, done.stderr


def test_code_runs_without_products(core: Path, tmp_path: Path) -> None:
    done = ran(
        core,
        *("-m", "belljar", "run", "--sandbox", "process", "--environment", sys.executable, "-c", "print(6 * 7)"),
        BELLJAR_DATA_DIRECTORY=str(tmp_path),
        BELLJAR_FORK_START="false",
    )
    assert done.stdout == "42\n", done.stderr


def test_a_surface_of_a_product_that_is_not_there_is_refused_by_name(core: Path, tmp_path: Path) -> None:
    done = ran(
        core,
        *("-m", "belljar", "serve", "--surface", "foundry", "--http", "127.0.0.1:0", "--environment", sys.executable),
        BELLJAR_DATA_DIRECTORY=str(tmp_path),
        BELLJAR_SANDBOX="process",
        BELLJAR_FORK_START="false",
    )
    assert done.returncode == 2
    assert "the surface foundry is not part of this installation" in done.stderr
    assert "Traceback" not in done.stderr
