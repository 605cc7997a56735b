from collections.abc import AsyncGenerator

import pytest
from calls import FORKS, opened_runtime
from data_plane import KEY, OTHER_KEY, Plane, opened_plane

from belljar.environments import Environment
from belljar.runtime import Runtime


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """One engine with the data plane for all tests of a file, for two callers."""
    chosen = {"surfaces": ["foundry"], "api_keys": [f"ada:{KEY}", f"bob:{OTHER_KEY}"], "max_upload_bytes": 8_000_000}
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **chosen, **FORKS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def plane(runtime: Runtime) -> AsyncGenerator[Plane]:
    """A client whose identifier has a session for all tests of a file; starting one takes half a second."""
    async with opened_plane(runtime) as plane:
        yield plane
