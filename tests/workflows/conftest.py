import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.runtime import Runtime
from ran_commands import belljar, place

# Clients and servers as the tests of surfaces have them.
sys.path.append(str(Path(__file__).parent.parent / "surfaces"))
from calls import Caller, connected

__all__ = ["belljar", "place"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    """A client of the newest protocol on the file's engine."""
    async with connected(runtime) as caller:
        yield caller
