"""Which execution a caller means, and what is taken back with it."""

import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.errors import NoCheckpoint
from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.sessions.checkpoints import UndoHistory

SESSION = "a session"
pytestmark = pytest.mark.anyio


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    with open_journal(tmp_path / "journal.sqlite") as journal:
        yield journal


def history_of(journal: Journal, *ids: str) -> UndoHistory:
    history = UndoHistory(SESSION, journal)
    for identifier in ids:
        journal.submit(ExecutionRecord(identifier, SESSION, "somebody", "1", None), time.time())
        journal.start(identifier)
        history.add(identifier)
    return history


@pytest.mark.parametrize(("to", "target"), [(1, "c"), ("1", "c"), (3, "a"), ("b", "b")])
async def test_an_execution_is_meant_by_its_id_or_by_a_number(journal: Journal, to: str | int, target: str) -> None:
    assert history_of(journal, "a", "b", "c").target(to, hint="") == target


async def test_an_id_of_digits_is_an_id_first(journal: Journal) -> None:
    assert history_of(journal, "2", "b", "c").target("2", hint="") == "2"


@pytest.mark.parametrize("to", [0, 4, "0", "d", "-1", "1" * 40])
async def test_what_is_no_execution_of_the_session_is_refused(journal: Journal, to: str | int) -> None:
    with pytest.raises(NoCheckpoint):
        history_of(journal, "a", "b", "c").target(to, hint="")


async def test_what_is_taken_back_is_undone_with_all_that_came_after_it(journal: Journal) -> None:
    history = history_of(journal, "a", "b", "c")
    assert history.undo_since("b") == ["b", "c"]
    assert {record.id: record.is_undone for record in journal.of_session(SESSION)} == {"a": False, "b": True, "c": True}
    assert history.target(1, hint="") == "a"
    assert history.undo_since("b") == []


async def test_the_next_server_knows_what_was_not_taken_back(journal: Journal) -> None:
    history_of(journal, "a", "b", "c").undo_since("c")
    restored = UndoHistory(SESSION, journal)
    restored.restore()
    assert restored.target(2, hint="") == "a"
