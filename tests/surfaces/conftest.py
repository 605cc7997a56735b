from collections.abc import AsyncGenerator, Generator

import pytest
import under_test
from calls import Caller, connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime

ALWAYS_AT = {
    "test_interpreter.py": (under_test.ALONE, under_test.WORKERS),
    "test_tool_questions.py": (under_test.ALONE, under_test.WORKERS, under_test.HOSTS),
}
"""Files of surfaces that are always run before several servers; those of names and code files are in `tests/fleet`."""
NOT_AT_SEVERAL = {
    "test_too_many_sessions_is_a_busy_error": "the server in front tells of its own limit",
    "test_a_session_that_sleeps_is_woken_by_a_server_elsewhere_with_all_that_is_its_own": "what comes from the store "
    "wakes where it is asked for, and the server in front has no room",
    "test_refusals_are_counted_by_their_kind": "both servers are in this process, and count together",
    "test_strange_code_is_a_result_and_breaks_nothing_else[0]": "no client sends a lone surrogate over HTTP",
    "test_two_looks_at_one_question_never_answer_the_next_one_with_it[legacy]": "a question that another connection "
    "has answered stays open there: see the guide of a big machine",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = ALWAYS_AT.get(metafunc.definition.path.name)
    if kinds is not None and under_test.KIND == under_test.ALONE:
        metafunc.parametrize("kind", kinds, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if under_test.KIND != under_test.ALONE else ():
        if reason := NOT_AT_SEVERAL.get(item.name):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def kind(request: pytest.FixtureRequest) -> Generator[str]:
    """What the tests of a file are about: see `under_test`."""
    under_test.kind = getattr(request, "param", under_test.KIND)
    yield under_test.kind
    under_test.kind = under_test.KIND


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
