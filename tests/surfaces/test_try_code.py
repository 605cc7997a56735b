"""The tool `try_code` as a model meets it: alternatives side by side, one kept, nothing else left."""

from collections.abc import AsyncGenerator

import pytest
from calls import FORKS, Caller, connected, opened_runtime, text_of

from belljar.environments import Environment
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("try"), try_code=True, **FORKS) as opened:
        if gap := opened.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        yield opened


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with connected(runtime) as caller:
        yield caller
    for session in runtime.sessions.all():
        await runtime.sessions.clear(session.id, session.principal)


async def test_the_first_that_works_is_gone_on_with(runtime: Runtime, caller: Caller):
    session_id = (await caller.execute("x = [1]")).session_id
    answer = await caller.call("try_code", session_id=session_id, alternatives=["x / 0", "x.append(2); x", "x"])
    fields = answer.structured_content or {}
    assert [one["status"] for one in fields["alternatives"]] == ["error", "ok", "ok"]
    assert (fields["kept"], fields["alternatives"][1]["value"]) == (2, "[1, 2]")
    lines = text_of(answer).splitlines()
    assert lines[0] == f"session_id: {fields['session_id']}"
    assert lines[1].startswith("1. error, ")
    assert "TypeError" in lines[1]
    assert (await caller.execute("x", fields["session_id"])).result == "[1, 2]"
    assert (await caller.execute("x", session_id)).result == "[1]"
    assert {session.id for session in runtime.sessions.all()} == {session_id, fields["session_id"]}


async def test_one_by_its_number_or_none_is_kept(runtime: Runtime, caller: Caller):
    session_id = (await caller.execute("x = 1")).session_id
    kept = await caller.fields("try_code", session_id=session_id, alternatives=["x = 2", "1 / 0"], keep=2)
    assert (kept["kept"], (await caller.execute("x", kept["session_id"])).result) == (2, "1")
    none = await caller.fields("try_code", session_id=session_id, alternatives=["x = 2"], keep="none")
    assert (none["kept"], none["session_id"]) == (None, session_id)
    failed = await caller.call("try_code", session_id=session_id, alternatives=["1 / 0"])
    assert text_of(failed).endswith(f"None is kept; session {session_id} is as it was.")
    assert {session.id for session in runtime.sessions.all()} == {session_id, kept["session_id"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"alternatives": []}, "there are 0 alternatives"),
        ({"alternatives": ["1"] * 1_000}, "there are 1,000 alternatives"),
        ({"alternatives": ["1", "#" * 10_000_000]}, "piece 1: code has 10,000,000 bytes"),
        ({"alternatives": ["1"], "keep": 2}, "keep is 2"),
        ({"alternatives": ["1"], "keep": 0}, "keep is 0"),
        ({"alternatives": ["1"], "session_id": "nothing"}, "does not exist"),
    ],
)
async def test_what_cannot_be_tried_is_refused_and_makes_nothing(
    runtime: Runtime, caller: Caller, arguments: dict[str, object], said: str
):
    session_id = (await caller.execute("x = 1")).session_id
    assert said in await caller.refusal("try_code", **{"session_id": session_id, **arguments})
    assert [session.id for session in runtime.sessions.all()] == [session_id]
