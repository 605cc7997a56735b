import sys
from pathlib import Path

import pytest

# Clients and servers as the tests of surfaces have them.
sys.path.append(str(Path(__file__).parent.parent / "surfaces"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
