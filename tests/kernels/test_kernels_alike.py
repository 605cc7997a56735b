import pytest

pytest.register_assert_rewrite("conformance")

from conformance import *  # noqa: E402, F403


@pytest.fixture(scope="module", params=["ipython", "jupyter:python3"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
