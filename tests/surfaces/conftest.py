from collections.abc import AsyncGenerator, Generator

import pytest
import under_test
from calls import Caller, connected, opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime

ALWAYS_AT = {
    "test_cancelled_at_once.py": under_test.KINDS,
    "test_interpreter.py": (under_test.ALONE, under_test.WORKERS),
    "test_tool_questions.py": under_test.KINDS,
}
"""Files of surfaces that are always run before several servers; those of names and code files are in `tests/fleet`."""
_ONE_DIRECTORY = "two servers that are one each share a data directory"
NOT_AT_SEVERAL = {
    "test_too_many_sessions_is_a_busy_error": "the server in front tells of its own limit",
    "test_two_servers_on_one_data_directory_keep_out_of_each_others_sessions": _ONE_DIRECTORY,
    "test_a_session_is_renamed_by_the_server_that_has_it": _ONE_DIRECTORY,
    "test_while_the_disk_is_full_idle_sessions_stay_awake": "the server in front has a disk of its own that is full",
    "test_a_session_that_sleeps_is_woken_by_a_server_elsewhere_with_all_that_is_its_own": "what comes from the store "
    "wakes where it is asked for, and the server in front has no room",
    "test_refusals_are_counted_by_their_kind": "both servers are in this process, and count together",
    "test_strange_code_is_a_result_and_breaks_nothing_else[0]": "no client sends a lone surrogate over HTTP",
    "test_two_looks_at_one_question_never_answer_the_next_one_with_it[legacy]": "a question that another connection "
    "has answered stays open there: see the guide of a big machine",
}

_IN_A_STORE = "it looks into the engine, which is to fetch the session from the store first"
NOT_AT_HOSTS = {
    "test_a_sleeping_session_is_its_owners_alone": _IN_A_STORE,
    "test_a_sleeping_session_is_read_and_cleared_without_a_place_among_those_that_are_awake": _IN_A_STORE,
    "test_variables_that_come_back_are_not_called_lost_in_the_log": _IN_A_STORE,
    "test_what_nobody_asks_for_is_removed_in_the_end": "what a store has is removed by its own sweep, once an hour",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = ALWAYS_AT.get(metafunc.definition.path.name)
    if kinds is not None and under_test.KIND == under_test.ALONE:
        metafunc.parametrize("kind", kinds, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skipped: dict[str, str] = {}
    if under_test.KIND != under_test.ALONE:
        skipped = NOT_AT_SEVERAL | (NOT_AT_HOSTS if under_test.KIND == under_test.HOSTS else {})
    for item in items if skipped else ():
        if reason := skipped.get(item.name):
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
