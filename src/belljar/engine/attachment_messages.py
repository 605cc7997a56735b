"""What an attached session can be asked, and the JSON messages of that: requests one way, replies and events the other.

Outputs have the content of Jupyter's messages of the same name. Both sides check the form of what they receive.
"""

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, Protocol

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter

from belljar.models import Model, Status
from belljar.outputs.events import CommMessage
from belljar.outputs.jupyter_messages import OutputKind

# Requests


class ExecuteRequest(Model):
    """Queue a cell."""

    op: Literal["execute"] = "execute"
    code: str
    allow_input: bool = False


class AnswerRequest(Model):
    """Answer a cell's question; None declines it."""

    op: Literal["answer"] = "answer"
    execution_id: str
    text: str | None
    question: int
    """The number of the question, so that a late answer is not taken for the answer to the next one."""


class CommRequest(Model):
    """Deliver a message to a widget. What comes of it is reported under `request_id`, until `CommHeard`."""

    op: Literal["comm"] = "comm"
    request_id: str = Field(max_length=200)
    comm: CommMessage


class CommsRequest(Model):
    """Ask which comms are open."""

    op: Literal["comms"] = "comms"


class InterruptMessage(Model):
    """Interrupt the running cell and the queued ones."""

    op: Literal["interrupt"] = "interrupt"


class CompleteRequest(Model):
    """Ask which names fit at the cursor."""

    op: Literal["complete"] = "complete"
    code: str
    cursor: int = Field(ge=0)


class InspectRequest(Model):
    """Ask what the name at the cursor is."""

    op: Literal["inspect"] = "inspect"
    code: str
    cursor: int = Field(ge=0)
    detail: int = 0


class CompletenessRequest(Model):
    """Ask whether code is a whole cell."""

    op: Literal["check"] = "check"
    code: str


Request = Annotated[
    ExecuteRequest
    | AnswerRequest
    | CommRequest
    | CommsRequest
    | InterruptMessage
    | CompleteRequest
    | InspectRequest
    | CompletenessRequest,
    Field(discriminator="op"),
]


# Replies


class DoneReply(Model):
    """The request was carried out."""

    kind: Literal["done"] = "done"


class QueuedReply(Model):
    """The cell is queued."""

    kind: Literal["queued"] = "queued"
    execution_id: str


class OpenedReply(Model):
    """The targets of the open comms by comm id; empty while a cell runs."""

    kind: Literal["opened"] = "opened"
    comms: dict[str, str]


class CompletionReply(Model):
    """The names that fit, and the span of the code that they replace."""

    kind: Literal["completed"] = "completed"
    matches: list[str]
    start: int
    end: int


class InspectionReply(Model):
    """The description of a name; empty for nothing."""

    kind: Literal["inspected"] = "inspected"
    data: dict[str, JsonValue]


class CompletenessReply(Model):
    """Whether code is a whole cell."""

    kind: Literal["checked"] = "checked"
    status: Literal["complete", "incomplete", "invalid", "unknown"]
    indent: str


Reply = Annotated[
    DoneReply | QueuedReply | OpenedReply | CompletionReply | InspectionReply | CompletenessReply,
    Field(discriminator="kind"),
]


# Events


class NewAttachment(Model):
    """What to attach to: a live session, or without its id a new one, which is the caller's and ends with `DELETE`."""

    session_id: str = ""
    environment: str = ""


class Attached(Model):
    """A session that is attached to."""

    attachment_id: str
    session_id: str
    environment: str
    python_version: str
    count: int
    """The number of its last cell."""


class ExecutionStarted(Model):
    """A cell begins; `count` is the number that its kernel will give it, unless the kernel is replaced first."""

    kind: Literal["begun"] = "begun"
    execution_id: str
    code: str
    count: int
    is_own: bool
    """Whether it was queued over this connection."""


class ExecutionOutput(Model):
    """An output of a cell, or a message of a widget; `output` is Jupyter's name of the message."""

    kind: Literal["said"] = "said"
    execution_id: str
    """The id of the execution, or of the `CommRequest` that caused it."""
    output: OutputKind
    content: dict[str, Any]
    metadata: dict[str, Any] = Field(default_factory=dict)
    buffers: list[str] = Field(default_factory=list)
    """The buffers of a comm message, in base64."""


class QuestionAsked(Model):
    """A cell that was queued over this connection waits for an answer."""

    kind: Literal["asks"] = "asks"
    execution_id: str
    prompt: str
    is_password: bool
    question: int
    """The number of the question, for the answer."""


class CommHeard(Model):
    """A widget has received the message of a `CommRequest`, and all that came of it was sent."""

    kind: Literal["heard"] = "heard"
    request_id: str


class ExecutionEnded(Model):
    """A cell has ended."""

    kind: Literal["ended"] = "ended"
    execution_id: str
    status: Status
    count: int


class SessionEnded(Model):
    """The session has ended."""

    kind: Literal["gone"] = "gone"


SessionEvent = ExecutionStarted | ExecutionOutput | QuestionAsked | CommHeard | ExecutionEnded | SessionEnded

# The validators are built when the first person attaches, as those of the models are.
_LATE = ConfigDict(defer_build=True)
request_form: TypeAdapter[Request] = TypeAdapter(Request, config=_LATE)
reply_form: TypeAdapter[Reply] = TypeAdapter(Reply, config=_LATE)
event_form: TypeAdapter[SessionEvent] = TypeAdapter(Annotated[SessionEvent, Field(discriminator="kind")], config=_LATE)


# The contract of an attached session, whether it is in this process or in another one


class AttachedSession(Protocol):
    """A session as a front end sees it. What the session refuses is raised as the error that it names."""

    session_id: str
    environment: str
    python_version: str
    """The version of the session's Python; empty while no kernel runs, and for Jupyter's kernels."""
    count: int
    """The number that the kernel gave to the last cell whose end was reported."""

    def events(self) -> AsyncGenerator[SessionEvent]:
        """Yield all that happens in the session, cell by cell and in order, until `SessionEnded`. Read by one task."""
        ...

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """Queue a cell and return its execution id; what becomes of it comes through `events`."""
        ...

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """Answer a question of a cell that was run from here; `question` is the number of the question."""
        ...

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """Deliver a message to a widget, under the session's turn; `events` has what comes of it, up to `CommHeard`."""
        ...

    async def comms(self) -> dict[str, str]:
        """Return the targets of the open comms by comm id; none while a cell runs."""
        ...

    async def interrupt(self) -> None:
        """Interrupt the running cell and the queued ones, whoever sent them."""
        ...

    async def complete(self, code: str, cursor: int) -> CompletionReply:
        """Return the names that fit at the cursor; none while a cell runs."""
        ...

    async def inspect(self, code: str, cursor: int, detail: int = 0) -> InspectionReply:
        """Describe the name at the cursor; return nothing while a cell runs."""
        ...

    async def check(self, code: str) -> CompletenessReply:
        """Return whether code is a whole cell; unknown while a cell runs."""
        ...

    async def aclose(self) -> None:
        """Detach from the session, which goes on; may be called twice."""
        ...
