"""What a runner says: one model for each kind of message, against which its JSON is checked before anyone sees it.

Knows neither how messages travel, which is `frames.py`'s, nor what they mean to a cell, which is `translating.py`'s.
"""

import base64
import re
from collections import deque
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from belljar.errors import KernelDied
from belljar.outputs.events import (
    ClearOutput,
    CommKind,
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    Finished,
    InputRequest,
    Raised,
)


class RunnerMessage(BaseModel):
    """What every message has: the request it is about, and whether its sender waits for a word that it was read."""

    # Checked as one of many, which is made ready once, not each for itself.
    model_config = ConfigDict(defer_build=True)

    id: JsonValue = None
    ack: bool = False


class ReadyMessage(RunnerMessage):
    """The runner has attached."""

    type: Literal["ready"]
    python: str


class SyncMessage(RunnerMessage):
    """Nothing but the order of the streams."""

    type: Literal["sync"]


class DisplayMessage(RunnerMessage):
    """A rich output or an update of one."""

    type: Literal["display"]
    data: dict[str, JsonValue]
    display_id: str | None = None
    update: bool = False


class ClearMessage(RunnerMessage):
    """Forget the output."""

    type: Literal["clear"]
    wait: bool
    in_widget: bool = False


class ResultMessage(RunnerMessage):
    """The last expression's value."""

    type: Literal["result"]
    data: dict[str, JsonValue]


class ErrorMessage(RunnerMessage):
    """The cell raised."""

    type: Literal["error"]
    name: str
    message: str
    traceback: list[str]


class InputMessage(RunnerMessage):
    """The cell waits for an answer."""

    type: Literal["input"]
    prompt: str
    is_password: bool


def _checked_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


class CommMessageIn(RunnerMessage):
    """A widget's word to its views."""

    type: Literal["comm"]
    kind: CommKind
    comm_id: Annotated[str, Field(max_length=200)]
    target: Annotated[str, Field(max_length=200)] = ""
    data: dict[str, JsonValue]
    metadata: dict[str, JsonValue] = {}
    buffers: list[Annotated[str, AfterValidator(_checked_base64)]] = Field(default=[], max_length=1_000)


class CommsMessage(RunnerMessage):
    """Answer to the question which comms are open: their targets, by their ids."""

    type: Literal["comms"]
    opened: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=200)]] = Field(
        max_length=10_000
    )


class DoneMessage(RunnerMessage):
    """The cell is over."""

    type: Literal["finished"]
    is_ok: bool
    execution_count: int = Field(ge=0, lt=2**63)
    cpu_s: float = Field(ge=0, allow_inf_nan=False)
    variables: list[Annotated[str, Field(max_length=1_000)]] = Field(default=[], max_length=200)


class ResumedMessage(RunnerMessage):
    """Answer to another server's first word: what the runner waits for, or how its last cell ended."""

    type: Literal["resumed"]
    awaits: Literal["", "ack", "input"] = ""
    prompt: str = ""
    is_password: bool = False
    last: DoneMessage | None = None


class CompletedMessage(RunnerMessage):
    """Answer to a completion request."""

    type: Literal["completion"]
    matches: list[str] = Field(max_length=2_000)
    start: int = Field(ge=0, lt=2**63)
    end: int = Field(ge=0, lt=2**63)


class InspectedMessage(RunnerMessage):
    """Answer to a question about a name; empty when there is nothing to say."""

    type: Literal["inspection"]
    data: dict[str, JsonValue] = Field(max_length=20)


class CheckedMessage(RunnerMessage):
    """Answer to the question whether code is complete."""

    type: Literal["checked"]
    status: Literal["complete", "incomplete", "invalid"]
    indent: Annotated[str, Field(max_length=1_000)]


class ImportedMessage(RunnerMessage):
    """Answer to a request for imports."""

    type: Literal["imported"]
    loaded: list[str] = Field(max_length=2_000)
    errors: dict[str, Annotated[str, Field(max_length=2_000)]]


_Name = Annotated[str, Field(max_length=200)]


class StateMessage(RunnerMessage):
    """Answer to a request to save variables or to load them."""

    type: Literal["state"]
    kept: list[_Name] = Field(max_length=10_000)
    lost: list[tuple[_Name, _Name, Annotated[str, Field(max_length=600)]]] = Field(max_length=1_000)
    size_bytes: int = Field(ge=0, lt=2**63)


class ForkedMessage(RunnerMessage):
    """Answer to a request for a copy, from the process that was copied."""

    type: Literal["forked"]
    lost: list[Annotated[str, Field(max_length=500)]] = Field(max_length=100)
    error: Annotated[str, Field(max_length=2_000)] = ""


class RehearsedMessage(RunnerMessage):
    """The first times are over."""

    type: Literal["rehearsed"]


