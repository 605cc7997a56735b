"""Environments of conda: real ones, installed by rattler from a channel of our own.

No tool of the family can be had without its registry, so that the listing of one is tried with a script in its place.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import anyio
import platformdirs
import pytest
from conda_channel import Channel, python_package

from belljar.environments import open_environment
from belljar.environments.base import describe, inspect_interpreter
from belljar.environments.conda.places import CondaPlace, find_conda, list_conda
from belljar.environments.installed_check import check_installed, describe_packages
from belljar.environments.installs import install
from belljar.errors import EnvironmentBroken
from belljar.python.local import open_engine
from belljar.sandboxes import providers
from belljar.settings import Settings
from local_index import LocalIndex
from shared_environment import settings_with, share_support


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `conda create -n town python house libgarden` leaves: ROOT/envs/town."""
    folder = tmp_path_factory.mktemp("conda")
    channel = Channel(folder / "channel")
    channel.add_python()
    files = python_package("big_house", "1.0", {"house/__init__.py": "floors = 1\n"})
    channel.add("big-house", "1.0", files, depends=["python"], is_python=True)
    channel.add("libgarden", "3.2", {"lib/libgarden.txt": b"green"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        specs = ("python", "big-house", "libgarden")

        async def install_town() -> None:
            await channel.install(folder / "root" / "envs" / "town", *specs, cache=folder / "cache")

        anyio.run(install_town)
    return folder / "root"


@pytest.fixture(autouse=True)
def nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any conda; the host's own stays out of sight."""
    for name in ("CONDA_PREFIX", "CONDA_EXE", "CONDA_ROOT", "MAMBA_ROOT_PREFIX", "CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(platformdirs.user_cache_path()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("belljar.environments.conda.places._USUAL_ROOTS", ("~/miniconda3",))
    return tmp_path


def test_a_folder_is_taken_by_its_path(root: Path) -> None:
    assert find_conda(str(root / "envs" / "town")) == root / "envs" / "town"


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("MAMBA_ROOT_PREFIX", "."),
        ("CONDA_ROOT", "."),
        ("CONDA_EXE", "bin/conda"),
        ("CONDA_PREFIX", "envs/other"),
        ("CONDA_ENVS_PATH", "envs"),
    ],
)
def test_a_name_is_found_where_variables_lead(
    root: Path, variable: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(root / place))

    assert find_conda("town") == root / "envs" / "town"


def test_a_name_is_found_in_the_list_that_the_tools_share(root: Path, nothing_else: Path) -> None:
    (nothing_else / ".conda").mkdir()
    (nothing_else / ".conda" / "environments.txt").write_text(f"/gone/envs/town\n{root}/envs/town\n")

    assert find_conda("town") == root / "envs" / "town"
    assert list_conda() == [CondaPlace("town", root / "envs" / "town")]


def test_a_name_is_asked_of_a_tool_at_last(root: Path, nothing_else: Path) -> None:
    (nothing_else / "bin").mkdir()
    answer = json.dumps({"envs": [str(root / "envs" / "town"), "/gone"]})
    script = f'#!/bin/sh\n[ "$*" = "env list --json" ] && echo \'{answer}\'\n'
    (nothing_else / "bin" / "micromamba").write_text(script)
    (nothing_else / "bin" / "micromamba").chmod(0o755)

    assert find_conda("town") == root / "envs" / "town"
    with pytest.raises(EnvironmentBroken) as caught:
        find_conda("village")
    assert caught.value.hint == "Run: micromamba create -n village python"


def test_the_usual_places_are_looked_at_and_the_known_names_told(root: Path, nothing_else: Path) -> None:
    (nothing_else / "miniconda3").symlink_to(root)

    assert find_conda("town") == nothing_else / "miniconda3" / "envs" / "town"
    with pytest.raises(EnvironmentBroken) as caught:
        find_conda("village")
    assert caught.value.message == "no conda environment is called village"
    assert caught.value.hint.startswith("Found: base, town. Run: conda create -n village")


def test_two_of_one_name_are_told_apart_by_their_paths(
    root: Path, nothing_else: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nothing_else / ".conda" / "envs" / "town" / "conda-meta").mkdir(parents=True)
    monkeypatch.setenv("CONDA_ROOT", str(root))

    with pytest.raises(EnvironmentBroken) as caught:
        find_conda("town")

    assert caught.value.message.startswith("several conda environments are called town: ")
    assert str(root / "envs" / "town") in caught.value.message


def test_one_without_python_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "empty" / "conda-meta").mkdir(parents=True)

    with pytest.raises(EnvironmentBroken) as caught:
        find_conda(str(tmp_path / "empty"))

    assert caught.value.message == f"the conda environment {tmp_path}/empty has no Python"
    assert caught.value.hint == f"Run: conda install -p {tmp_path}/empty python"


def test_packages_of_conda_are_known_by_every_name(root: Path) -> None:
    prefix = root / "envs" / "town"
    environment = describe("town", inspect_interpreter(prefix / "bin" / "python"), kind="conda")

    names = ["big-house", "house", "big_house>=2", "libgarden", "libgarden>=4", "castle"]
    answers = {status.name: (status.installed, status.version) for status in check_installed(environment, None, names)}

    assert answers == {
        "big-house": (True, "1.0"),
        "house": (True, "1.0"),
        "big_house>=2": (False, "1.0"),
        "libgarden": (True, "3.2"),
        "libgarden>=4": (False, "3.2"),
        "castle": (False, None),
    }
    described = describe_packages(environment)
    assert described.packages["libgarden"] == "3.2"
    assert "python" in described.packages
    assert described.size_bytes > 1_000_000
    assert prefix in environment.readable


@pytest.mark.anyio
async def test_what_the_index_lacks_is_told_with_condas_command(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = root / "envs" / "town"
    environment = describe("town", inspect_interpreter(prefix / "bin" / "python"), kind="conda")
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", LocalIndex(tmp_path / "index").url)
    (tmp_path / "session").mkdir()

    (outcome,) = await install(environment, tmp_path / "session" / "layer", ["castle"])

    assert outcome.error is not None
    assert outcome.error.endswith(f"for the operator to install: conda install -p {prefix} castle")


@pytest.mark.anyio
async def test_a_session_runs_in_one_sealed_off_with_ipython_brought_along(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in providers(Settings())["namespace"].check():
        if not check.is_ok:
            pytest.skip(f"{check.name}: {check.detail}")
    prefix = root / "envs" / "town"
    monkeypatch.setenv("CONDA_ROOT", str(root))
    entry = {"kind": "conda", "path": "town"}
    chosen: dict[str, Any] = {"environment": "town", "environments": {"town": entry}, "fork_start": False}
    share_support(tmp_path / "data")
    settings = settings_with(data_directory=tmp_path / "data", **chosen)
    try:
        await open_environment(settings)
    except EnvironmentBroken as error:
        if "could not be fetched" not in error.message:
            raise
        pytest.skip(f"no package index in reach: {error.message}")
    before = subprocess.run(["find", prefix], capture_output=True, check=True).stdout

    async with open_engine(settings) as engine, engine.open_session() as session:
        code = "import house, os, sys; print(house.floors, os.environ['CONDA_PREFIX'] == sys.prefix); sys.prefix"
        result = await session.execute(code, timeout_s=60)

    assert (result.output, result.result) == (["1 True\n"], repr(str(prefix)))
    assert subprocess.run(["find", prefix], capture_output=True, check=True).stdout == before
