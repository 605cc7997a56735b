"""The inbox: what waits for a person, and the one way in which an answer from outside the client reaches it.

Questions of executions come here when they are put, and are recorded with who answered them and where; waits of
workflows join through `QuestionSource`. The first answer wins, from wherever it comes; a later one is told who was
first. Commands and the console use the same methods. Knows nothing of protocols.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, Protocol

from belljar.errors import InvalidArgument, OperatorNeeded, QuestionClosed, QuestionNotFound
from belljar.json_values import check_values
from belljar.models import iso_ms
from belljar.outputs.terminal_text import printable
from belljar.questions.models import (
    MAX_EDITED_CHARS,
    MAX_SAID_CHARS,
    Action,
    InboxQuestion,
    Question,
    QuestionReply,
    QuestionState,
)
from belljar.questions.schema import checked_values, chosen_text

PRESENCE_S = 30.0
"""How long somebody counts as looking at the inbox after they were seen last."""
MAX_ENDED = 50
ASK_IN_CONSOLE = Literal["present", "always", "never"]


class WaitingQuestion:
    """A question that waits. The first answer wins, from wherever it comes."""

    def __init__(self, question: Question, entry: InboxQuestion) -> None:
        self.question = question
        self.entry = entry
        """The question as people see it, who also see how it ended."""
        self.reply: asyncio.Future[QuestionReply] = asyncio.get_running_loop().create_future()
        self.on_end: Callable[[InboxQuestion], None] = lambda _: None

    @property
    def is_open(self) -> bool:
        """Return whether nobody has answered it, and whoever asks still waits."""
        return self.entry.state == "waiting"

    def take(self, reply: QuestionReply, by: str, where: str) -> None:
        """Take a reply; one that comes too late is dropped."""
        self.end("answered" if reply.action == "accept" else "declined", replace(reply, by=by), where)

    def end(self, state: QuestionState, reply: QuestionReply | None = None, where: str = "") -> None:
        """Note what became of the question; what comes after its end changes nothing."""
        if not self.is_open:
            return
        ended: dict[str, str] = {"state": state, "ended_at": iso_ms(time.time()), "answered_in": where}
        if reply is not None:
            chosen = "" if self.entry.is_password else chosen_text(self.entry.fields, reply.values)
            said, edited = printable(reply.said), printable(reply.edited)
            ended |= {"answered_by": reply.by, "chosen": chosen, "said": said, "edited": edited}
        self.entry = self.entry.model_copy(update=ended)
        if reply is not None:
            self.reply.set_result(reply)
        self.on_end(self.entry)


class QuestionTable(Protocol):
    """Where the questions of executions are on record: the journal."""

    def put(self, question: InboxQuestion) -> None:
        """Record that a person is asked."""
        ...

    def end(self, question: InboxQuestion) -> None:
        """Record what became of a question."""
        ...

    def find(self, question_id: str) -> InboxQuestion | None:
        """Return a question by its id."""
        ...

    def ended(self, owner: str | None, most: int) -> list[InboxQuestion]:
        """Return the latest questions that wait no more, of one owner or of all, newest first."""
        ...


class QuestionSource(Protocol):
    """Others who wait for people: the runs of workflows."""

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """Return what waits, of one owner or of all."""
        ...

    def find(self, question_id: str) -> InboxQuestion | None:
        """Return a question by its id, whether it waits or not."""
        ...

    async def answer(
        self, question: InboxQuestion, action: Action, values: Mapping[str, Any], by: str, *, is_operator: bool
    ) -> None:
        """Pass an answer on; raises `InvalidArgument` for one that does not fit or comes too late."""
        ...


class Inbox:
    """The questions of one server. A `principal` of None is the operator, who sees those of all owners."""

    def __init__(self, table: QuestionTable, ask_in_console: ASK_IN_CONSOLE) -> None:
        self._table = table
        self._rule: ASK_IN_CONSOLE = ask_in_console
        self._live: dict[str, WaitingQuestion] = {}
        self._seen: dict[str | None, float] = {}
        self.console_url: Callable[[], str] = lambda: ""
        """Returns the address of this server as people reach its console; empty while it has none."""
        self.sources: list[QuestionSource] = []
        self.on_change: list[Callable[[InboxQuestion], None]] = []
        """Called when a question is put, and when it waits no more; for others who wait, who asked calls `tell`."""

    # For executions

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

    def put(self, waiting: WaitingQuestion) -> None:
        """Record a question and let it be answered."""
        self._live[waiting.entry.id] = waiting
        waiting.on_end = self._end
        self._table.put(waiting.entry)
        self.tell(waiting.entry)

    def _end(self, question: InboxQuestion) -> None:
        del self._live[question.id]
        self._table.end(question)
        self.tell(question)

    def tell(self, question: InboxQuestion) -> None:
        """Tell those who show questions that one was put, or waits no more."""
        for tell in self.on_change:
            tell(question)

    # For people

    def note_presence(self, principal: str | None) -> None:
        """Note that somebody who may answer looks at the inbox now."""
        self._seen[principal] = time.monotonic()

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """Return what waits for a person, oldest first."""
        own = [each.entry for each in self._live.values() if principal in (None, each.entry.owner)]
        waiting = own + [each for source in self.sources for each in source.waiting(principal)]
        return sorted(waiting, key=lambda each: each.put_at)

    def ended(self, principal: str | None, most: int = MAX_ENDED) -> list[InboxQuestion]:
        """Return the latest questions of executions that wait no more, newest first."""
        return self._table.ended(principal, most)

    def find(self, question_id: str, principal: str | None) -> InboxQuestion:
        """Return one question; another owner's is answered as an unknown one."""
        found = self._live[question_id].entry if question_id in self._live else None
        if found is None and question_id.isascii():
            others = (source.find(question_id) for source in self.sources)
            found = self._table.find(question_id) or next((each for each in others if each is not None), None)
        if found is None or principal not in (None, found.owner):
            raise QuestionNotFound(
                f"there is no question {question_id[:80]!r}", hint="`belljar inbox` lists those that wait"
            )
        return found

    async def answer(
        self,
        question_id: str,
        principal: str | None,
        *,
        action: Action,
        values: Mapping[str, Any] | None = None,
        by: str,
        where: str,
        edited: str = "",
        said: str = "",
    ) -> InboxQuestion:
        """Answer a question for the person `by`; return it as it is then.

        `edited` is allowed in place of what was asked about, and `said` is told to the agent.
        Raises `QuestionClosed` if it waits no more, with who was first.
        """
        question = self.find(question_id, principal)
        check_may_answer(question_id, in_console=question.in_console, is_operator=principal is None)
        if question.state != "waiting":
            raise QuestionClosed(_fate(question))
        edited = _checked_edit(question, edited) if action == "accept" else ""
        if len(said) > MAX_SAID_CHARS:
            raise InvalidArgument(f"the message has {len(said):,} characters, the limit is {MAX_SAID_CHARS:,}")
        if said and question.kind == "workflow":
            raise InvalidArgument("a run has no agent that reads a message", hint="Answer without one")
        if question.kind == "workflow":
            for source in self.sources:
                await source.answer(question, action, values or {}, by, is_operator=principal is None)
            state: QuestionState = "answered" if action == "accept" else "declined"
            return question.model_copy(update={"state": state, "answered_by": by, "answered_in": where})
        given = checked_values(question.fields, values or {}) if action == "accept" else {}
        if not self.is_open:
            raise InvalidArgument(
                "this server takes answers from clients only", hint="The setting ask_in_console is `never`"
            )
        live = self._live.get(question_id)
        if live is None:
            raise QuestionClosed(
                f"question {question_id} waits under another server", hint="Answer it there, or on that machine"
            )
        live.take(QuestionReply(action, given, edited=edited, said=said.strip()), by, where)
        return live.entry


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


