"""The history of executions: results, output, displays and notebooks, also of sessions whose kernel is gone.

Recent executions are read from memory, older ones from the journal. Another principal's execution is answered exactly
as an unknown one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from belljar.errors import Busy, ExecutionNotFound, InvalidArgument, TooLarge
from belljar.executions.execution import Execution
from belljar.executions.transcript import output_uri
from belljar.journal.archive import PrintedPage, open_archive, read_printed, read_stream_texts
from belljar.journal.journal import Journal
from belljar.models import ExecutionResult, OutputEvent, ResultNotice
from belljar.outputs.budget import clip
from belljar.outputs.displays import display_uri, read_display
from belljar.outputs.notebook import NotebookCell, notebook_of, written
from belljar.outputs.summary import STREAMS, Summary, TextBudget
from belljar.privacy.signed_urls import without_signatures
from belljar.sessions.session import Session
from belljar.settings import Settings

MAX_KEY_CHARS = 200
# The most characters in one answer: 100 million took 2 GB of memory to send, and blocked all other clients for 12 s.
MAX_CHARS = 8_000_000


@dataclass(frozen=True, slots=True)
class OutputStreams:
    """What an execution printed, and belljar's own words about it, each within a limit."""

    stdout: str
    stderr: str
    notices: str


class ExecutionHistory:
    """The executions of all sessions of a runtime."""

    def __init__(self, sessions: Mapping[str, Session], folder: Path, journal: Journal, settings: Settings) -> None:
        self._sessions = sessions
        self._folder = folder
        self._journal = journal
        self._settings = settings
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def turn_to_submit(self, key: str, principal: str) -> asyncio.Lock:
        """Return a lock that is held from a look at a key to the submission under it."""
        return self._turns.setdefault((principal, key), asyncio.Lock())

    def find(self, execution_id: str, principal: str | None) -> Execution | None:
        """Return a live or recent execution of the caller, or of anybody for None; None when it is not in memory."""
        for session in self._sessions.values():
            if principal in (None, session.principal) and (execution := session.queue.find(execution_id)) is not None:
                return execution
        return None

    def submitted(self, key: str, code: str, principal: str) -> str | None:
        """Return the id of the caller's execution of this code that was submitted under this key before, if any."""
        if not key.isprintable() or len(key) > MAX_KEY_CHARS:
            raise InvalidArgument(
                f"idempotency_key has {len(key)} characters or unprintable ones",
                hint=f"Pass at most {MAX_KEY_CHARS} printable characters, such as a UUID",
            )
        known = self._journal.find_key(principal, key) if key else None
        if known and (record := self._journal.find(known)) is not None and record.code != without_signatures(code):
            raise InvalidArgument(
                f"idempotency_key {key!r} was given with other code before, for execution {known}",
                hint="Pass a new key with new code; to see what the other code gave, call get_execution",
            )
        return known

    def has_checkpoint(self, execution_id: str, principal: str) -> bool:
        """Return whether a rewind can restore the variables from before the caller's execution."""
        execution = self.find(execution_id, principal)
        session = self._sessions.get(execution.session_id) if execution is not None else None
        return session is not None and session.session_kernel.checkpoints.holds(execution_id)

    # Results

    def result(self, execution_id: str, principal: str | None, since: int = 0) -> ExecutionResult:
        """Return the result of the caller's execution (of anybody's for None), with its output after event `since`."""
        live = self.find(execution_id, principal)
        if live is not None:
            # Commit, because the caller will ask for what comes after this output: from the next server, if this one is
            # killed.
            self._journal.commit()
            complete = live.result()
        else:
            complete = self._recorded_result(execution_id, principal)
        return self._replayed(complete, since) if since > 0 else complete

    def _recorded_result(self, execution_id: str, principal: str | None) -> ExecutionResult:
        record = self._journal.find(execution_id)
        if record is None or principal not in (None, record.principal):
            raise ExecutionNotFound(
                f"execution {execution_id[:64]!r} does not exist",
                hint="Use the execution_id that execute_code answered with; executions go with their cleared session",
            )
        if record.result is None:
            raise ExecutionNotFound(f"execution {execution_id!r} ended with the server that ran it")
        return _with_notices(record.result)

    def _replayed(self, complete: ExecutionResult, since: int) -> ExecutionResult:
        """Return the same result with only the output after `since`."""
        uri = output_uri(complete.execution_id)
        summary = Summary(budget_chars=self._settings.output_budget_chars, uri=uri)
        for event in self._journal.events(complete.execution_id, since):
            summary.add(event)
        output, notices = summary.texts()
        return complete.model_copy(
            update={
                "output": output,
                "notices": notices,
                "stdout": summary.stream("stdout"),
                "stderr": summary.stream("stderr"),
                "displays": summary.displays,
                "truncated": summary.truncation,
            }
        )

    async def streams(self, execution_id: str, principal: str, limit_chars: int = 0) -> "OutputStreams":
        """Return the streams of the caller's execution apart, each cut from the middle to `limit_chars`.

        Without a limit it is that of the settings, beside which data: URIs are there whole.
        """
        has_whole_uris, limit_chars = not limit_chars, limit_chars or self._settings.output_budget_chars
        live = self.find(execution_id, principal)
        result = self.result(execution_id, principal)
        texts = (result.stdout, result.stderr, live.notices() if live is not None else "")
        if result.truncated is None and (live is not None or not result.sequence):
            return OutputStreams(*(clip(text, limit_chars) for text in texts))
        unwritten = self._journal.unwritten(execution_id)
        budgets = {kind: TextBudget(limit_chars, has_whole_uris=has_whole_uris) for kind in (*STREAMS, "notice")}
        read = await asyncio.to_thread(_read_streams, self._journal.path, execution_id, budgets, unwritten)
        if result.truncated is not None:
            return read
        # Of an execution that is not in memory, the result lacks only the notices.
        return OutputStreams(clip(result.stdout, limit_chars), clip(result.stderr, limit_chars), read.notices)

    # Output and displays

    def has_events(self, execution_id: str, since: int) -> bool:
        """Return whether an execution has events after number `since`."""
        return next(self._journal.events(execution_id, since), None) is not None

    async def whole_output(self, execution_id: str, principal: str, offset: int, limit: int) -> str:
        """Return the text of the caller's execution, or a part of it; what is cut off ends with the URI of the rest."""
        is_bounded = 0 < limit <= MAX_CHARS
        page = await self.output_page(execution_id, principal, offset, limit if is_bounded else MAX_CHARS)
        if is_bounded or page.is_last:
            return page.text
        rest = f"{output_uri(execution_id)}?offset={offset + MAX_CHARS}"
        return f"{page.text}\n[belljar: this is not the end: {rest} goes on]\n"

    async def output_page(self, execution_id: str, principal: str, offset: int, limit: int) -> PrintedPage:
        """Return `limit` characters of what the caller's execution printed, from character `offset` on."""
        self.result(execution_id, principal)
        self._journal.commit()
        unwritten = self._journal.unwritten(execution_id)
        return await asyncio.to_thread(read_printed, self._journal.path, execution_id, offset, limit, unwritten)

    def display(self, execution_id: str, name: str, principal: str) -> bytes:
        """Return one display of the caller's execution."""
        record = self._journal.find(execution_id)
        content = None
        if record is not None and record.principal == principal:
            content = self.display_reader(record.session_id)(display_uri(execution_id, name))
        if content is None:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} has no display {name[:64]!r}")
        return content

    def display_reader(self, session_id: str) -> Callable[[str], bytes | None]:
        """Return a function, for any thread, that reads a display of a session by its URI, or returns None."""
        return lambda uri: read_display(self._folder / session_id / "displays", uri)

    async def notebook(self, session_id: str) -> str:
        """Return all executions of a session with their output as an .ipynb; of long output only head and tail.

        The caller has made sure whose session it is.
        """
        self._journal.commit()
        if self._journal.is_failing:
            raise Busy(
                "the journal cannot be written now, and the notebook would lack what waits to be kept",
                hint="Try again in 10 seconds",
            )
        reader = self.display_reader(session_id)
        return await asyncio.to_thread(read_notebook, self._settings.data_directory, session_id, reader)


