from pathlib import Path

import pytest

from belljar.environments import Environment
from cells import Place, usable


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def process_place(default_environment: Environment, tmp_path: Path) -> Place:
    """For what does not depend on the provider."""
    return Place(usable("process"), default_environment, tmp_path)
