from collections.abc import AsyncGenerator

import pytest
from calls import Caller, connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """One engine for all tests of a file."""
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), fork_start=True) as runtime:
        yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    """A client of the newest protocol on the file's engine."""
    async with connected(runtime) as caller:
        yield caller


@pytest.fixture(scope="module")
async def shared_session(runtime: Runtime) -> str:
    """A session for cells that do not mind what others left in it; starting one takes half a second."""
    async with connected(runtime) as caller:
        return await caller.new_session()
