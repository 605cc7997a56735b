"""Limits hold under several callers at once: whoever takes a place reserves it before waiting for anything."""

import asyncio
import os
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import FORKS, Caller, connected, opened_runtime, session_in, text_of
from mcp.types import CallToolResult

from belljar.environments import Environment
from belljar.errors import BelljarError, QuestionClosed, TooLarge
from belljar.files.disk_usage import InstallRoom, NoRoom
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio

MOST_SESSIONS = 4
CALLERS = 12
DISK_MB = 20
FILE_BYTES = 9_000_000


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    limits: dict[str, Any] = {"max_sessions": MOST_SESSIONS, "disk_mb": DISK_MB, "hibernate": True}
    async with opened_runtime(
        default_environment, tmp_path_factory.mktemp("belljar"), ask_in_console="always", **limits, **FORKS
    ) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
async def no_session_stays(runtime: Runtime) -> AsyncGenerator[None]:
    yield
    for session in runtime.sessions.all():
        await runtime.sessions.clear(session.id, session.principal)


async def at_once(call: Callable[[int], Awaitable[CallToolResult]]) -> list[CallToolResult]:
    return await asyncio.gather(*map(call, range(CALLERS)))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["forks", "new sessions", "cells without a session", "all of them"])
async def test_no_more_sessions_are_open_than_max_sessions_however_many_are_asked_for_at_once(
    runtime: Runtime, caller: Caller, kind: str
):
    origin = await caller.new_session()
    await caller.execute("x = 1", origin)
    seen: list[int] = []

    async def ask(number: int) -> CallToolResult:
        calls = [
            lambda: caller.call("fork_session", session_id=origin),
            lambda: caller.call("new_session"),
            lambda: caller.call("execute_code", code="input()", wait_s=0),
        ]
        kinds = {"forks": 0, "new sessions": 1, "cells without a session": 2}
        answer = await calls[kinds.get(kind, number % 3)]()
        seen.append(len(runtime.sessions.all()))
        return answer

    answers = await at_once(ask)
    assert max(seen) <= MOST_SESSIONS
    assert len(runtime.sessions.all()) <= MOST_SESSIONS
    refused = [text_of(answer) for answer in answers if answer.is_error]
    assert all("busy: " in text or "sessions are open" in text for text in refused), refused
    assert len(refused) < CALLERS


async def test_a_place_that_a_fork_did_not_take_is_free_again(runtime: Runtime, caller: Caller):
    origin = await caller.new_session()
    await caller.execute("x = 1", origin)
    for _ in range(2 * MOST_SESSIONS):
        assert "no-checkpoint" in await caller.refusal("fork_session", session_id=origin, at="0123456789abcdef")
    forks = [session_in(await caller.call("fork_session", session_id=origin)) for _ in range(MOST_SESSIONS - 1)]
    assert len({origin, *forks}) == MOST_SESSIONS


async def test_uploads_at_once_share_the_room_that_is_left(runtime: Runtime, caller: Caller):
    encoded, session_id = b64encode(os.urandom(FILE_BYTES)).decode(), await caller.new_session()

    async def upload(number: int) -> bool:
        answer = await caller.call("upload_file", session_id=session_id, name=f"f{number}", base64=encoded)
        assert not answer.is_error or "too-large: disk_full" in text_of(answer)
        return not answer.is_error

    taken = await asyncio.gather(*map(upload, range(8)))
    assert sum(taken) == 2  # no fewer either: what is being written is not counted twice
    assert folder_bytes(runtime.sessions.get(session_id, "local").folders.workspace) == 2 * FILE_BYTES


async def test_installs_and_uploads_at_once_share_the_room_that_is_left(
    runtime: Runtime, caller: Caller, tmp_path: Path
):
    session = runtime.sessions.get(await caller.new_session(), "local")
    folders = session.folders
    room = InstallRoom((folders.workspace, folders.scratch, folders.home, folders.layer), DISK_MB)

    async def install(number: int) -> None:
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        (tree / f"package{number}").write_bytes(os.urandom(FILE_BYTES))
        async with room.room_for(tree):
            await asyncio.to_thread((tree / f"package{number}").rename, folders.layer / f"package{number}")

    async def fetch(number: int) -> None:
        async with room.room_for_file(FILE_BYTES):
            await asyncio.to_thread((folders.workspace / f"g{number}").write_bytes, os.urandom(FILE_BYTES))

    async def upload(number: int) -> None:
        await session.write_file(f"f{number}", os.urandom(FILE_BYTES))

    ways = [install, upload, fetch]
    ends = await asyncio.gather(*(ways[number % 3](number) for number in range(CALLERS)), return_exceptions=True)
    refused = [end for end in ends if end is not None]
    assert all(isinstance(end, NoRoom | TooLarge) for end in refused), refused
    assert len(refused) == CALLERS - 2
    assert folder_bytes(folders.workspace) + folder_bytes(folders.layer) == 2 * FILE_BYTES


