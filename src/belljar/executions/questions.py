"""The questions of one execution to a person, one at a time: `input()` of its code, and what its tool calls ask.

A surface that follows the execution shows the question to the person once, and passes the answer to `answer`; people
outside the client answer through the inbox. The first answer wins. Knows nothing of protocols.
"""

import asyncio
import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from belljar.models import iso_ms
from belljar.outputs.events import InputRequest
from belljar.questions.inbox import Inbox, WaitingQuestion
from belljar.questions.models import InboxQuestion, Question, QuestionReply, QuestionSubject, shown_fields
from belljar.toolbox.server_text import shortened

ALIVE_CHECK_S = 0.5
ANSWER = "answer"
"""The only field of the form for `input()`."""
INPUT_SCHEMA = {
    "type": "object",
    "properties": {
        ANSWER: {"type": "string", "title": "Answer", "description": "The text that input() returns", "minLength": 0}
    },
    "required": [ANSWER],
    "title": "Answer",
}
MAX_SHOWN_CHARS = 300
_NO_PROMPT = "The code asks for input"


def input_question(request: InputRequest) -> Question:
    """Return the form for a call of `input()`, or the one that the module `forms` wants filled in."""
    message = request.prompt if request.prompt.strip() else _NO_PROMPT
    about = QuestionSubject(asked_by="code")
    return Question(message, request.form or INPUT_SCHEMA, is_password=request.is_password, about=about)


def question_text(question_id: str, question: Question, *, where: str) -> str:
    """Return, for the agent, what a person is asked and where it can be answered; `where` is outside the client."""
    shown = shortened(" ".join(question.message.split()), MAX_SHOWN_CHARS)
    places = [] if question.in_console else ["in your client, if it can ask"]
    if where:
        places.append(f"{where} `belljar inbox answer {question_id}`")
    return f"a person: {shown!r}. It can be answered {', or '.join(places)}"


def text_of(reply: QuestionReply | None, request: InputRequest) -> str | None:
    """Return the text that answers a request; None when it was declined or nobody answered."""
    if reply is None or reply.action != "accept":
        return None
    if request.form is not None:
        return json.dumps(reply.values)
    answer = reply.values.get(ANSWER)
    return None if answer is None else str(answer)


class ExecutionQuestions:
    """The questions of one execution. `on_change` is called when there is a new question, or it can be asked again."""

    def __init__(
        self, on_change: Callable[[], None], inbox: Inbox | None, *, execution_id: str, session_id: str, owner: str
    ) -> None:
        self.number = 0
        """How many questions were asked so far; an answer may name the one it is for."""
        self.inbox = inbox
        """Where people outside the client answer; None where whoever drives the execution asks them."""
        self._on_change = on_change
        self._asker: dict[str, Any] = {"owner": owner, "session_id": session_id, "execution_id": execution_id}
        self._turn = asyncio.Lock()
        self._waiting: WaitingQuestion | None = None
        self._is_being_asked = False

    @property
    def current(self) -> Question | None:
        """Return the question that waits."""
        return self._waiting.question if self._waiting is not None and self._waiting.is_open else None

    def _put(self, question: Question, limit_s: float, recorded: Question) -> WaitingQuestion:
        self.number += 1
        now, question_id = time.time(), f"{self._asker['execution_id']}-{self.number}"
        times: dict[str, Any] = {"put_at": iso_ms(now), "expires_at": iso_ms(now + limit_s)}
        entry = InboxQuestion(id=question_id, **self._asker, **shown_fields(recorded), **times)
        waiting = self._waiting = WaitingQuestion(question, entry)
        if self.inbox is not None:
            self.inbox.put(waiting)
        self._on_change()
        return waiting

    async def ask(
        self, question: Question, *, limit_s: float, is_wanted: Callable[[], bool], recorded: Question | None = None
    ) -> QuestionReply | None:
        """Return the person's reply; None when there is none within `limit_s`, or when it is no longer wanted.

        `recorded` is the question as the inbox and the journal have it, where that differs: without personal data.
        """
        async with self._turn:
            if not is_wanted():
                return None
            waiting = self._put(question, limit_s, recorded or question)
            deadline = time.monotonic() + limit_s
            try:
                while waiting.is_open and is_wanted() and time.monotonic() < deadline:
                    left_s = max(0, deadline - time.monotonic())
                    await asyncio.wait([waiting.reply], timeout=min(ALIVE_CHECK_S, left_s))
                if is_wanted():
                    waiting.end("expired")
            finally:
                waiting.end("withdrawn")
            return waiting.reply.result() if waiting.reply.done() else None

    def answer(self, reply: QuestionReply, number: int | None = None, *, by: str = "", where: str = "client") -> None:
        """Answer the pending question; an answer that names the `number` of another question is ignored."""
        if self._waiting is not None and number in (None, self.number):
            self._waiting.take(reply, by, where)

    def withdraw(self) -> None:
        """End the pending question without an answer, because its cell is stopped."""
        if self._waiting is not None:
            self._waiting.end("withdrawn", QuestionReply("decline"))

    @contextmanager
    def asking(self) -> Generator[bool]:
        """Claim the right to put the question to a person; yields False while another caller has it."""
        if self._is_being_asked:
            yield False
            return
        self._is_being_asked = True
        try:
            yield True
        finally:
            self._is_being_asked = False
            self._on_change()
