"""Whoever follows a session is told of everything, in whatever order a busy machine lets things happen."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from belljar.change_signal import ChangeLog
from belljar.engine.contract import STREAM_CHARS
from belljar.engine.follow import SessionFollower
from belljar.engine.history import ExecutionRow, HistoryReader
from belljar.engine.models import ExecutionEntry, Followed, SessionEntry
from belljar.executions.execution import Execution
from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.models import ExecutionResult, OutputEvent

pytestmark = pytest.mark.anyio
EXECUTION, SESSION, OWNER = "e" * 32, "s" * 32, "somebody"


class Followable:
    """A session with one cell, whose journal is written by the test, and which runs under no server."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.journal = journal
        self.reader = HistoryReader(folder / "journal.sqlite", journal.commit)
        self.changes = ChangeLog(most=10)
        self.state = "running"
        self.ends_when_looked_at = False
        self.sequence = 0
        journal.submit(ExecutionRecord(EXECUTION, SESSION, OWNER, "code", None), 0.0)
        journal.start(EXECUTION)

    def say(self, text: str) -> None:
        self.sequence += 1
        self.journal.append(EXECUTION, OutputEvent(sequence=self.sequence, kind="stdout", text=text))

    def end(self) -> None:
        result = ExecutionResult(
            success=True,
            status="ok",
            execution_id=EXECUTION,
            session_id=SESSION,
            execution_count=1,
            output=[],
            stdout="",
            stderr="",
            sequence=self.sequence,
        )
        self.journal.finish(result)

    def live(self, row: ExecutionRow) -> Execution | None:
        """What the server has of a cell. It ends when somebody looks at it, after its row was read."""
        if row.result is None and self.ends_when_looked_at:
            self.state, self.ends_when_looked_at = "gone", False
            self.end()
        return None

    def entry(self, row: ExecutionRow) -> ExecutionEntry:
        self.live(row)
        status = row.result.status if row.result else "died" if self.state == "gone" else "running"
        return ExecutionEntry(
            execution_id=row.id,
            session_id=row.session_id,
            code=row.code,
            status=status,
            submitted_at="",
            events=row.result.sequence if row.result else 0,
        )

    async def session(self, session_id: str) -> SessionEntry:
        return SessionEntry.model_validate(
            {"session_id": session_id, "owner": OWNER, "environment": "", "state": self.state, "created_at": ""}
            | {"last_used_at": ""}
        )

    async def follow(self, after: str = "") -> AsyncGenerator[Followed]:
        follower = SessionFollower(SESSION, self.reader, self.changes, self.live, self.entry, self.session)
        async with aclosing(follower.run(after)) as happened:
            async for item in happened:
                yield item

    async def until(self, kind: str, after: str = "") -> list[Followed]:
        """What is told up to the first item of a kind."""
        told: list[Followed] = []
        async with asyncio.timeout(60), aclosing(self.follow(after)) as happened:
            async for item in happened:
                told.append(item)
                if item.kind == kind:
                    break
        return told


@pytest.fixture
async def followable(anyio_backend: str, tmp_path: Path) -> AsyncGenerator[Followable]:
    with open_journal(tmp_path / "journal.sqlite") as journal:
        one = Followable(tmp_path, journal)
        yield one
        await one.reader.aclose()


async def test_output_that_was_read_all_at_once_is_told_by_its_end(followable: Followable) -> None:
    followable.say("first\n")
    followable.say("number\n" * STREAM_CHARS + "held\n")
    told = await followable.until("tail")
    assert sum(len(item.output.text) for item in told if item.output) == len("first\n")
    tail = told[-1].tail
    assert tail is not None
    assert (tail.text.endswith("held\n"), tail.lines) == (True, STREAM_CHARS + 2)
    followable.end()
    assert (await followable.until("ended", told[-1].id))[-1].id == f"{EXECUTION}:2"


async def test_the_end_of_a_long_output_is_told_with_the_lines_that_came_before_it(followable: Followable) -> None:
    followable.say("number\n" * STREAM_CHARS)
    async with asyncio.timeout(60), aclosing(followable.follow()) as happened:
        texts = (item.tail.text async for item in happened if item.tail is not None)
        assert (await anext(texts)).endswith("number\n")
        followable.say("the last but one\n")
        followable.changes.publish("usage", "sampled", SESSION, OWNER)
        assert (await anext(texts)).endswith("number\nthe last but one\n")
        followable.say("the last\n")
        followable.changes.publish("usage", "sampled", SESSION, OWNER)
        assert (await anext(texts)).endswith("number\nthe last but one\nthe last\n")


async def test_the_end_is_told_of_a_cell_whose_last_output_was_not_kept(followable: Followable) -> None:
    followable.say("kept\n")
    followable.sequence += 2  # what is dropped while too much waits for a file that cannot be written
    followable.end()
    told = await followable.until("ended")
    assert [item.kind for item in told] == ["session", "cell", "output", "ended"]


async def test_a_cell_that_ends_with_its_session_while_it_is_read_ended_as_it_did(followable: Followable) -> None:
    followable.ends_when_looked_at = True
    last = (await followable.until("ended"))[-1]
    assert last.execution is not None
    assert last.execution.status == "ok"


async def test_what_happened_to_a_session_before_somebody_followed_it_is_told(followable: Followable) -> None:
    followable.say("x\n")
    followable.end()
    followable.state = "idle"  # after the page was made, before its stream was opened
    followable.changes.publish("execution", "ended", SESSION, OWNER, EXECUTION)
    (first,) = await followable.until("session", f"{EXECUTION}:1")
    assert first.session is not None
    assert first.session.state == "idle"


async def test_a_follower_for_whom_too_much_happened_is_told_to_load_everything_again(followable: Followable) -> None:
    told: list[str] = []
    async with asyncio.timeout(60), aclosing(followable.follow()) as happened:
        async for item in happened:
            told.append(item.kind)
            if item.kind == "cell":
                for _ in range(20):
                    followable.changes.publish("usage", "sampled", "another", OWNER)
    assert told == ["session", "cell", "reset"]
