"""Pages of lines of long output: the same as of the whole text, whatever the sizes of events and lines."""

import random
import stat
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.engine import line_index
from belljar.engine.history import ExecutionRow, HistoryReader
from belljar.engine.line_index import LinePage
from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.models import OutputEvent

pytestmark = pytest.mark.anyio
EXECUTION, SESSION = "e" * 32, "s" * 32


class Printed:
    """An execution in a journal, and those who read what it prints."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.journal = journal
        self.folder = folder
        self.reader = HistoryReader(folder / "journal.sqlite")
        self.sequence = 0
        journal.submit(ExecutionRecord(EXECUTION, SESSION, "somebody", "code", None), 0.0)
        journal.start(EXECUTION)

    def say(self, text: str, kind: str = "stdout") -> None:
        self.sequence += 1
        event = OutputEvent.model_validate({"sequence": self.sequence, "kind": kind, "text": text})
        self.journal.append(EXECUTION, event)

    async def row(self) -> ExecutionRow:
        self.journal.commit()
        row = await self.reader.execution(EXECUTION)
        assert row is not None
        return row

    async def lines(self, first: int, count: int, search: str = "", *, is_complete: bool = False) -> LinePage:
        return await self.reader.lines(await self.row(), first, count, search, is_complete=is_complete)


@pytest.fixture
async def printed(anyio_backend: str, tmp_path: Path) -> AsyncGenerator[Printed]:
    with open_journal(tmp_path / "journal.sqlite") as journal:
        one = Printed(tmp_path, journal)
        yield one
        await one.reader.aclose()


async def test_every_page_is_what_the_whole_text_has_there(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "MARK_EVENTS", 7)
    monkeypatch.setattr(line_index, "MARK_CHARS", 90)
    monkeypatch.setattr(line_index, "MAX_MARKS", 30)
    chance = random.Random(7)
    whole = ""
    for _ in range(4):  # more comes while somebody reads
        for _ in range(150):
            text = "".join(chance.choice("ab\n\n\u00e9") for _ in range(chance.choice((1, 3, 40))))
            kind = chance.choice(("stdout", "stderr", "display"))
            printed.say(text, kind)
            whole += f"{text}\n" if kind == "display" else text
        lines = whole.split("\n")
        lines = lines[:-1] if not lines[-1] else lines
        for first in (1, 2, 3, len(lines) // 2, len(lines) - 3, len(lines), len(lines) + 5):
            page = await printed.lines(first, 17, "bA")
            assert page.lines == lines[first - 1 : first + 16]
            assert page.total == len(lines)
            assert page.matches == [number for number, line in enumerate(lines, 1) if "ba" in line][:1_000]


async def test_the_index_is_kept_for_the_next_server_and_a_broken_one_is_built_anew(printed: Printed) -> None:
    for start in range(0, 30_000, 500):
        printed.say("".join(f"line {number} {'x' * 40}\n" for number in range(start, start + 500)))
    before = await printed.lines(29_999, 1, is_complete=True)
    path = printed.folder / "sessions" / SESSION / "displays" / EXECUTION / "lines"
    assert not path.exists()  # a session that was cleared must not come back
    (printed.folder / "sessions" / SESSION).mkdir(parents=True)
    other = HistoryReader(printed.folder / "journal.sqlite")
    assert (await other.lines(await printed.row(), 29_999, 1, "", is_complete=True)) == before
    assert before.lines[0].startswith("line 29998 ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size < 2_000
    for content in (path.read_bytes(), b'{"version": 1', b"\x00" * 100):
        path.write_bytes(content)
        third = HistoryReader(printed.folder / "journal.sqlite")
        assert (await third.lines(await printed.row(), 29_999, 1, "", is_complete=True)) == before
        await third.aclose()
    await other.aclose()


async def test_one_endless_line_takes_no_more_than_its_share(printed: Printed) -> None:
    for _ in range(200):
        printed.say("x" * 50_000)
    printed.say("needle\nlast\n")
    page = await printed.lines(1, 10, "XNEEDLE")
    assert (len(page.lines[0]), page.lines[1], page.total, page.matches) == (10_000, "last", 2, [1])
    for _ in range(300):
        printed.say("y" * 9_000 + "\n")
    page = await printed.lines(3, 1_000)
    assert 100 < len(page.lines) < 130
    assert (await printed.lines(302, 5)).lines == ["y" * 9_000]
