"""The inbox: what waits for a person, and the one way in which an answer from outside the client reaches it.

Questions of executions come here when they are put, and are recorded with who answered them and where; waits of
workflows join through `QuestionSource`. The first answer wins, from wherever it comes; a later one is told who was
first. Commands and the console use the same methods. Knows nothing of protocols.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, Protocol

from belljar.errors import InvalidArgument, OperatorNeeded, QuestionClosed, QuestionNotFound
from belljar.journal.journal import Journal
from belljar.journal.question_records import QuestionRecord, QuestionRecords
from belljar.models import iso_ms
from belljar.outputs.terminal_text import printable
from belljar.questions.models import (
    Action,
    InboxQuestion,
    Question,
    QuestionReply,
    QuestionState,
    QuestionSubject,
    shown_fields,
)
from belljar.questions.schema import checked_values

PRESENCE_S = 30.0
"""How long somebody counts as looking at the inbox after they were seen last."""
MAX_ENDED = 50
ASK_IN_CONSOLE = Literal["present", "always", "never"]
TakeAnswer = Callable[[QuestionReply, str, str], bool]
"""Takes a reply, who gave it and where; returns False if it is too late."""


class QuestionSource(Protocol):
    """Others who wait for people: the runs of workflows."""

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """Return what waits, of one owner or of all."""
        ...

    async def answer(
        self, question: InboxQuestion, action: Action, values: Mapping[str, Any], by: str, *, is_operator: bool
    ) -> None:
        """Pass an answer on; raises `InvalidArgument` for one that does not fit or comes too late."""
        ...


class Inbox:
    """The questions of one server. A `principal` of None is the operator, who sees those of all owners."""

    def __init__(self, journal: Journal, ask_in_console: ASK_IN_CONSOLE) -> None:
        self._records = QuestionRecords(journal)
        self._rule: ASK_IN_CONSOLE = ask_in_console
        self._live: dict[str, tuple[QuestionRecord, TakeAnswer]] = {}
        self._seen: dict[str | None, float] = {}
        self.console_url: Callable[[], str] = lambda: ""
        """Returns the address of this server as people reach its console; empty while it has none."""
        self.sources: list[QuestionSource] = []
        self.on_change: list[Callable[[InboxQuestion], None]] = []
        """Called when a question is put, and when it waits no more."""

    # For executions

    def of_execution(self, execution_id: str, session_id: str, principal: str) -> "ExecutionInbox":
        """Return where one execution puts its questions."""
        return ExecutionInbox(self, execution_id, session_id, principal)

    @property
    def is_open(self) -> bool:
        """Return whether questions of executions may be answered here."""
        return self._rule != "never"

    def place(self) -> str:
        """Return where people answer, in words for the agent that a command follows; empty where they cannot."""
        if not self.is_open:
            return ""
        url = self.console_url()
        if url:
            return f"at {url}/console/inbox, or on the server's machine with"
        return "on the server's machine with `belljar console` or"

    def may_ask(self, principal: str, *, in_console: bool = False) -> bool:
        """Return whether a question of this owner may wait here for somebody who may answer it."""
        if self._rule != "present":
            return self._rule == "always"
        now, who_may = time.monotonic(), (None,) if in_console else (None, principal)
        return any(now - self._seen.get(who, -PRESENCE_S) < PRESENCE_S for who in who_may)

    def put(self, record: QuestionRecord, take: TakeAnswer) -> None:
        """Record a question and let it be answered."""
        self._live[record.id] = record, take
        self._records.put(record)
        self._tell(record)

    def end(self, question_id: str, state: QuestionState, by: str, where: str) -> None:
        """Record what became of a question."""
        record, _ = self._live.pop(question_id)
        self._records.end(question_id, state, by, where)
        ended = replace(record, state=state, ended_at=time.time(), answered_by=by, answered_in=where)
        self._tell(ended)

    def _tell(self, record: QuestionRecord) -> None:
        for tell in self.on_change:
            tell(_shown(record))

    # For people

    def note_presence(self, principal: str | None) -> None:
        """Note that somebody who may answer looks at the inbox now."""
        self._seen[principal] = time.monotonic()

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """Return what waits for a person, oldest first."""
        own = [_shown(record) for record, _ in self._live.values() if principal in (None, record.principal)]
        return sorted(own + [each for source in self.sources for each in source.waiting(principal)], key=_put_at)

    def ended(self, principal: str | None, most: int = MAX_ENDED) -> list[InboxQuestion]:
        """Return the latest questions of executions that wait no more, newest first."""
        self._records.withdraw_dead()
        return [_shown(record) for record in self._records.ended(principal, most)]

    def find(self, question_id: str, principal: str | None) -> InboxQuestion:
        """Return one question; another owner's is answered as an unknown one."""
        waiting = next((each for each in self.waiting(principal) if each.id == question_id), None)
        if waiting is not None:
            return waiting
        self._records.withdraw_dead()
        record = self._records.find(question_id) if question_id.isascii() else None
        if record is None or principal not in (None, record.principal):
            raise QuestionNotFound(
                f"there is no question {question_id[:80]!r}", hint="`belljar inbox` lists those that wait"
            )
        return _shown(record)

    async def answer(
        self,
        question_id: str,
        principal: str | None,
        *,
        action: Action,
        values: Mapping[str, Any] | None = None,
        by: str,
        where: str,
    ) -> None:
        """Answer a question for the person `by`; raises `QuestionClosed` if it waits no more, with who was first."""
        question = self.find(question_id, principal)
        check_may_answer(question_id, in_console=question.in_console, is_operator=principal is None)
        if question.state != "waiting":
            raise QuestionClosed(_fate(question))
        given = checked_values(question.fields, values or {}) if action == "accept" else {}
        if question.kind == "workflow":
            for source in self.sources:
                await source.answer(question, action, given, by, is_operator=principal is None)
            return
        if not self.is_open:
            raise InvalidArgument(
                "this server takes answers from clients only", hint="The setting ask_in_console is `never`"
            )
        live = self._live.get(question_id)
        if live is None:
            raise QuestionClosed(
                f"question {question_id} waits under another server", hint="Answer it there, or on that machine"
            )
        if not live[1](QuestionReply(action, given), by, where):
            raise QuestionClosed(_fate(self.find(question_id, principal)))


