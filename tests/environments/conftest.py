import socket
from collections.abc import Iterator

import pytest

from local_index import IndexedPackages, LocalIndex


@pytest.fixture
def index(indexed: IndexedPackages, monkeypatch: pytest.MonkeyPatch) -> LocalIndex:
    """A package index in a folder, for this test only: other tests need the user's."""
    for name, value in indexed.variables.items():
        monkeypatch.setenv(name, value)
    return indexed.packages


@pytest.fixture
def silent_index() -> Iterator[str]:
    """The address of an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"
