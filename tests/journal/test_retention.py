"""The bound on what the journal takes: what goes first, what is said of it, and that the disk has it back."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from test_journal import OWNER, numbers

from belljar.journal import retention
from belljar.journal.archive import read_printed
from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.journal.retention import Trimmer
from belljar.models import Display, ExecutionResult, OutputEvent
from belljar.outputs.displays import display_uri

pytestmark = pytest.mark.anyio

LIMIT_MB = 16
TEXT = "x" * 64_000
EVENTS = 64
"""Of one execution: 4 MB."""


@pytest.fixture
def journal(anyio_backend: str, tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "journal.sqlite") as journal:
        yield journal


@pytest.fixture
def trimmer(journal: Journal, tmp_path: Path) -> Trimmer:
    return Trimmer(journal.path, tmp_path / "sessions", LIMIT_MB)


def said(
    journal: Journal, execution_id: str, *, display_bytes: int = 0, is_finished: bool = True, owner: str = OWNER
) -> None:
    journal.submit(ExecutionRecord(execution_id, "session", owner, "code", None), time.time())
    for number in range(1, EVENTS + 1):
        journal.append(execution_id, OutputEvent(sequence=number, kind="stdout", text=TEXT))
    if is_finished:
        journal.finish(result_of(execution_id), output_bytes=EVENTS * len(TEXT), display_bytes=display_bytes)
    journal.commit()


def result_of(execution_id: str) -> ExecutionResult:
    return ExecutionResult(
        success=False,
        status="error",
        execution_id=execution_id,
        session_id="session",
        execution_count=1,
        output=[TEXT],
        stdout=TEXT,
        stderr="",
        error="ValueError: no",
        displays=[Display(mime="image/png", uri=display_uri(execution_id, "1.png"))],
        sequence=EVENTS,
    )


def is_whole(journal: Journal, execution_id: str) -> bool:
    return numbers(journal, execution_id) == [*range(1, EVENTS + 1)]


async def test_who_says_the_most_loses_output_and_nobody_else_does(journal: Journal, trimmer: Trimmer) -> None:
    said(journal, "hers", owner="key:ada")
    for number in range(6):
        said(journal, f"his {number}", owner="key:bob")
    dropped = trimmer.trim()
    assert is_whole(journal, "hers")
    assert [is_whole(journal, f"his {number}") for number in range(6)] == [False] * dropped + [True] * (6 - dropped)
    assert dropped > 0


@pytest.mark.parametrize("is_finished", [True, False])
async def test_neither_long_code_nor_what_runs_drives_out_the_output_of_another(
    journal: Journal, trimmer: Trimmer, is_finished: bool
) -> None:
    said(journal, "hers", owner="key:ada")
    for number in range(20):
        execution_id, code = f"his {number}", "x" * 1_000_000
        journal.submit(ExecutionRecord(execution_id, "session", "key:bob", code, None), time.time())
        if is_finished:
            journal.finish(result_of(execution_id), output_bytes=0)
    journal.commit()
    trimmer.trim()
    assert is_whole(journal, "hers")
    oldest = journal.find("his 0")
    assert oldest is not None
    assert ("this code was dropped" in oldest.code) == is_finished


async def test_the_oldest_finished_output_goes_first_and_says_so(journal: Journal, trimmer: Trimmer) -> None:
    names = [f"{number}" for number in range(6)]
    said(journal, "running", is_finished=False)
    for name in names:
        said(journal, name)
    before = journal.path.stat().st_size
    dropped = trimmer.trim()
    assert [is_whole(journal, name) for name in names] == [False] * dropped + [True] * (6 - dropped)
    assert 0 < dropped < 6
    assert is_whole(journal, "running")
    (event,) = journal.events("0")
    assert (event.sequence, event.kind) == (EVENTS, "notice")
    assert "was dropped at" in event.text
    assert "within 16 MB" in event.text
    record = journal.find("0")
    assert record is not None
    assert record.result is not None
    assert (record.result.output, record.result.stdout, record.result.displays) == ([event.text], "", [])
    assert (record.result.status, record.result.error, record.code) == ("error", "ValueError: no", "code")
    assert read_printed(journal.path, "0", 0, 0).text == event.text
    # The disk has it back, but for what is spare.
    assert journal.path.stat().st_size < min(before, LIMIT_MB * 1024 * 1024 + 4096 * retention.SPARE_PAGES)
    assert trimmer.trim() == 0


async def test_displays_count_and_go_with_their_execution(journal: Journal, trimmer: Trimmer, tmp_path: Path) -> None:
    folder = tmp_path / "sessions" / "session" / "displays"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").write_bytes(b"picture")
        said(journal, name, display_bytes=10 * 1024 * 1024)
    assert trimmer.trim() == 1
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert is_whole(journal, "b")


async def test_what_was_begun_by_a_server_that_is_gone_is_ended(journal: Journal, trimmer: Trimmer) -> None:
    said(journal, "a")
    journal.write("UPDATE executions SET dropped_at = ?, output_bytes = 0 WHERE id = 'a'", (time.time(),))
    journal.commit()
    trimmer.trim()
    assert numbers(journal, "a") == [EVENTS]


async def test_a_session_that_is_forgotten_meanwhile_leaves_nothing(journal: Journal, trimmer: Trimmer) -> None:
    said(journal, "a")
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as connection:
        journal.forget_session("session")
        journal.commit()
        trimmer._drop(connection, "a", "session", result_of("a").model_dump_json())  # pyright: ignore
    assert numbers(journal, "a") == []


async def test_writing_goes_on_while_it_trims(journal: Journal, trimmer: Trimmer) -> None:
    for number in range(8):
        said(journal, f"{number}")
    written = 0
    journal.submit(ExecutionRecord("live", "session", OWNER, "code", None), time.time())
    async with anyio.create_task_group() as group:
        ended = anyio.Event()

        async def trim() -> None:
            await anyio.to_thread.run_sync(trimmer.trim)
            ended.set()

        group.start_soon(trim)
        while not ended.is_set():
            written += 1
            journal.append("live", OutputEvent(sequence=written, kind="stdout", text="word"))
            journal.commit()
            await anyio.lowlevel.checkpoint()
    assert numbers(journal, "live") == [*range(1, written + 1)]
