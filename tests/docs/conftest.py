import sys
from pathlib import Path

import pytest

# Helpers of other folders, which are there only when a test of theirs was collected before.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("surfaces", "inside")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
