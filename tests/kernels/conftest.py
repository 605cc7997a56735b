"""Kernels to run cells in: one of every kind behind every provider, shared by the tests of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cells import Place, shared_id, usable

from belljar.environments import Environment
from belljar.kernels.base import Kernel


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["process", "namespace", "gvisor"])
def place(
    request: pytest.FixtureRequest, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    return Place(usable(request.param), default_environment, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def process_place(default_environment: Environment, tmp_path: Path) -> Place:
    """For what does not depend on the provider."""
    return Place(usable("process"), default_environment, tmp_path)


@pytest.fixture
def own_place(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The same provider, in a folder of the test's own."""
    return Place(place.provider, place.environment, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def kind() -> str:
    """Overridden where a module tests more than the default."""
    return "ipython"


@pytest.fixture(scope="module")
async def kernel(place: Place, kind: str) -> AsyncIterator[Kernel]:
    """Shared: a test must leave it alive."""
    async with place.open(kind, shared_id(kind)) as kernel:
        yield kernel
