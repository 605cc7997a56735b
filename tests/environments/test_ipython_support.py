"""What environments lack to run sessions is brought along beside them."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.environments import ipython_support, open_environment
from belljar.errors import EnvironmentBroken
from belljar.files.private import shown_mode
from belljar.settings import EnvironmentEntry, Settings
from local_index import LocalIndex, add_support
from shared_environment import settings_with

pytestmark = pytest.mark.anyio


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalIndex:
    """An index that uv takes for its own; packages of the server's environment are not used instead of it."""
    monkeypatch.setattr(ipython_support, "server_packages", lambda *_: [])
    (tmp_path / "index").mkdir()
    index = LocalIndex(tmp_path / "index")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return index


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv"


@pytest.fixture
def settings(venv: Path, tmp_path: Path) -> Settings:
    return settings_with(environment=str(venv), data_directory=tmp_path / "data")


def site_packages(venv: Path) -> Path:
    (folder,) = venv.glob("lib/python*/site-packages")
    return folder


async def test_an_environment_without_ipython_gets_it_beside_and_stays_as_it_is(
    local_index: LocalIndex, venv: Path, settings: Settings
) -> None:
    add_support(local_index)

    environment = await open_environment(settings)

    assert environment.support is not None
    assert environment.support.is_relative_to(settings.data_directory)
    assert (environment.support / "IPython").is_dir()
    assert (environment.support / "cloudpickle").is_dir()
    assert environment.support in environment.readable
    assert (environment.kind, environment.python) == ("venv", venv / "bin" / "python")
    assert list(site_packages(venv).iterdir()) == []


async def test_a_folder_of_wheels_is_enough_without_an_index(
    local_index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_support(local_index)
    local_index.add_wheel("ham", "1.5", {"ham.py": "TASTE = 'salty'\n"})
    folder = tmp_path / "wheels"
    folder.mkdir()
    for wheel in (tmp_path / "index").rglob("*.whl"):
        wheel.rename(folder / wheel.name)
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    for name, value in {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    lunch = EnvironmentEntry(kind="managed", requirements=("ham",))
    settings = settings_with(environments={"lunch": lunch}, environment="lunch", data_directory=tmp_path / "data")

    environment = await open_environment(settings)

    said = subprocess.run(
        [environment.python, "-I", "-c", "import ham; print(ham.TASTE)"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "salty\n"
    assert environment.support is not None
    assert (environment.support / "IPython").is_dir()


async def test_it_is_fetched_once_for_all_interpreters_of_a_kind(
    local_index: LocalIndex, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_support(local_index)
    lines: list[str] = []
    first = await open_environment(settings, on_progress=lines.append)
    assert any(line.startswith("fetching IPython for Python 3.") for line in lines)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")

    assert await open_environment(settings) == first


async def test_an_environment_that_has_all_of_it_needs_none(venv: Path, settings: Settings) -> None:
    for package in ("ipython-9.0", "cloudpickle-3.0"):
        (site_packages(venv) / f"{package}.dist-info").mkdir()

    assert (await open_environment(settings)).support is None
    assert not settings.data_directory.exists()


async def test_packages_of_the_environment_that_do_not_go_with_it_are_told_of(
    local_index: LocalIndex, venv: Path, settings: Settings
) -> None:
    add_support(local_index)
    (site_packages(venv) / "traitlike.py").write_text("raise ImportError('too old')\n")

    with pytest.raises(EnvironmentBroken) as caught:
        await open_environment(settings)

    assert caught.value.message.endswith("ImportError: too old")
    assert caught.value.hint == f"Install it there: uv pip install --python {venv}/bin/python ipython"


async def test_an_index_without_it_is_quoted_and_leaves_nothing(
    local_index: LocalIndex, venv: Path, settings: Settings
) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        await open_environment(settings)

    assert "ipython" in caught.value.message
    assert "could not be fetched: " in caught.value.message
    assert f"uv pip install --python {venv}/bin/python ipython" in caught.value.hint
    assert not list((settings.data_directory / "support").glob("python*"))


async def test_one_that_lacks_only_cloudpickle_runs_without_it_if_need_be(
    local_index: LocalIndex, venv: Path, settings: Settings
) -> None:
    (site_packages(venv) / "ipython-9.0.dist-info").mkdir()

    assert (await open_environment(settings)).support is None


async def test_an_environment_of_the_servers_kind_gets_the_servers_ipython_without_an_index(
    venv: Path, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    lines: list[str] = []

    environment = await open_environment(settings, on_progress=lines.append)

    assert [line.partition(" for ")[0] for line in lines] == ["copying the server's IPython"]
    assert environment.support is not None
    assert {"IPython", "cloudpickle", "traitlets"} <= {path.name for path in environment.support.iterdir()}
    assert not (environment.support / "pytest").exists(), "only what it needs"
    assert list(site_packages(venv).iterdir()) == []
    assert (tmp_path / "cache").exists() is False, "uv was not asked"


async def test_sessions_of_other_users_can_read_it_whatever_the_umask_is(
    venv: Path, settings: Settings, umask_077: None
) -> None:
    environment = await open_environment(settings)

    assert environment.support is not None
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (environment.support, *environment.support.rglob("*"))}
    assert modes == {shown_mode(is_folder=True), shown_mode(is_folder=False)}


@pytest.fixture
def umask_077() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)