def _with_notices(result: ExecutionResult) -> ExecutionResult:
    """Return a result that may have been recorded before results had `notices`, with them.

    In such a one, a text that looks like a notice and that neither stream has is one.
    """
    if "notices" in result.model_fields_set:
        return result
    printed = f"{result.stdout}\n{result.stderr}"
    notices = [
        ResultNotice(text=text, at=at)
        for at, text in enumerate(result.output)
        if text.lstrip("\n").startswith("[belljar: ") and text.strip() not in printed
    ]
    return result.model_copy(update={"notices": notices})


def _read_streams(
    journal: Path, execution_id: str, budgets: Mapping[str, TextBudget], unwritten: Sequence[OutputEvent]
) -> OutputStreams:
    for kind, text in read_stream_texts(journal, execution_id, unwritten):
        if kind in budgets:
            budgets[kind].add(kind, text)
    return OutputStreams(*("".join(text for _, text in budget.segments()) for budget in budgets.values()))


# The notebook of a session, within what one answer can carry. `belljar export` has no such bounds, because it writes to
# a file and blocks no server meanwhile.

# Shared by all cells: 60 million characters took 1 GB of memory to send, and blocked all other clients for 10 s.
TEXT_CHARS = 8_000_000
MAX_CELL_CHARS = 1_000_000
LEAST_CELL_CHARS = 200
# The limit on code and displays, which are there whole or not at all.
MAX_BYTES = 32 * 1024 * 1024


def read_notebook(data_directory: Path, session_id: str, read_display: Callable[[str], bytes | None]) -> str:
    """Return the notebook as text; see `bounded_notebook`."""
    return written(bounded_notebook(data_directory, session_id, read_display))


def bounded_notebook(data_directory: Path, session_id: str, read_display: Callable[[str], bytes | None]) -> Any:
    """Return the notebook, of long output only head and tail.

    Opens a connection of its own, so any thread may call it.
    """
    budget = _NotebookBudget(session_id)
    # Read row by row, because the output of a session may be larger than memory.
    with open_archive(data_directory) as archive:
        count = max(1, archive.count(session_id))
        cells = map(budget.cell, archive.cells(session_id, is_live=lambda: True))
        limit = max(LEAST_CELL_CHARS, min(MAX_CELL_CHARS, TEXT_CHARS // count))
        return notebook_of(session_id, cells, budget.reader(read_display), limit_chars=limit)


class _NotebookBudget:
    """The rest of `MAX_BYTES` for one notebook."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._left = MAX_BYTES

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
                f"the code and displays of session {self._session_id} are over {MAX_BYTES:,} bytes",
                hint="On the server's machine, belljar export writes all of them to a file",
            )
