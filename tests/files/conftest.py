from collections.abc import Generator
from pathlib import Path

import pytest
from hostile_trees import SECRET, place_of


@pytest.fixture(params=["root", "ordinary"])
def place(request: pytest.FixtureRequest) -> Generator[Path]:
    """A session folder, and a file outside it that nothing may reach."""
    with place_of(request.param) as folder:
        (folder / "session").mkdir()
        (folder / "outside").mkdir()
        (folder / "outside" / "file").write_bytes(SECRET)
        yield folder
