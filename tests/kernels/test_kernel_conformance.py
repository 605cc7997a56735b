import os
from collections.abc import Iterator

import pytest

from belljar.kernels import ipython
from belljar.kernels.jupyter import kernel as jupyter_kernel

pytest.register_assert_rewrite("conformance")

from cells import DEADLINE_S, Place  # noqa: E402
from conformance import *  # noqa: E402, F403

IS_LONG = bool(os.environ.get("BELLJAR_LONG"))


@pytest.fixture(scope="module", params=["ipython", "jupyter:python3"])
def kind(request: pytest.FixtureRequest, place: Place) -> str:
    if request.param != "ipython" and place.provider.name == "process" and not IS_LONG:
        pytest.skip("a long trial: BELLJAR_LONG=1 runs it; in the default sandbox these kernels are tried anyway")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def long_patience() -> Iterator[None]:
    """The first completion of a Jupyter kernel takes two seconds of its processor, and a busy machine has little."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ipython, jupyter_kernel):
            patch.setattr(module, "QUESTION_TIMEOUT_S", DEADLINE_S)
        yield