class WarmMessage(RunnerMessage):
    """A zygote is ready to be copied."""

    type: Literal["warm"]
    failed: dict[str, Annotated[str, Field(max_length=2_000)]]
    threads: int


Message = (
    ReadyMessage
    | SyncMessage
    | DisplayMessage
    | ClearMessage
    | ResultMessage
    | ErrorMessage
    | InputMessage
    | CommMessageIn
    | CommsMessage
    | DoneMessage
    | ResumedMessage
    | CompletedMessage
    | InspectedMessage
    | CheckedMessage
    | ImportedMessage
    | ForkedMessage
    | RehearsedMessage
    | WarmMessage
    | StateMessage
)
_message: TypeAdapter[Message] = TypeAdapter(
    Annotated[Message, Field(discriminator="type")], config=ConfigDict(defer_build=True)
)


def read_message(frame: bytes) -> Message:
    """The message in a frame; KernelDied for what is none, because whoever sent it is not to be trusted."""
    try:
        return _message.validate_json(frame)
    except ValidationError as error:
        raise KernelDied(f"the kernel sent a malformed message ({error.error_count()} faults)") from error


# Messages of a runner as events of a cell.

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def event_of(message: Message) -> Event | None:
    """The event; None for what is none. The peak of memory is left for whoever measures it."""
    match message:
        case DisplayMessage():
            return DisplayData(message.data, message.display_id, message.update)
        case ClearMessage():
            return ClearOutput(message.wait, message.in_widget)
        case ResultMessage():
            return ExecuteResult(message.data)
        case ErrorMessage():
            lines = [plain_text(line) for line in message.traceback]
            return Raised(message.name, plain_text(message.message), lines)
        case InputMessage():
            return InputRequest(message.prompt, message.is_password)
        case CommMessageIn():
            buffers = tuple(message.buffers)
            return CommMessage(message.kind, message.comm_id, message.data, message.target, message.metadata, buffers)
        case DoneMessage():
            variables = tuple(message.variables)
            return Finished(message.is_ok, message.execution_count, message.cpu_s, variables=variables)
        case _:
            return None


def plain_text(text: str) -> str:
    """Without ANSI codes: tracebacks are for models and pages, not for terminals."""
    return _ANSI.sub("", text) if "\x1b" in text else text


# What a runner may say at which point. Its process also runs the session's code, which can write to the same socket.
# A message that no runner of ours sends at that point was written by the session's code: the peer is cut off, as it
# is for a message without form. Knows the requests by their numbers alone.

# Threads and tasks of earlier cells may show something at any time, under the number of their cell or of none.
_OUTPUT = (DisplayMessage, ClearMessage, ResultMessage, ErrorMessage, CommMessageIn)
_OF_A_CELL = (SyncMessage, InputMessage, DoneMessage)
# Requests that nobody waited for to the end: a name that took too long to look at, a copy that took too long to make.
MOST_ABANDONED = 100


class TurnChecker:
    """One runner's side of the talk, as far as the host has to know it."""

    def __init__(self) -> None:
        self._request: int | None = None
        self._answer: type[RunnerMessage] | None = None
        self._may_ask = False
        self._abandoned: deque[int] = deque(maxlen=MOST_ABANDONED)

    def begin_cell(self, request: int, *, allow_input: bool) -> None:
        """A cell is about to be sent, or a front end's word to a widget, which runs as one."""
        self._begin(request)
        self._may_ask = allow_input

    def begin_question(self, request: int, answer: type[RunnerMessage]) -> None:
        """A request is about to be sent, to which there is one answer."""
        self._begin(request)
        self._answer = answer

    def _begin(self, request: int) -> None:
        if self._request is not None:
            self._abandoned.append(self._request)
        self._request, self._answer, self._may_ask = request, None, False

    def check(self, message: Message) -> None:
        """Refuse a message that is not due: KernelDied. The one that ends a request is accepted once."""
        if isinstance(message, _OUTPUT) or message.id in self._abandoned:
            return
        if message.id is None or message.id != self._request:
            raise KernelDied(f"the kernel sent the message {message.type!r}, which nobody had asked for")
        if self._answer is not None:
            # Saving variables and looking at names runs code of the session's, whose output is kept in order.
            is_due = isinstance(message, (self._answer, SyncMessage))
        else:
            is_due = isinstance(message, _OF_A_CELL)
        check_question(message, may_ask=self._may_ask)
        if not is_due:
            raise KernelDied(f"the kernel sent the message {message.type!r}, which was not due")
        if isinstance(message, self._answer or DoneMessage):
            self._request = self._answer = None
            self._may_ask = False


def check_question(message: object, *, may_ask: bool) -> None:
    """Refuse a question of an execution that may have none: KernelDied. A question stops the clock."""
    if isinstance(message, InputMessage) and not may_ask:
        raise KernelDied("the kernel asked for input, which this execution does not allow")
