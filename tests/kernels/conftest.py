"""Kernels to run cells in: one of every kind behind every provider, shared by the tests of a module."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.kernels.base import Kernel
from cells import ForkingPlace, Place, open_forking_place, shared_id, usable


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
def own_place(place: Place) -> Place:
    """The same place, in a folder of the test's own."""
    folder = place.folder / f"own-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o711)
    return replace(place, folder=folder)


@pytest.fixture(scope="module")
async def forking_place(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ForkingPlace]:
    """Its kernels are forked from one warm process, which the tests of a module share.

    It has imported nothing for cells: the usual modules take two seconds of a processor in every module of tests.
    """
    async with open_forking_place(default_environment, tmp_path_factory.mktemp("forks"), preload=[]) as place:
        yield place


@pytest.fixture(scope="module")
def kind() -> str:
    """Overridden where a module tests more than the default."""
    return "ipython"


@pytest.fixture(scope="module")
async def kernel(place: Place, kind: str) -> AsyncIterator[Kernel]:
    """Shared: a test must leave it alive."""
    async with place.open(kind, shared_id(kind)) as kernel:
        yield kernel
