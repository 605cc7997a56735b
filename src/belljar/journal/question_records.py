"""The questions table of the journal: what people were asked, who answered and where. Answers are not kept."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from belljar.journal.journal import Journal
from belljar.questions.models import QuestionState

_COLUMNS = (
    "id, execution_id, session_id, principal, message, schema, is_password, in_console, put_at, expires_at, state, "
    "ended_at, answered_by, answered_in, subject"
)


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """One question to a person."""

    id: str
    execution_id: str
    session_id: str
    principal: str
    message: str
    schema: str
    """A JSON Schema of the answer, as JSON; `{}` for plain consent."""
    is_password: int
    in_console: int
    """Whether it is never put to the client."""
    put_at: float
    expires_at: float
    state: QuestionState = "waiting"
    ended_at: float | None = None
    answered_by: str = ""
    answered_in: str = ""
    subject: str = ""
    """What it is about, as JSON; empty where that is not known."""

    def fields(self) -> dict[str, Any]:
        """Return the schema of the answer."""
        return json.loads(self.schema)


class QuestionRecords:
    """Reads and writes the table."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def put(self, record: QuestionRecord) -> None:
        """Record that a person is asked."""
        self._journal.write(
            f"INSERT OR REPLACE INTO questions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
            (
                record.id,
                record.execution_id,
                record.session_id,
                record.principal,
                record.message,
                record.schema,
                record.is_password,
                record.in_console,
                record.put_at,
                record.expires_at,
                record.state,
                record.ended_at,
                record.answered_by,
                record.answered_in,
                record.subject,
            ),
        )
        self._journal.commit()

    def end(self, question_id: str, state: QuestionState, by: str = "", where: str = "") -> None:
        """Record what became of a question."""
        self._journal.write(
            "UPDATE questions SET state = ?, ended_at = ?, answered_by = ?, answered_in = ? "
            "WHERE id = ? AND state = 'waiting'",
            (state, time.time(), by, where, question_id),
        )
        self._journal.commit()

    def withdraw_dead(self) -> None:
        """Record the questions of executions that have ended, with their server for instance, as withdrawn."""
        self._journal.write(
            "UPDATE questions SET state = 'withdrawn', ended_at = ? WHERE state = 'waiting' AND execution_id IN "
            "(SELECT id FROM executions WHERE result IS NOT NULL)",
            (time.time(),),
        )

    def find(self, question_id: str) -> QuestionRecord | None:
        """Return a question by its id."""
        return next(self._rows("WHERE id = ?", (question_id,)), None)

    def ended(self, principal: str | None, most: int) -> list[QuestionRecord]:
        """Return the latest questions that wait no more, of one owner or of all."""
        if principal is None:
            return [*self._rows("WHERE state <> 'waiting' ORDER BY ended_at DESC LIMIT ?", (most,))]
        condition = "WHERE state <> 'waiting' AND principal = ? ORDER BY ended_at DESC LIMIT ?"
        return [*self._rows(condition, (principal, most))]

    def _rows(self, condition: str, values: tuple[object, ...]) -> Iterator[QuestionRecord]:
        for row in [*self._journal.rows(f"SELECT {_COLUMNS} FROM questions {condition}", values)]:  # noqa: S608
            yield QuestionRecord(*row)
