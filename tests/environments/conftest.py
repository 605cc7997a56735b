import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest

from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.environments.managed import Recipe, prepare
from local_index import LocalIndex
from shared_environment import settings_with


@dataclass(frozen=True)
class Indexed:
    """A local index, and the variables that make uv use it instead of the user's."""

    packages: LocalIndex
    variables: dict[str, str]


@pytest.fixture(scope="session")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    folder = tmp_path_factory.mktemp("index")
    # For the user of its own that uv has in a sandbox of a server run by root.
    folder.chmod(0o755)
    packages = LocalIndex(folder)
    packages.add_wheel("house", "1.0", {"house.py": "floors = 1\n"})
    cache = str(tmp_path_factory.mktemp("uv-cache"))
    return Indexed(packages, {"UV_DEFAULT_INDEX": packages.url, "UV_CACHE_DIR": cache})


@pytest.fixture
def index(indexed: Indexed, monkeypatch: pytest.MonkeyPatch) -> LocalIndex:
    """A package index in a folder, for this test only: other tests need the user's."""
    for name, value in indexed.variables.items():
        monkeypatch.setenv(name, value)
    return indexed.packages


@pytest.fixture(scope="session")
def small_environment(indexed: Indexed, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with nothing but `house` 1.0."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "lock.txt").write_text("house==1.0\n")
    recipe = Recipe("small", folder / "lock.txt")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in indexed.variables.items():
            patch.setenv(name, value)
        python = anyio.run(partial(prepare, settings_with(data_directory=folder), recipe))
    return describe("small", inspect_interpreter(python))


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    (tmp_path / "session").mkdir()
    return tmp_path / "session" / "layer"


@pytest.fixture
def silent_index() -> Iterator[str]:
    """The address of an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"