@dataclass(frozen=True, slots=True)
class ExecutionInbox:
    """The inbox as one execution uses it."""

    inbox: Inbox
    execution_id: str
    session_id: str
    principal: str

    def may_ask(self, *, in_console: bool) -> bool:
        """Return whether its questions may wait for somebody outside the client."""
        return self.inbox.may_ask(self.principal, in_console=in_console)

    def put(self, number: int, question: Question, limit_s: float, take: TakeAnswer) -> str:
        """Put a question; return its id."""
        now, shown = time.time(), shown_fields(question)
        record = QuestionRecord(
            id=f"{self.execution_id}-{number}",
            execution_id=self.execution_id,
            session_id=self.session_id,
            principal=self.principal,
            message=str(shown["message"]),
            schema=json.dumps(question.schema),
            is_password=question.is_password,
            in_console=question.in_console,
            subject=question.about.with_texts(printable).model_dump_json() if question.about is not None else "",
            put_at=now,
            expires_at=now + limit_s,
        )
        self.inbox.put(record, take)
        return record.id

    def end(self, question_id: str, state: QuestionState, by: str = "", where: str = "") -> None:
        """Record what became of a question."""
        self.inbox.end(question_id, state, by, where)


def check_may_answer(question: str, *, in_console: bool, is_operator: bool) -> None:
    """Raise `OperatorNeeded` if a rule keeps a question for operators and somebody else answers.

    An owner's own key is no operator's, because the agent whose call is in question holds it.
    """
    if in_console and not is_operator:
        raise OperatorNeeded(
            f"question {question} is kept for an operator, and a client's credentials are not an operator's",
            hint="Tell the person: `belljar console` or `belljar inbox` on the server's machine shows it, and a key "
            "that `console_operators` names may answer it",
        )


def _put_at(question: InboxQuestion) -> str:
    return question.put_at


def _shown(record: QuestionRecord) -> InboxQuestion:
    return InboxQuestion(
        id=record.id,
        owner=record.principal,
        session_id=record.session_id,
        execution_id=record.execution_id,
        message=record.message,
        fields=record.fields(),
        is_password=bool(record.is_password),
        in_console=bool(record.in_console),
        about=QuestionSubject.model_validate_json(record.subject) if record.subject else None,
        state=record.state,
        put_at=iso_ms(record.put_at),
        expires_at=iso_ms(record.expires_at),
        ended_at=iso_ms(record.ended_at) if record.ended_at else None,
        answered_by=record.answered_by,
        answered_in=record.answered_in,
    )


def _fate(question: InboxQuestion) -> str:
    at = (
        datetime.fromisoformat(question.ended_at).astimezone().strftime("%H:%M:%S") if question.ended_at else "just now"
    )
    by = f" by {question.answered_by}" if question.answered_by else ""
    where = f" in the {question.answered_in}" if question.answered_in else ""
    match question.state:
        case "answered" | "declined":
            return f"question {question.id} was {question.state} already{by}{where}, at {at}"
        case "waiting":
            return f"question {question.id} was answered by somebody else just now"
        case "expired":
            return f"question {question.id} expired at {at}: nobody had answered"
        case _:
            return f"question {question.id} is not asked any more: its cell was stopped or has ended, at {at}"
