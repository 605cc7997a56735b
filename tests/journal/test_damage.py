"""A journal whose pages were overwritten: found, told apart from a full disk, and read as far as it can be."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from belljar.errors import JournalDamaged
from belljar.journal.damage import FileCheck, Finding
from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.journal.salvage import salvage
from belljar.journal.session_records import SessionRecords
from belljar.models import ExecutionResult, OutputEvent

pytestmark = pytest.mark.anyio

OWNER = "somebody"
PAGE = 4096
SESSIONS, EXECUTIONS = 12, 40


@pytest.fixture
def path(anyio_backend: str, tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def fill(path: Path) -> None:
    """Sessions with executions that say something each, as a server leaves them."""
    with open_journal(path) as journal:
        records = SessionRecords(journal, "run")
        for session in range(SESSIONS):
            session_id = f"session{session:02}"
            records.enter(session_id, OWNER, "default", "")
            for number in range(EXECUTIONS):
                execution_id = f"{session_id}execution{number:02}"
                journal.submit(ExecutionRecord(execution_id, session_id, OWNER, f"code {number}", None), 1.0 + number)
                journal.start(execution_id)
                for sequence in (1, 2, 3):
                    journal.append(execution_id, OutputEvent(sequence=sequence, kind="stdout", text="x" * 700))
                journal.finish(result_of(execution_id, session_id))
            records.put_to_sleep(session_id, "slept")


def result_of(execution_id: str, session_id: str) -> ExecutionResult:
    return ExecutionResult(
        success=True, status="ok", execution_id=execution_id, session_id=session_id, execution_count=1, output=[],
        stdout="said", stderr="", sequence=3,
    )  # fmt: skip


def pages_of(path: Path, table: str) -> list[int]:
    """The pages of a table that have no others below them, in order; see SQLite's "Database File Format"."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return leaves(path.read_bytes(), root)


def leaves(raw: bytes, number: int) -> list[int]:
    page = raw[(number - 1) * PAGE : number * PAGE]
    if page[0] not in (2, 5):
        return [number]
    cells = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n]) for n in range(int.from_bytes(page[3:5]))]
    below = [*(int.from_bytes(page[cell : cell + 4]) for cell in cells), int.from_bytes(page[8:12])]
    return [leaf for one in below for leaf in leaves(raw, one)]


def overwrite(path: Path, *pages: int) -> None:
    with path.open("r+b") as file:
        for number in pages:
            file.seek((number - 1) * PAGE)
            file.write(b"\xa5" * PAGE)


async def test_a_file_that_is_in_order_is_found_so(path: Path) -> None:
    fill(path)
    assert FileCheck(path).run() == Finding("")


async def test_a_check_that_is_stopped_says_that_it_is_not_complete(path: Path) -> None:
    fill(path)
    check = FileCheck(path)
    check.stop()
    assert check.run() == Finding("", is_complete=False)


@pytest.mark.parametrize("table", ["executions", "events"])
async def test_overwritten_pages_are_found_and_what_is_left_is_recovered(path: Path, table: str) -> None:
    fill(path)
    with open_journal(path) as journal:
        tag = journal.tag
    overwrite(path, *pages_of(path, table)[20:22])
    assert FileCheck(path).run().damage
    salvaged = salvage(path, "default")
    assert FileCheck(path).run() == Finding("")
    assert FileCheck(salvaged.kept).run().damage
    assert salvaged.unreadable == [table]
    with open_journal(path) as journal:
        records = SessionRecords(journal, "next")
        assert journal.tag == tag
        assert len(records.all_asleep()) == SESSIONS
        left = [record for n in range(SESSIONS) for record in journal.of_session(f"session{n:02}")]
        assert all(record.result is not None and record.result.stdout == "said" for record in left)
        texts = ["".join(event.text for event in journal.events(record.id)) for record in left]
    lost = SESSIONS * EXECUTIONS - sum(text == "x" * 2_100 for text in texts)
    # A page holds a few rows; those around it are there.
    assert 0 < lost < 40
    if table == "events":
        assert len(left) == SESSIONS * EXECUTIONS
        assert sum("output is missing here: the journal was damaged" in text for text in texts) == lost


async def test_sessions_whose_table_is_lost_are_known_by_their_executions(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()
    overwrite(path, root)
    salvaged = salvage(path, "science")
    assert (salvaged.remade, salvaged.rows["executions"]) == (SESSIONS, SESSIONS * EXECUTIONS)
    with open_journal(path) as journal:
        entry = SessionRecords(journal, "next").find("session03")
    assert entry is not None
    assert (entry.principal, entry.environment, entry.state) == (OWNER, "science", "asleep")
    assert "damaged journal" in entry.end


async def test_a_file_without_a_readable_beginning_is_replaced_by_an_empty_one(path: Path) -> None:
    fill(path)
    overwrite(path, 1)
    salvaged = salvage(path, "default")
    assert salvaged.unreadable == ["all"]
    assert salvaged.kept.stat().st_size > PAGE
    with open_journal(path) as journal:
        assert SessionRecords(journal, "next").all_asleep() == []


def read(journal: Journal) -> object:
    return [*journal.of_session("session05")]


def claim(journal: Journal) -> object:
    return SessionRecords(journal, "next").claim("session01")


@pytest.mark.parametrize("ask", [read, claim])
async def test_what_a_damaged_file_cannot_give_is_neither_busy_nor_a_full_disk(
    path: Path, ask: Callable[[Journal], object]
) -> None:
    fill(path)
    overwrite(path, *pages_of(path, "executions"))
    with open_journal(path) as journal:
        journal.write("UPDATE executions SET code = 'x' WHERE id = ?", ("session05execution05",))
        with pytest.raises(JournalDamaged, match=r"is damaged \(.+\)") as told:
            ask(journal)
        assert "`belljar journal salvage`" in told.value.hint
        assert journal.fault().startswith("is damaged: ")
        assert "is damaged" in journal.unkept()


async def test_a_file_that_was_removed_is_noticed(path: Path) -> None:
    with open_journal(path) as journal:
        assert (journal.fault(), journal.unkept()) == ("", "")
        path.unlink()
        assert journal.fault() == "was removed or replaced while the server has it open, and ends with it"
        path.touch()  # what another process makes in its place is another file
        assert "was removed or replaced" in journal.unkept()
