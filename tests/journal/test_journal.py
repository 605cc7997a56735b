"""What the journal keeps while it cannot be written, and what becomes of a file of an earlier version."""

import sqlite3
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest

from belljar.errors import Busy, SettingsError
from belljar.journal import writer
from belljar.journal.journal import UNKEPT, ExecutionRecord, Journal, has_id_form, open_journal
from belljar.journal.schema import VERSION, version_of
from belljar.journal.session_records import SessionRecords
from belljar.models import ExecutionResult, OutputEvent, iso_ms
from waiting import DEADLINE_S, until

pytestmark = pytest.mark.anyio

OWNER = "somebody"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(anyio_backend: str, path: Path) -> Iterator[Journal]:
    with open_journal(path) as journal:
        yield journal


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Another process's transaction, for as long as this lasts."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def full(journal: Journal) -> Generator[None]:
    """What SQLite says when its file may not grow is what it says on a full disk."""
    connection = journal._connection  # pyright: ignore[reportPrivateUsage]
    connection.execute("PRAGMA max_page_count = 1")
    yield
    connection.execute("PRAGMA max_page_count = 1000000")


def submit(journal: Journal, execution_id: str, key: str = "") -> None:
    journal.submit(ExecutionRecord(execution_id, "session", OWNER, "code", None), time.time(), key)
    journal.start(execution_id)


def say(journal: Journal, execution_id: str, *numbers: int, text: str = "") -> None:
    for number in numbers:
        journal.append(execution_id, OutputEvent(sequence=number, kind="stdout", text=text or f"{number}\n"))


def finish(journal: Journal, execution_id: str, sequence: int) -> None:
    journal.finish(
        ExecutionResult(
            success=True,
            status="ok",
            execution_id=execution_id,
            session_id="session",
            execution_count=1,
            output=[],
            stdout="",
            stderr="",
            sequence=sequence,
        )
    )


def numbers(journal: Journal, execution_id: str, since: int = 0) -> list[int]:
    return [event.sequence for event in journal.events(execution_id, since)]


async def written(path: Path, execution_id: str) -> list[int]:
    """The numbers of its events, as another process finds them once it finds its result."""
    query = "SELECT sequence FROM events JOIN executions ON id = execution_id WHERE id = ? AND result IS NOT NULL"
    with closing(sqlite3.connect(path)) as other:
        found = await until(lambda: other.execute(f"{query} ORDER BY sequence", (execution_id,)).fetchall())
        return [sequence for (sequence,) in found]


@pytest.mark.parametrize("trouble", ["locked", "full"])
async def test_what_cannot_be_written_waits_and_is_written_without_gaps(
    journal: Journal, path: Path, trouble: str
) -> None:
    submit(journal, "early")
    say(journal, "early", 1, 2)
    journal.commit()
    text = "x" * 5_000  # more than the pages that are there hold
    with locked(path) if trouble == "locked" else full(journal):
        say(journal, "early", 3, 4, text=text)
        submit(journal, "late", key="only once")
        say(journal, "late", 1, text=text)
        journal.commit()
        # It is all there for whoever asks this server meanwhile.
        assert numbers(journal, "early") == [1, 2, 3, 4]
        assert numbers(journal, "early", since=3) == [4]
        assert journal.find_key(OWNER, "only once") == "late"
        late = journal.find("late")
        assert late is not None
        assert (late.code, late.result) == ("code", None)
        finish(journal, "late", 1)
        finish(journal, "early", 4)
        assert (late := journal.find("late")) is not None
        assert late.result is not None
    assert await written(path, "early") == [1, 2, 3, 4]
    assert await written(path, "late") == [1]
    say(journal, "early", 5)
    journal.commit()
    assert numbers(journal, "early") == [1, 2, 3, 4, 5]


async def test_a_lock_holds_up_one_write_and_not_every_one(journal: Journal, path: Path) -> None:
    submit(journal, "one")
    tried: list[str] = []
    journal._connection.set_trace_callback(tried.append)  # pyright: ignore[reportPrivateUsage]
    with locked(path):
        for number in range(1, 200):
            say(journal, "one", number)
            journal.commit()
        finish(journal, "one", 199)
        assert [one.split()[0] for one in tried] == ["INSERT", "PRAGMA"]
    assert await written(path, "one") == [*range(1, 200)]


