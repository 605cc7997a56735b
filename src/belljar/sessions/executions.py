"""Executions by their own id, whatever became of their session's kernel: what they gave, said, showed and left.

Live ones answer for themselves, older ones from the journal. Another principal's answers exactly as an unknown one.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from belljar.errors import Busy, ExecutionNotFound, InvalidArgument
from belljar.models import ExecutionResult
from belljar.outputs.displays import display_uri, read_display
from belljar.outputs.summary import Summary
from belljar.sessions.execution import Execution
from belljar.sessions.journal import Journal
from belljar.sessions.notebooks import read_notebook
from belljar.sessions.printed import read_printed
from belljar.sessions.session import Session
from belljar.sessions.transcript import output_uri
from belljar.settings import Settings

MOST_KEY_CHARS = 200
# In one answer: 100 million characters took 2 GB of memory to send, and stopped everyone else for 12 s.
MOST_CHARS = 8_000_000


class Executions:
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
        return session is not None and session.life.checkpoints.holds(execution_id)

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
