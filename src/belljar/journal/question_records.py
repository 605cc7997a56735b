"""The questions table of the journal: what people were asked, who answered and where. Typed text is not kept."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from belljar.journal.journal import Journal
from belljar.models import iso_ms
from belljar.questions.models import InboxQuestion, QuestionSubject

_COLUMNS = (
    "id, execution_id, session_id, principal, message, schema, is_password, in_console, put_at, expires_at, state, "
    "ended_at, answered_by, answered_in, chosen, edited, said, subject"
)


class QuestionRecords:
    """Reads and writes the table. See `QuestionTable`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def put(self, question: InboxQuestion) -> None:
        """Record that a person is asked."""
        self._journal.write(
            f"INSERT OR REPLACE INTO questions ({_COLUMNS}) "  # noqa: S608
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'waiting', NULL, '', '', '', '', '', ?)",
            (
                question.id,
                question.execution_id,
                question.session_id,
                question.owner,
                question.message,
                json.dumps(question.fields),
                question.is_password,
                question.in_console,
                _timestamp(question.put_at),
                _timestamp(question.expires_at),
                question.about.model_dump_json() if question.about is not None else "",
            ),
        )
        self._journal.commit()

    def end(self, question: InboxQuestion) -> None:
        """Record what became of a question."""
        self._journal.write(
            "UPDATE questions SET state = ?, ended_at = ?, answered_by = ?, answered_in = ?, chosen = ?, edited = ?, "
            "said = ? WHERE id = ? AND state = 'waiting'",
            (
                question.state,
                _timestamp(question.ended_at),
                question.answered_by,
                question.answered_in,
                question.chosen,
                question.edited,
                question.said,
                question.id,
            ),
        )
        self._journal.commit()

    def find(self, question_id: str) -> InboxQuestion | None:
        """Return a question by its id."""
        return next(self._rows("WHERE id = ?", (question_id,)), None)

    def ended(self, owner: str | None, most: int) -> list[InboxQuestion]:
        """Return the latest questions that wait no more, of one owner or of all, newest first."""
        condition = "WHERE state <> 'waiting' AND (? IS NULL OR principal = ?) ORDER BY ended_at DESC LIMIT ?"
        return [*self._rows(condition, (owner, owner, most))]

    def _rows(self, condition: str, values: tuple[object, ...]) -> Iterator[InboxQuestion]:
        # Those of executions that have ended, with their server for instance, wait no more.
        self._journal.write(
            "UPDATE questions SET state = 'withdrawn', ended_at = ? WHERE state = 'waiting' AND execution_id IN "
            "(SELECT id FROM executions WHERE result IS NOT NULL)",
            (time.time(),),
        )
        for row in [*self._journal.rows(f"SELECT {_COLUMNS} FROM questions {condition}", values)]:  # noqa: S608
            known: dict[str, Any] = dict(zip(_COLUMNS.split(", "), row, strict=True))
            owner, schema, about = (known.pop(name) for name in ("principal", "schema", "subject"))
            known |= {name: iso_ms(known[name]) for name in ("put_at", "expires_at", "ended_at") if known[name]}
            subject = QuestionSubject.model_validate_json(about) if about else None
            yield InboxQuestion(owner=owner, fields=json.loads(schema), about=subject, **known)


def _timestamp(at: str | None) -> float | None:
    return datetime.fromisoformat(at).timestamp() if at else None
