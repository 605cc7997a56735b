import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "surfaces"))

from workers import KEYS, Workers, two_workers

from belljar.environments import Environment


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def workers(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    """Two servers of one machine that are asked by whoever reaches them."""
    with two_workers(default_environment, tmp_path_factory.mktemp("machine")) as pair:
        yield pair


@pytest.fixture(scope="module")
def keyed_workers(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    """The same, for callers with keys."""
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    with two_workers(default_environment, tmp_path_factory.mktemp("keyed"), BELLJAR_API_KEYS=keys) as pair:
        yield pair