async def test_others_write_at_any_time_because_the_lock_is_never_kept(journal: Journal, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
        submit(journal, "one")
        for number in range(1, 20):
            say(journal, "one", number)
            other.execute("INSERT INTO events VALUES ('theirs', ?, 'stdout', '', '{}')", (number,))
            assert numbers(journal, "one") == [*range(1, number + 1)]
        finish(journal, "one", 19)
        other.execute("INSERT INTO events VALUES ('theirs', 20, 'stdout', '', '{}')")
    assert await written(path, "one") == [*range(1, 20)]
    assert not journal.is_failing


async def test_much_at_once_is_written_before_it_fills_memory(journal: Journal, path: Path) -> None:
    submit(journal, "one")
    for number in range(1, 60):
        say(journal, "one", number, text="x" * 100_000)
    with closing(sqlite3.connect(path)) as other:
        ((found,),) = other.execute("SELECT count(*) FROM events").fetchall()
    assert found > 20
    assert numbers(journal, "one") == [*range(1, 60)]


async def test_writers_take_turns_without_a_word_in_the_log(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "LOCK_TOLD_S", DEADLINE_S)  # a busy machine is no fault of theirs
    for turn in ("one", "two", "three"):
        with locked(path):
            submit(journal, turn)
            say(journal, turn, 1, 2)
            finish(journal, turn, 2)
            assert journal.is_failing
        assert await written(path, turn) == [1, 2]
        await until(lambda: not journal.is_failing)
    assert [record.getMessage() for record in caplog.records] == []


async def test_a_lock_that_lasts_is_an_error_in_the_log_once_and_so_is_its_end(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "LOCK_TOLD_S", 0.2)
    with locked(path):
        submit(journal, "one")
        assert caplog.records == []
        await until(lambda: caplog.records)
        say(journal, "one", 1, 2)
        finish(journal, "one", 2)
    assert await written(path, "one") == [1, 2]
    await until(lambda: not journal.is_failing)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("ERROR", "the journal cannot be written, so executions wait in memory to be kept: database is locked"),
        ("WARNING", "the journal can be written again, and nothing that waited is lost"),
    ]


async def test_what_waits_at_the_end_is_still_written(anyio_backend: str, path: Path) -> None:
    with open_journal(path) as journal, locked(path):
        submit(journal, "one")
        say(journal, "one", 1, 2)
        finish(journal, "one", 2)
    assert await written(path, "one") == [1, 2]


async def test_more_than_memory_should_hold_is_told_instead_of_a_gap(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 10_000)
    submit(journal, "one")
    with locked(path):
        for number in range(1, 100):
            say(journal, "one", number, text="x" * 1_000)
        with pytest.raises(Busy, match="no more executions can wait"):
            journal.check_room()
        finish(journal, "one", 99)
    kept = await written(path, "one")
    assert kept == [*range(1, len(kept) + 1)]
    assert len(kept) < 20
    *whole, last = journal.events("one")
    assert (last.kind, last.text) == ("notice", UNKEPT)
    assert {event.kind for event in whole} == {"stdout"}
    journal.check_room()
    say(journal, "one", 100)
    assert numbers(journal, "one")[-1] == 100


async def test_a_change_that_is_refused_for_itself_takes_nothing_with_it(journal: Journal, path: Path) -> None:
    submit(journal, "one")
    say(journal, "one", 1)
    say(journal, "one", 1)  # there already
    say(journal, "one", 7, text="\ud800")  # no text that a file can have
    say(journal, "one", 2)
    journal.commit()
    with locked(path):
        say(journal, "one", 2)
        say(journal, "one", 3)
        finish(journal, "one", 3)
    assert await written(path, "one") == [1, 2, 3]


