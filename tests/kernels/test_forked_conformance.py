"""Kernels that are forked from a warm process do all that others do."""

import pytest

from cells import ForkingPlace

pytest.register_assert_rewrite("conformance")

from conformance import *  # noqa: E402, F403


@pytest.fixture(scope="module")
def place(forking_place: ForkingPlace) -> ForkingPlace:
    return forking_place
