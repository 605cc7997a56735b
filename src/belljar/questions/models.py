"""A question to a person, as everybody has it: who asks, what about, which answer, and what became of it.

Texts in it come from code, models and servers: whoever records a question replaces personal data in it and makes
controls visible. Does not know where a question waits (`inbox.py`) nor which answers fit (`schema.py`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pydantic import Field, JsonValue

from belljar.models import Model
from belljar.outputs.terminal_text import printable

MAX_MESSAGE_CHARS: Final = 20_000
_MAX_TITLE_CHARS: Final = 200
MAX_EDITED_CHARS: Final = 50_000
"""The longest code or arguments that a person may change."""
MAX_SAID_CHARS: Final = 2_000
Action = Literal["accept", "decline"]
QuestionState = Literal["waiting", "answered", "declined", "expired", "withdrawn"]


# What it is about. The host fills it in, so code cannot claim to be the policy.


class SubjectArgument(Model):
    """An argument of a tool call."""

    name: str
    value: str = Field(description="The start of its value as JSON, with codes for characters that cannot be seen.")


class SubjectLine(Model):
    """A line of the code that wants to run."""

    number: int
    text: str
    is_marked: bool = Field(default=False, description="Whether a finding is in this line.")


class SubjectFinding(Model):
    """Why a person is asked: the rule, its reason, and in code what was found where."""

    rule: str = Field(default="", description="The place of the rule in the policy, like `code.1`, or `plugin:NAME`.")
    reason: str = ""
    line: int | None = None
    what: str = ""


class QuestionSubject(Model):
    """What a question is about, as far as the server itself knows."""

    asked_by: Literal["code", "policy", "plugin", "server", "workflow"] = Field(
        description="Whose question it is: `code` is a cell's own (`input()`, a form), `server` an MCP server's."
    )
    server: str = Field(default="", description="The MCP server that asks, or that would be called.")
    tool: str = ""
    arguments: list[SubjectArgument] = Field(default_factory=list[SubjectArgument])
    more_arguments: int = Field(default=0, description="How many arguments are not listed.")
    code: list[SubjectLine] = Field(
        default_factory=list[SubjectLine],
        description="The code that wants to run; where it is long, the lines around what was found.",
    )
    code_lines: int = Field(default=0, description="How many lines the code has in all.")
    findings: list[SubjectFinding] = Field(default_factory=list[SubjectFinding])
    holds_for_session: bool = Field(
        default=False, description="Whether a yes holds for the rest of the session (`ask_once`)."
    )
    editable: str = Field(
        default="",
        description="The code, or the arguments as a JSON object, for a person to change before they allow it; empty "
        "where that cannot be done: it is long, or has personal data that is not shown.",
    )

    def with_texts(self, change: Callable[[str], str]) -> "QuestionSubject":
        """Return it with all texts of others changed, to hide personal data for example.

        Code is changed as one text, because what is to be hidden may go over several lines. Where that joins lines,
        the code is left out: its numbers and marks would be wrong, and the question's message has it.
        """
        code = change("\n".join(line.text for line in self.code)).split("\n") if self.code else []
        lines = [line.model_copy(update={"text": text}) for line, text in zip(self.code, code, strict=False)]
        return self.model_copy(
            update={
                # What is not whole cannot be changed: the rest of it would be lost.
                "editable": self.editable if change(self.editable) == self.editable else "",
                "server": change(self.server),
                "tool": change(self.tool),
                "arguments": [
                    SubjectArgument(name=change(one.name), value=change(one.value)) for one in self.arguments
                ],
                "code": lines if len(code) == len(self.code) else [],
                "findings": [
                    one.model_copy(update={"reason": change(one.reason), "what": change(one.what)})
                    for one in self.findings
                ],
            }
        )


# The question, as whoever asks has it


@dataclass(frozen=True)
class Question:
    """A question that only a person can answer: of a cell, of the policy, of an MCP server or of a workflow."""

    message: str
    schema: dict[str, Any] = field(default_factory=dict[str, Any])
    """A flat JSON Schema of the answer, as elicitation defines it; empty for plain consent."""
    url: str = ""
    """An address that the person should open instead of filling in a form."""
    is_ours: bool = False
    """Whether belljar and the session wrote the text, so that privacy tokens in it are real.

    What looks like a token in a server's text may be none.
    """
    is_password: bool = False
    """Whether the answer must not be shown while it is typed."""
    in_console: bool = False
    """Whether it is never put to the client, because a rule of the policy says so."""
    about: QuestionSubject | None = None
    """What it is about, for people who answer outside the client; the message says the same in words."""

    @property
    def whole_message(self) -> str:
        """Return the message with the address, for those who cannot open one."""
        return f"{self.message}\nOpen {self.url} first." if self.url else self.message

    def recordable(self, redact: Callable[[str], str]) -> "Question":
        """Return it as the inbox and the journal have it: without the personal data that `redact` replaces."""
        about = self.about.with_texts(redact) if self.about is not None else None
        return replace(self, message=redact(self.message), about=about)


@dataclass(frozen=True, slots=True)
class QuestionReply:
    """The person's reply. There are values only with `accept`."""

    action: Literal["accept", "decline", "cancel"]
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    by: str = ""
    """The person who gave it, where that is known."""
    edited: str = ""
    """The code or the arguments that the person allows instead of those that they were asked about."""
    said: str = ""
    """What the person tells the agent with it."""

    @property
    def words(self) -> str:
        """Return what the person tells the agent, as the end of a sentence about their answer."""
        who = self.by or "The person"
        return f". {who} says: {' '.join(self.said.split())}" if self.said else ""


Ask = Callable[[Question], Awaitable[QuestionReply]]
"""Asks the person who is responsible for the execution; the execution's time limit is paused meanwhile."""


# The question, as people see it who are asked


class InboxQuestion(Model):
    """A question as people see it."""

    id: str
    kind: Literal["execution", "workflow"] = "execution"
    owner: str
    session_id: str
    session_name: str = ""
    """What lists call its session."""
    execution_id: str = ""
    message: str
    fields: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """A JSON Schema of the answer; empty for plain consent."""
    is_password: bool = False
    in_console: bool = False
    about: QuestionSubject | None = Field(
        default=None, description="What the server knows about it; `message` says it in words."
    )
    state: QuestionState = "waiting"
    put_at: str
    expires_at: str | None = None
    ended_at: str | None = None
    answered_by: str = ""
    answered_in: str = ""
    chosen: str = Field(default="", description="What was chosen, or yes or no; what is typed is not kept.")
    edited: str = Field(
        default="", description="The code or the arguments that were allowed in place of those asked about."
    )
    said: str = Field(default="", description="What the person told the agent with the answer.")

    @property
    def title(self) -> str:
        """Return the question in one line. Its words are those of whoever asks, except for calls and code."""
        about = self.about
        if about is not None and about.tool:
            return f"May {about.server}.{about.tool} be called?"
        if about is not None and about.code:
            return "May this code run?"
        # Those of workflows have run and step before them.
        message = self.message.partition(": ")[2] if self.kind == "workflow" else self.message
        return message.strip().partition("\n")[0][:_MAX_TITLE_CHARS] or "A question without words"


def shown_fields(question: Question) -> dict[str, Any]:
    """Return what of a question people see, for an `InboxQuestion`: bounded, with visible controls."""
    return {
        "message": printable(question.whole_message)[:MAX_MESSAGE_CHARS],
        "fields": question.schema,
        "is_password": question.is_password,
        "in_console": question.in_console,
        "about": question.about.with_texts(printable) if question.about is not None else None,
    }
