"""What is said between a session and the people who share it, as JSON: requests one way, replies and news the other.

Outputs have the content of Jupyter's messages of the same name. Neither side trusts the other's form.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter

from belljar.models import Model, Status
from belljar.outputs.events import CommMessage
from belljar.outputs.jupyter_messages import OutputKind

# Requests


class SessionsRequest(Model):
    """The first word: a list of all sessions, whose form is in `control.py`; the server hangs up after it."""

    op: Literal["sessions"] = "sessions"


class AttachRequest(Model):
    """The first word: which session."""

    op: Literal["attach"] = "attach"
    session_id: str


class OpenRequest(Model):
    """The first word: a new session, of whoever says it."""

    op: Literal["open"] = "open"
    environment: str = ""


class EndRequest(Model):
    """End the session that this connection opened; nothing of it stays."""

    op: Literal["end"] = "end"


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
    """Which one, by its number: the answer to one that is over is none to the next."""


class CommRequest(Model):
    """Hand a word to a widget; what comes of it is in the news, under `request_id`, until it is heard."""

    op: Literal["comm"] = "comm"
    request_id: str = Field(max_length=200)
    comm: CommMessage


class CommsRequest(Model):
    """Which comms are open."""

    op: Literal["comms"] = "comms"


class InterruptRequest(Model):
    """Stop what runs and what waits."""

    op: Literal["interrupt"] = "interrupt"


class CompleteRequest(Model):
    """Which names fit at the cursor."""

    op: Literal["complete"] = "complete"
    code: str
    cursor: int = Field(ge=0)


class InspectRequest(Model):
    """What the name at the cursor is."""

    op: Literal["inspect"] = "inspect"
    code: str
    cursor: int = Field(ge=0)
    detail: int = 0


class CompletenessRequest(Model):
    """Whether code is a whole cell."""

    op: Literal["check"] = "check"
    code: str


Request = Annotated[
    ExecuteRequest
    | EndRequest
    | AnswerRequest
    | CommRequest
    | CommsRequest
    | InterruptRequest
    | CompleteRequest
    | InspectRequest
    | CompletenessRequest,
    Field(discriminator="op"),
]


class NumberedRequest(Model):
    """A request, and the number its reply will have."""

    number: int
    request: Request


# Replies


class DoneReply(Model):
    """It was done."""

    kind: Literal["done"] = "done"


class QueuedReply(Model):
    """A cell waits for its turn."""

    kind: Literal["queued"] = "queued"
    execution_id: str


class OpenedReply(Model):
    """The targets of comms, by their ids; empty while a cell runs."""

    kind: Literal["opened"] = "opened"
    comms: dict[str, str]


class CompletionReply(Model):
    """Names that fit, and the span they replace."""

    kind: Literal["completed"] = "completed"
    matches: list[str]
    start: int
    end: int


class InspectionReply(Model):
    """What a name is; empty for nothing."""

    kind: Literal["inspected"] = "inspected"
    data: dict[str, JsonValue]


class CompletenessReply(Model):
    """Whether code is a whole cell."""

    kind: Literal["checked"] = "checked"
    status: Literal["complete", "incomplete", "invalid", "unknown"]
    indent: str


class RefusedReply(Model):
    """An error: `told` is its code and its message."""

    kind: Literal["refused"] = "refused"
    told: str
    hint: str = ""


Reply = Annotated[
    DoneReply | QueuedReply | OpenedReply | CompletionReply | InspectionReply | CompletenessReply | RefusedReply,
    Field(discriminator="kind"),
]


class NumberedReply(Model):
    """The reply to the request of that number."""

    kind: Literal["replied"] = "replied"
    number: int
    reply: Reply


# News


class AttachedMessage(Model):
    """The session is there."""

    kind: Literal["welcome"] = "welcome"
    session_id: str
    environment: str
    python_version: str
    count: int
    """Of its last cell."""


class ExecutionStarted(Model):
    """A cell's turn has come; `count` is what its kernel will number it with, unless it starts anew."""

    kind: Literal["begun"] = "begun"
    execution_id: str
    code: str
    count: int
    is_own: bool
    """Whether it was queued by whoever reads this."""


class ExecutionOutput(Model):
    """An output, or a widget's word, as Jupyter names it."""

    kind: Literal["said"] = "said"
    execution_id: str
    """Or the id of a request that is being heard."""
    output: OutputKind
    content: dict[str, Any]
    metadata: dict[str, Any] = Field(default_factory=dict)
    buffers: list[str] = Field(default_factory=list)
    """Of a comm's message, in base64."""


class QuestionAsked(Model):
    """A cell of the reader's own waits for an answer."""

    kind: Literal["asks"] = "asks"
    execution_id: str
    prompt: str
    is_password: bool
    question: int
    """Its number, for the answer."""


class CommHeard(Model):
    """A widget has had its word, and all that came of it was told."""

    kind: Literal["heard"] = "heard"
    request_id: str


class ExecutionEnded(Model):
    """A cell is over."""

    kind: Literal["ended"] = "ended"
    execution_id: str
    status: Status
    count: int


class SessionEnded(Model):
    """The session has ended."""

    kind: Literal["gone"] = "gone"


SessionEvent = ExecutionStarted | ExecutionOutput | QuestionAsked | CommHeard | ExecutionEnded | SessionEnded
ToClient = Annotated[
    AttachedMessage
    | RefusedReply
    | NumberedReply
    | ExecutionStarted
    | ExecutionOutput
    | QuestionAsked
    | CommHeard
    | ExecutionEnded
    | SessionEnded,
    Field(discriminator="kind"),
]

# Made ready when the first person attaches, as the models are.
_LATE = ConfigDict(defer_build=True)
first: TypeAdapter[SessionsRequest | AttachRequest | OpenRequest] = TypeAdapter(
    Annotated[SessionsRequest | AttachRequest | OpenRequest, Field(discriminator="op")], config=_LATE
)
numbered: TypeAdapter[NumberedRequest] = TypeAdapter(NumberedRequest)
to_client: TypeAdapter[ToClient] = TypeAdapter(ToClient, config=_LATE)