async def test_a_question_takes_one_answer_of_those_that_come_at_once(runtime: Runtime, caller: Caller):
    running = await caller.execute("input('Who?')", wait_s=0)
    inbox = runtime.sessions.inbox
    (question,) = await until(lambda: inbox.waiting(None))

    async def answer(number: int) -> None:
        given = {"answer": f"caller {number}"}
        await inbox.answer(question.id, None, action="accept", values=given, by=f"caller {number}", where="console")

    ends = await asyncio.gather(*map(answer, range(CALLERS)), return_exceptions=True)
    assert [type(end) for end in ends if end is not None] == [QuestionClosed] * (CALLERS - 1)
    (record,) = [each for each in inbox.ended("local") if each.id == question.id]
    assert (await caller.ended(running.execution_id)).result == repr(record.answered_by)


async def test_calls_with_one_key_at_once_run_once_and_make_one_session(runtime: Runtime, caller: Caller):
    # A full server, where each call for a new session waits until another one is asleep.
    for _ in range(MOST_SESSIONS):
        await caller.execute("x = 1")
    before = {session.id for session in runtime.sessions.all()}

    async def run(_: int) -> CallToolResult:
        return await caller.call("execute_code", code="open('ran', 'a').write('x')", idempotency_key="once")

    answers = await at_once(run)
    assert not any(answer.is_error for answer in answers), [*map(text_of, answers)]
    (made,) = {session.id for session in runtime.sessions.all()} - before
    assert (await caller.execute("open('ran').read()", made)).result == "'x'"


async def test_of_several_forks_so_many_are_made_as_there_is_room_for_and_the_rest_is_told(
    runtime: Runtime, caller: Caller
):
    origin = await caller.new_session()
    await caller.execute("x = 1", origin)
    answers = await asyncio.gather(
        *(caller.call("fork_session", session_id=origin, count=MOST_SESSIONS) for _ in range(CALLERS))
    )
    assert len(runtime.sessions.all()) <= MOST_SESSIONS
    made = [answer.structured_content or {} for answer in answers if not answer.is_error]
    assert made
    for one in made:
        assert 0 < len(one["session_ids"]) < MOST_SESSIONS
        assert one["unmade"].startswith(f"{len(one['session_ids'])} of {MOST_SESSIONS} were made: 4 sessions are open")
    refused = [text_of(answer) for answer in answers if answer.is_error]
    assert len(made) + len(refused) == CALLERS
    assert all("sessions are open" in text for text in refused), refused


async def test_whoever_stops_waiting_for_several_forks_gives_all_places_back(runtime: Runtime, caller: Caller):
    origin = await caller.new_session()
    await caller.execute("x = 1", origin)
    session = runtime.sessions.get(origin, "local")
    async with session.turn:
        forking = asyncio.create_task(runtime.sessions.fork_many(origin, "local", count=MOST_SESSIONS - 1))
        await asyncio.sleep(0)
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
    told = await caller.fields("fork_session", session_id=origin, count=MOST_SESSIONS - 1)
    assert (len(told["session_ids"]), told["unmade"]) == (MOST_SESSIONS - 1, "")


async def test_whoever_stops_waiting_gives_the_place_back(runtime: Runtime):
    async with connected(runtime) as caller:
        origin = await caller.new_session()
        await caller.execute("x = 1", origin)
        session = runtime.sessions.get(origin, "local")
        async with session.turn:
            forks = [asyncio.create_task(runtime.sessions.fork(origin, "local")) for _ in range(MOST_SESSIONS - 1)]
            await asyncio.sleep(0)
            with anyio.fail_after(60), pytest.raises(BelljarError, match="max_sessions allows"):
                await runtime.sessions.fork(origin, "local")
            for fork in forks:
                fork.cancel()
            await asyncio.gather(*forks, return_exceptions=True)
        assert not (await caller.call("fork_session", session_id=origin)).is_error