async def test_a_key_is_taken_once_by_whichever_server_is_first(journal: Journal, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(
            "INSERT INTO executions (id, session_id, principal, code, submitted_at, key) VALUES (?, ?, ?, ?, ?, ?)",
            ("theirs", "elsewhere", OWNER, "code", time.time(), "job"),
        )
    with pytest.raises(Busy, match="idempotency_key"):
        submit(journal, "ours", key="job")
    assert journal.find_key(OWNER, "job") == "theirs"
    submit(journal, "ours")


async def test_a_session_is_not_claimed_later_than_it_is_asked_for(journal: Journal, path: Path) -> None:
    records = SessionRecords(journal, "this one")
    records.enter("session", OWNER, "default", "")
    records.put_to_sleep("session", "ended")
    with locked(path), pytest.raises(Busy, match="cannot be written now"):
        records.claim("session")
    (entry,) = records.asleep(OWNER)
    assert entry.state == "asleep"
    assert records.claim("session")
    assert not records.claim("session")


async def test_executions_are_in_order_whatever_the_clock_says(journal: Journal) -> None:
    for execution_id, submitted_at in (("first", 3e9), ("second", 1.0), ("third", 2e9)):
        journal.submit(ExecutionRecord(execution_id, "session", OWNER, "code", None), submitted_at)
    assert [record.id for record in journal.of_session("session")] == ["first", "second", "third"]
    assert journal.not_undone("session", 2) == ["second", "third"]


async def test_an_execution_is_on_record_before_its_code_runs(journal: Journal, path: Path) -> None:
    journal.submit(ExecutionRecord("one", "session", OWNER, "code", None), time.time(), "key")
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT id, started_at FROM executions").fetchall() == [("one", None)]
        journal.start("one")
        assert other.execute("SELECT started_at > 0 FROM executions").fetchall() == [(1,)]


async def test_an_execution_that_waits_for_its_turn_is_on_record_soon_and_before_anyone_is_told(
    journal: Journal, path: Path
) -> None:
    query = "SELECT id, started_at IS NOT NULL FROM executions ORDER BY rowid"
    with closing(sqlite3.connect(path)) as other, anyio.fail_after(20):
        journal.submit(ExecutionRecord("one", "session", OWNER, "code", None), time.time())
        journal.submit(ExecutionRecord("two", "session", OWNER, "code", None), time.time())
        assert [record.id for record in journal.unfinished("session")] == ["one", "two"]
        journal.commit()
        assert other.execute(query).fetchall() == [("one", 0), ("two", 0)]
        journal.submit(ExecutionRecord("three", "session", OWNER, "code", None), time.time())
        await until(lambda: len(other.execute(query).fetchall()) >= 3)
        journal.start("one")
        journal.submit(ExecutionRecord("four", "session", OWNER, "code", None), time.time())
        journal.start("four")
        assert other.execute(query).fetchall() == [("one", 1), ("two", 0), ("three", 0), ("four", 1)]


async def test_an_execution_that_ends_without_its_turn_keeps_its_place(journal: Journal, path: Path) -> None:
    journal.submit(ExecutionRecord("one", "session", OWNER, "code", None), time.time())
    journal.submit(ExecutionRecord("two", "session", OWNER, "code", None), time.time())
    finish(journal, "two", 0)
    journal.submit(ExecutionRecord("three", "session", OWNER, "code", None), time.time(), "key")
    found = [(record.id, record.has_begun, record.result is not None) for record in journal.of_session("session")]
    assert found == [("one", False, False), ("two", False, True), ("three", False, False)]


async def test_executions_are_in_the_order_they_were_submitted_whichever_starts_first(journal: Journal) -> None:
    for execution_id in ("one", "two"):
        journal.submit(ExecutionRecord(execution_id, "session", OWNER, "code", None), time.time())
    journal.start("two")
    found = [(record.id, record.has_begun) for record in journal.of_session("session")]
    assert found == [("one", False), ("two", True)]


async def test_the_last_words_of_one_of_several_users_are_written_when_it_goes(journal: Journal, path: Path) -> None:
    with open_journal(path) as same:
        same.submit(ExecutionRecord("one", "session", OWNER, "code", None), time.time())
    with closing(sqlite3.connect(path)) as other, anyio.fail_after(20):
        assert other.execute("SELECT id FROM executions").fetchall() == [("one",)]
        journal.submit(ExecutionRecord("two", "session", OWNER, "code", None), time.time())
        await until(lambda: len(other.execute("SELECT id FROM executions").fetchall()) >= 2)


# Ids


async def test_ids_begin_with_letters_that_the_file_keeps(path: Path, tmp_path: Path) -> None:
    with open_journal(path) as journal:
        tag, ids = journal.tag, {journal.new_id() for _ in range(100)}
    assert len(tag) == 3
    assert len(ids) == 100
    assert all(has_id_form(each) and each.startswith(tag) for each in ids)
    with open_journal(path) as journal:
        assert journal.tag == tag
    tags = set[str]()
    for number in range(5):
        with open_journal(tmp_path / f"{number}.sqlite") as other:
            tags.add(other.tag)
    assert len(tags) > 1


# Files of other versions

VERSION_1 = """
CREATE TABLE executions (id TEXT PRIMARY KEY, session_id TEXT NOT NULL, principal TEXT NOT NULL, code TEXT NOT NULL,
    submitted_at REAL NOT NULL, result TEXT, undone_at REAL, key TEXT);
CREATE UNIQUE INDEX executions_by_key ON executions (principal, key) WHERE key IS NOT NULL;
CREATE INDEX executions_of_session ON executions (session_id, submitted_at);
CREATE TABLE events (execution_id TEXT NOT NULL, sequence INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    data TEXT NOT NULL, PRIMARY KEY (execution_id, sequence)) WITHOUT ROWID;
CREATE TABLE sessions (id TEXT PRIMARY KEY, principal TEXT NOT NULL, environment TEXT NOT NULL, reason TEXT NOT NULL,
    run TEXT NOT NULL, state TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL,
    executions INTEGER NOT NULL DEFAULT 0, variables TEXT NOT NULL DEFAULT '[]', unkept TEXT NOT NULL DEFAULT '[]',
    end TEXT NOT NULL DEFAULT '');
INSERT INTO executions VALUES ('old', 'session', 'somebody', 'code', 1.0, NULL, NULL, 'job');
INSERT INTO events VALUES ('old', 1, 'stdout', 'said', '{}');
PRAGMA user_version = 1;
"""


async def test_a_file_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    with closing(sqlite3.connect(path)) as old:
        old.executescript(VERSION_1)
    with open_journal(path) as journal:
        assert journal.new_id().startswith(journal.tag)
        assert journal.find_key(OWNER, "job") == "old"
        assert [event.text for event in journal.events("old")] == ["said"]
        (record,) = journal.unfinished("session")
        assert record.has_begun
        assert journal.output_bytes("session") == len("said{}")
        submit(journal, "new")
        assert [record.id for record in journal.of_session("session")] == ["old", "new"]
    with closing(sqlite3.connect(path)) as now:
        assert version_of(now) == VERSION


async def test_a_file_of_a_later_version_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as later:
        later.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(SettingsError, match="of a later belljar"), open_journal(path):
        pass


async def test_a_file_that_is_no_journal_is_refused_in_words_and_left_alone(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)
    with (
        pytest.raises(SettingsError, match=r"cannot be used: file is not a database"),
        open_journal(path),
    ):
        pass
    assert path.read_bytes().startswith(b"something else entirely")


def test_a_time_that_no_calendar_has_is_written_as_the_nearest_that_it_has() -> None:
    assert iso_ms(-70e9) == "0001-01-01T00:00:00.000Z"
    assert iso_ms(1e15) == "9999-12-31T23:59:59.000Z"


async def test_other_letters_are_drawn_only_where_no_id_begins_with_the_old_ones(journal: Journal, path: Path) -> None:
    before = journal.tag
    drawn = {journal.draw_tag() for _ in range(5)}
    assert len(drawn) > 1
    assert journal.tag != before
    assert journal.new_id().startswith(journal.tag)
    with locked(path):
        assert journal.draw_tag() == ""
    submit(journal, journal.new_id())
    kept = journal.tag
    assert journal.draw_tag() == ""
    assert journal.tag == kept
    journal.flush()
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM executions").fetchone() == (1,)
