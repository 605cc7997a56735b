"""One execution as its calls see it: who can be asked and told, what is under way, and what a server asks meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.context import Context

from belljar.toolbox.base import Question, Reply
from belljar.toolbox.ledger import Ledger
from belljar.toolbox.texts import one_line, visible

QUESTION_CHARS = 2_000


class Caller(Protocol):
    """The execution that is under way, as far as its calls concern it."""

    async def ask(self, question: Question) -> Reply | None:
        """Ask the person; None when nobody can be asked."""
        ...

    def note_progress(self, text: str) -> None:
        """A call says how far it is."""
        ...


@dataclass(slots=True)
class Turn:
    """The execution that calls belong to."""

    caller: Caller | None
    """None for what runs on between two executions."""
    ledger: Ledger
    trace: Context = field(default_factory=Context)
    """The execution's, because calls come in over a socket, where the current span is that of the session's start."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    stopped: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """Those of them that end because their execution does."""


class Questions:
    """What a server asks in the middle of a call."""

    def __init__(self, turn: Turn, server: str, hidden: Callable[[str, int], str]) -> None:
        self._turn = turn
        self._hidden = hidden
        self._server = server
        self.unasked = ""
        """Said beside an error: the server takes what nobody answered for a no."""

    def __eq__(self, other: object) -> bool:
        """Calls of one execution ask one person."""
        return self is other or (isinstance(other, Questions) and self._turn is other._turn)

    def __hash__(self) -> int:
        return hash(id(self._turn))

    async def __call__(self, question: Question) -> Reply:
        """Put it to the person, who is told whose it is."""
        message = visible(question.message, QUESTION_CHARS)
        told = Question(f"{one_line(self._server, 100)} asks: {message}", question.schema, question.url)
        reply = await self._turn.caller.ask(told) if self._turn.caller else None
        if reply is None:
            asked = one_line(self._hidden(message, QUESTION_CHARS), 300)
            self.unasked = f" (it asked a person: {asked!r}, and nobody can be asked here)"
            return Reply("cancel")
        return reply
