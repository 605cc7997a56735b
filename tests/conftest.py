import pytest

from belljar.environments import Environment
from belljar.errors import EnvironmentBroken
from shared_environment import prepared_environment


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def default_environment() -> Environment:
    try:
        return prepared_environment()
    except EnvironmentBroken as error:
        if "Failed to fetch" not in error.message:
            raise
        pytest.skip(f"no package index in reach: {error.message}")
