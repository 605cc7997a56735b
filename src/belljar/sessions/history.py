"""Executions by their own id, whatever became of their session's kernel: what they gave, said, showed and left.

Live ones answer for themselves, older ones from the journal. Another principal's answers exactly as an unknown one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from belljar.errors import Busy, ExecutionNotFound, InvalidArgument, TooLarge
from belljar.executions.execution import Execution
from belljar.executions.transcript import output_uri
from belljar.journal.archive import open_archive, read_printed
from belljar.journal.journal import Journal
from belljar.models import ExecutionResult, OutputEvent
from belljar.outputs.displays import display_uri, read_display
from belljar.outputs.notebook import NotebookCell, notebook_of, written
from belljar.outputs.summary import Summary
from belljar.sessions.session import Session
from belljar.settings import Settings

MOST_KEY_CHARS = 200
# In one answer: 100 million characters took 2 GB of memory to send, and stopped everyone else for 12 s.
MOST_CHARS = 8_000_000


class ExecutionHistory:
    """Of all sessions of a runtime."""

    def __init__(self, sessions: Mapping[str, Session], folder: Path, journal: Journal, settings: Settings) -> None:
        self._sessions = sessions
        self._folder = folder
        self._journal = journal
        self._settings = settings

    def find(self, execution_id: str, principal: str) -> Execution | None:
        """A live or recent execution of the caller's; None when only the journal may have it."""
        for session in self._sessions.values():
            if session.principal == principal and (execution := session.queue.find(execution_id)) is not None:
                return execution
        return None

    def submitted(self, key: str, code: str, principal: str) -> str | None:
        """The caller's execution of this code that was submitted under this key before."""
        if not key.isprintable() or len(key) > MOST_KEY_CHARS:
            raise InvalidArgument(
                f"idempotency_key has {len(key)} characters or unprintable ones",
                hint=f"Pass at most {MOST_KEY_CHARS} printable characters, such as a UUID",
            )
        known = self._journal.find_key(principal, key) if key else None
        if known and (record := self._journal.find(known)) is not None and record.code != code:
            raise InvalidArgument(
                f"idempotency_key {key!r} was given with other code before, for execution {known}",
                hint="Pass a new key with new code; to see what the other code gave, call get_execution",
            )
        return known

    def has_checkpoint(self, execution_id: str, principal: str) -> bool:
        """Whether the variables there were before the caller's execution can be had back by a rewind."""
        execution = self.find(execution_id, principal)
        session = self._sessions.get(execution.session_id) if execution is not None else None
        return session is not None and session.session_kernel.checkpoints.holds(execution_id)

    # Results

    def result(self, execution_id: str, principal: str, since: int = 0) -> ExecutionResult:
        """What an execution gave, from event number `since` on."""
        live = self.find(execution_id, principal)
        if live is not None:
            # Who is told of output asks for what comes after it: the next server, if this one is killed.
            self._journal.commit()
            whole = live.result()
        else:
            whole = self._kept_result(execution_id, principal)
        return self._replayed(whole, since) if since > 0 else whole

    def _kept_result(self, execution_id: str, principal: str) -> ExecutionResult:
        record = self._journal.find(execution_id)
        if record is None or record.principal != principal:
            raise ExecutionNotFound(
                f"execution {execution_id[:64]!r} does not exist",
                hint="Use the execution_id that execute_code answered with; executions go with their cleared session",
            )
        if record.result is None:
            raise ExecutionNotFound(f"execution {execution_id!r} ended with the server that ran it")
        return record.result

    def _replayed(self, whole: ExecutionResult, since: int) -> ExecutionResult:
        """The same result with only the output after `since`."""
        uri = output_uri(whole.execution_id)
        summary = Summary(budget_chars=self._settings.output_budget_chars, uri=uri)
        for event in self._journal.events(whole.execution_id, since):
            summary.add(event)
        return whole.model_copy(
            update={
                "output": [text for _, text in summary.segments()],
                "stdout": summary.stream("stdout"),
                "stderr": summary.stream("stderr"),
                "displays": summary.displays,
                "truncated": summary.truncation,
            }
        )

    # What they said and showed

    def has_events(self, execution_id: str, since: int) -> bool:
        """Whether an execution said anything after event number `since`."""
        return next(self._journal.events(execution_id, since), None) is not None

    async def whole_output(self, execution_id: str, principal: str, offset: int, limit: int) -> str:
        """All stream text of the caller's execution, or a part of it; too much for one answer says where it goes on."""
        self.result(execution_id, principal)
        self._journal.commit()
        unwritten = self._journal.unwritten(execution_id)
        is_bounded = 0 < limit <= MOST_CHARS
        most = limit if is_bounded else MOST_CHARS + 1
        text = await asyncio.to_thread(read_printed, self._journal.path, execution_id, offset, most, unwritten)
        if is_bounded or len(text) <= MOST_CHARS:
            return text
        rest = f"{output_uri(execution_id)}?offset={offset + MOST_CHARS}"
        return f"{text[:MOST_CHARS]}\n[belljar: this is not the end: {rest} goes on]\n"

    def display(self, execution_id: str, name: str, principal: str) -> bytes:
        """One display of the caller's execution."""
        record = self._journal.find(execution_id)
        content = None
        if record is not None and record.principal == principal:
            content = self.display_reader(record.session_id)(display_uri(execution_id, name))
        if content is None:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} has no display {name[:64]!r}")
        return content

    def display_reader(self, session_id: str) -> Callable[[str], bytes | None]:
        """Reads a display of a session's executions by its URI; gives None for what is not there. For any thread."""
        return lambda uri: read_display(self._folder / session_id / "displays", uri)

    async def notebook(self, session: Session) -> str:
        """Every execution of a session with what it said, as an .ipynb; of long output head and tail."""
        self._journal.commit()
        if self._journal.is_failing:
            raise Busy(
                "the journal cannot be written now, and the notebook would lack what waits to be kept",
                hint="Try again in 10 seconds",
            )
        reader = self.display_reader(session.id)
        return await asyncio.to_thread(read_notebook, self._settings.data_directory, session.id, reader)