def _checked_edit(question: InboxQuestion, edited: str) -> str:
    """Return what is to be allowed in place of what was asked about; empty if that is the same."""
    about = question.about
    if not edited or about is None or edited == about.editable:
        return ""
    if not about.editable:
        raise InvalidArgument("what this question asks about cannot be changed", hint="Allow it as it is, or decline")
    if len(edited) > MAX_EDITED_CHARS:
        raise InvalidArgument(f"the change has {len(edited):,} characters, the limit is {MAX_EDITED_CHARS:,}")
    if not edited.strip() or not is_unicode(edited):
        raise InvalidArgument("the change is empty, or no text", hint="Decline what should not happen")
    if about.tool:
        try:
            check_values(edited)
            is_object = isinstance(json.loads(edited), dict)
        except (RecursionError, ValueError) as error:
            raise InvalidArgument(f"the arguments are not JSON: {error}", hint="Give a JSON object") from None
        if not is_object:
            raise InvalidArgument("the arguments are no JSON object", hint='Give one, like {"name": "value"}')
    return edited


def is_unicode(text: str) -> bool:
    """Return whether a text can be written: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _fate(question: InboxQuestion) -> str:
    at = (
        datetime.fromisoformat(question.ended_at).astimezone().strftime("%H:%M:%S") if question.ended_at else "just now"
    )
    by = f" by {question.answered_by}" if question.answered_by else ""
    where = f" in the {question.answered_in}" if question.answered_in else ""
    match question.state:
        case "answered" | "declined":
            return f"question {question.id} was {question.state} already{by}{where}, at {at}"
        case "expired":
            return f"question {question.id} expired at {at}: nobody had answered"
        case _:
            return f"question {question.id} is not asked any more: its cell was stopped or has ended, at {at}"
