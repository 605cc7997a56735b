import pytest

from belljar.environments import Environment
from belljar.errors import EnvironmentBroken
from shared_environment import prepared_environment

# A file is one worker's: those that take longest come first, or the others would wait for them at the end.
LONGEST = [
    "test_ordinary_user.py",
    "test_keep_alive.py",
    "test_transports.py",
    "test_session_packages.py",
    "test_upstream_lives.py",
    "test_faults.py",
    "test_kernels_alike.py",
    "test_kernel_copies.py",
    "test_api.py",
    "test_mcp_conformance.py",
    "test_no_leaks.py",
    "test_wrapper_kernel.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See `LONGEST`; for `pytest -n`, see `scripts/test`."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


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