# A session's notebook as a client gets it: everything that ran, within what one answer can carry.
# `belljar export` has no such bounds: it writes to a file, and nobody waits for the server meanwhile.

# Shared by all cells: 60 million characters took 1 GB of memory to send, and stopped everyone else for 10 s.
TEXT_CHARS = 8_000_000
MOST_CELL_CHARS = 1_000_000
LEAST_CELL_CHARS = 200
# Of code and of what cells showed, which is there whole or not at all.
MOST_BYTES = 32 * 1024 * 1024


def read_notebook(data_directory: Path, session_id: str, read_display: Callable[[str], bytes | None]) -> str:
    """The notebook as text, of long output head and tail. Reads by itself, so any thread may call it."""
    room = _NotebookBudget(session_id)
    # Read bit by bit on a connection of its own: a session may have said more than memory holds.
    with open_archive(data_directory) as archive:
        count = max(1, archive.count(session_id))
        cells = map(room.cell, archive.cells(session_id, is_live=lambda: True))
        limit = max(LEAST_CELL_CHARS, min(MOST_CELL_CHARS, TEXT_CHARS // count))
        return written(notebook_of(session_id, cells, room.reader(read_display), limit_chars=limit))


class _NotebookBudget:
    """What is left of `MOST_BYTES`."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._left = MOST_BYTES

    def cell(self, ran: NotebookCell) -> NotebookCell:
        self._take(len(ran.code))
        return replace(ran, events=self._events(ran))

    def _events(self, ran: NotebookCell) -> Iterator[OutputEvent]:
        for event in ran.events:
            if event.data:
                self._take(len(json.dumps(event.data)))
            yield event

    def reader(self, read_display: Callable[[str], bytes | None]) -> Callable[[str], bytes | None]:
        def read(uri: str) -> bytes | None:
            content = read_display(uri)
            self._take(len(content or b""))
            return content

        return read

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooLarge(
                f"the code and displays of session {self._session_id} are over {MOST_BYTES:,} bytes",
                hint="On the server's machine, belljar export writes all of them to a file",
            )
