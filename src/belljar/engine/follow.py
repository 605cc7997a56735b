"""Follows one session: its cells in order, each with its output, from any place on and as it comes.

A place is `EXECUTION:SEQUENCE`, the last output event that the reader has of the last cell that it knows. Output is
read from the journal, in parts, so a slow reader delays nobody but itself, and a reader who comes back after a restart
of the server misses nothing and gets nothing twice.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from belljar.change_signal import ChangeLog
from belljar.engine.contract import BATCH_INTERVAL_S, STREAM_CHARS
from belljar.engine.entries import read_execution
from belljar.engine.history import ExecutionRow, HistoryReader, last_lines
from belljar.engine.models import UNFINISHED, ExecutionEntry, Followed, SessionEntry, Tail
from belljar.executions.execution import Execution
from belljar.models import TEXT_KINDS

_EVENTS = 500
_ROWS = 20
# Nobody reads several cells in half a second; told together, they cost a page one layout instead of many.
_MANY_CELLS_INTERVAL_S = 0.5
_TAIL_INTERVAL_S = 0.25
# Look this often even without a published change, in case one was missed.
_LOOK_S = 5.0


@dataclass(slots=True)
class _Cell:
    """How much of the cell that is followed now the reader has."""

    row: ExecutionRow
    sequence: int = 0
    chars: int = 0
    lines: int = 0
    end: str = ""
    """The last lines of what came since only the end is told."""
    is_reported: bool = False
    is_ended: bool = False
    is_long: bool = False
    """Whether it printed so much that only the end of its output is told."""
    is_current: bool = False
    """Whether `row` was just read, so that the next round can skip reading it."""

    @property
    def cursor(self) -> str:
        return f"{self.row.id}:{self.sequence}"

    def count(self, text: str) -> None:
        self.chars += len(text)
        self.lines += text.count("\n")


class SessionFollower:
    """One reader of one session."""

    def __init__(
        self,
        session_id: str,
        history: HistoryReader,
        changes: ChangeLog,
        live: Callable[[ExecutionRow], Execution | None],
        entry: Callable[[ExecutionRow], ExecutionEntry],
        session: Callable[[str], Awaitable[SessionEntry | None]],
    ) -> None:
        self._session_id = session_id
        self._history = history
        self._changes = changes
        self._live = live
        self._entry = entry
        self._session = session
        self._ahead: list[ExecutionRow] = []
        """Cells after the one that is followed, read together with the one before them."""

    async def run(self, after: str) -> AsyncGenerator[Followed]:
        """Yield what happened after a place and what happens from now on, until the session is gone."""
        number = self._changes.number
        cell: _Cell | None = None
        if after:
            cell = await self._resume_cell(after)
            if cell is None:
                yield Followed(kind="reset")
                return
            if undone := await self._history.undone(self._session_id):
                yield Followed(kind="undone", id=cell.cursor, undone=undone)
        # What the reader has of the session itself is as old as its page, so its state is told once.
        if (entry := await self._session(self._session_id)) is not None:
            yield Followed(kind="session", session=entry)
        has_waited, cells = True, 0
        while True:
            # Report the state of the session once per wait, not once per cell.
            if has_waited:
                looked_at = self._changes.number
                async for item in self._news_since(number):
                    yield item
                    if item.kind in ("gone", "reset"):
                        return
                number = looked_at
            has_more = has_waited = False
            if cell is not None:
                async for item in self._cell_news(cell):
                    has_more = True
                    yield item
            if cell is None or cell.is_ended:
                following = await self._next(cell)
                if following is not None:
                    cell = following
                    cells += 1
                    continue
            if has_more:
                await asyncio.sleep(BATCH_INTERVAL_S if cells <= 1 else _MANY_CELLS_INTERVAL_S)
            else:
                await self._wait(cell, number)
            has_waited, cells = True, 0

    async def _resume_cell(self, after: str) -> _Cell | None:
        """Return the cell that a reader knew last, as far as they had it; None if it is none of this session."""
        execution_id, _, sequence = after.partition(":")
        if not (sequence.isdecimal() and len(sequence) < 10):
            return None
        row = await self._history.execution(execution_id)
        if row is None or row.session_id != self._session_id:
            return None
        cell = _Cell(row, int(sequence), is_reported=True)
        if row.result is None:
            cell.chars, cell.lines = await self._history.size(row.id, cell.sequence)
        return cell

    async def _next(self, cell: _Cell | None) -> _Cell | None:
        if not self._ahead:
            place = cell.row.place + 1 if cell is not None else 0
            self._ahead = await self._history.executions_from(self._session_id, place, _ROWS)
        if not self._ahead:
            return None
        row = self._ahead.pop(0)
        return _Cell(row, is_current=row.result is not None)

    async def _news_since(self, number: int) -> AsyncGenerator[Followed]:
        """Yield what happened to the session itself since a change; `reset` where that is not known any more."""
        if not self._changes.has(number):
            yield Followed(kind="reset")
            return
        undone: list[str] = []
        is_changed = is_gone = False
        for change in self._changes.after(number):
            if change.session_id != self._session_id:
                continue
            if change.kind == "execution" and change.state == "undone":
                undone.append(change.execution_id)
            if change.kind == "question":
                yield Followed(kind="question", execution_id=change.execution_id, state=change.state)
            is_changed = True
            is_gone = is_gone or (change.kind == "session" and change.state == "gone")
        if undone:
            self._ahead.clear()  # they were read before
            yield Followed(kind="undone", undone=undone)
        if is_changed and (entry := await self._session(self._session_id)) is not None:
            yield Followed(kind="session", session=entry)
        if is_gone:
            yield Followed(kind="gone")

    async def _cell_news(self, cell: _Cell) -> AsyncGenerator[Followed]:
        """Yield what is new of a cell: at most one part of its output."""
        if cell.is_ended:
            return
        # Read this before the output: what is written between the two is then found in the next round.
        row = cell.row if cell.is_current else await read_execution(self._history, cell.row.id, self._live)
        cell.is_current = False
        if row is None:  # its session was cleared
            cell.is_ended = True
            return
        entry = self._entry(row)
        has_begun_now = cell.row.started_at is None and row.started_at is not None
        cell.row = row
        if not cell.is_reported or has_begun_now:
            cell.is_reported = True
            yield Followed(kind="cell", id=cell.cursor, execution=entry, execution_id=row.id)
        has_more = False
        if cell.is_long:
            async for item in self._tail_news(cell):
                has_more = True
                yield item
        else:
            events, has_more = await self._history.output(row.id, cell.sequence, _EVENTS)
            for event in events:
                if event.kind in TEXT_KINDS and cell.chars + len(event.text) > STREAM_CHARS:
                    # This event too: where the server reads seldom, one can be all that a cell prints.
                    cell.is_long = has_more = True
                    break
                cell.sequence = event.sequence
                if event.kind == "clear":
                    cell.chars = cell.lines = 0
                elif event.kind in TEXT_KINDS:
                    cell.count(event.text)
                yield Followed(kind="output", id=cell.cursor, execution_id=row.id, output=event)
        # The file may have fewer events than the execution had: some are dropped while it cannot be written.
        if not has_more and entry.status not in UNFINISHED:
            cell.is_ended = True
            yield Followed(kind="ended", id=cell.cursor, execution=entry, execution_id=row.id)

    async def _tail_news(self, cell: _Cell) -> AsyncGenerator[Followed]:
        read_at = time.monotonic()
        found = await self._history.tail(cell.row.id, cell.sequence)
        if found is None:
            return
        tail, others = found
        cell.sequence = tail.sequence
        cell.chars += tail.chars
        cell.lines += tail.lines
        cell.end = last_lines(cell.end + tail.text)
        for event in others:
            yield Followed(kind="output", id=cell.cursor, execution_id=cell.row.id, output=event)
            if event.kind == "clear":
                cell.chars = cell.lines = 0
                cell.end = ""
                cell.is_long = False
        if tail.chars:
            whole = Tail(
                execution_id=cell.row.id, sequence=tail.sequence, lines=cell.lines, chars=cell.chars, text=cell.end
            )
            yield Followed(kind="tail", id=cell.cursor, execution_id=cell.row.id, tail=whole)
        await asyncio.sleep(max(0.0, _TAIL_INTERVAL_S - (time.monotonic() - read_at)))

    async def _wait_for_change(self, number: int) -> None:
        """Wait for a change of this session after a number, or until it is time to look anyway."""
        deadline = time.monotonic() + _LOOK_S
        while (left_s := deadline - time.monotonic()) > 0:
            if any(change.session_id == self._session_id for change in self._changes.after(number)):
                return
            number = self._changes.number
            await self._changes.wait(number, left_s)

    async def _wait(self, cell: _Cell | None, number: int) -> None:
        """Wait until something may be new."""
        waits: list[asyncio.Task[object]] = [asyncio.ensure_future(self._wait_for_change(number))]
        execution = self._live(cell.row) if cell is not None and not cell.is_ended else None
        if execution is not None and cell is not None:
            if execution.sequence > cell.sequence or execution.is_finished:
                # It came since this cell was read, or is on its way to a file that cannot be written now.
                for wait in waits:
                    wait.cancel()
                await asyncio.sleep(BATCH_INTERVAL_S)
                return
            waits.append(asyncio.ensure_future(execution.wait_for_change(_LOOK_S)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
