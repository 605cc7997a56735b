"""Kernels that are forked from a warm process do all that others do, whatever came before their first cell."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from belljar.kernels.base import Kernel
from cells import ORIGINS, ForkingPlace, Place, open_origin, shared_id

pytest.register_assert_rewrite("conformance")

from conformance import *  # noqa: E402, F403


@pytest.fixture(scope="module", params=[origin for origin in ORIGINS if origin != "cold"])
def origin(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def place(origin: str, forking_place: ForkingPlace) -> ForkingPlace:
    folder = forking_place.folder / origin.replace(" ", "-")
    folder.mkdir(mode=0o711)
    return replace(forking_place, folder=folder, identities={})


@pytest.fixture(scope="module")
async def kernel(origin: str, place: Place, kind: str) -> AsyncIterator[Kernel]:
    async with open_origin(place, origin, shared_id(kind)) as kernel:
        yield kernel
