"""The messages of a runner: one model for each kind, their translation into events, and the order they may come in.

A runner's JSON is checked against its model before anyone sees it, because the session's code can write to the same
socket. Does not know how messages travel, which is `wire.py`'s.
"""

import base64
import json
import re
from collections import deque
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from belljar.errors import KernelDied
from belljar.json_values import MAX_VALUES, has_too_many_values
from belljar.kernels.variables import MAX_LOOK_BYTES, TablePage, VariableListing
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
from belljar.questions.schema import schema_problem


class RunnerMessage(BaseModel):
    """What every message has: the id of the request it is about, and whether the runner waits for an `ack`."""

    # Validation goes through the union `Message`, which is built once, so the single models need not be built.
    model_config = ConfigDict(defer_build=True)

    id: JsonValue = None
    ack: bool = False


class ReadyMessage(RunnerMessage):
    """The runner has attached."""

    type: Literal["ready"]
    python: str


class SyncMessage(RunnerMessage):
    """Carries nothing: it marks a point in the order of the streams."""

    type: Literal["sync"]


class DisplayMessage(RunnerMessage):
    """A rich output or an update of one."""

    type: Literal["display"]
    data: dict[str, JsonValue]
    display_id: str | None = None
    update: bool = False


class ClearMessage(RunnerMessage):
    """The front end is to clear the output."""

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


# A form that a cell puts to a person is no larger than people fill in.
MAX_FORM_CHARS = 50_000


def checked_form(form: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the form; ValueError for one that a client could not show, or that is too large."""
    if len(json.dumps(form)) > MAX_FORM_CHARS:
        raise ValueError("the form is too large")
    if problem := schema_problem(form):
        raise ValueError(problem)
    if form.keys() != {"type", "properties"} | (form.keys() & {"required"}):
        raise ValueError("the form has more than fields")
    return form


class InputMessage(RunnerMessage):
    """The cell waits for input from a person."""

    type: Literal["input"]
    prompt: str
    is_password: bool
    form: Annotated[dict[str, JsonValue], AfterValidator(checked_form)] | None = None


def _checked_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


class CommMessageIn(RunnerMessage):
    """A widget's comm message to its views."""

    type: Literal["comm"]
    kind: CommKind
    comm_id: Annotated[str, Field(max_length=200)]
    target: Annotated[str, Field(max_length=200)] = ""
    data: dict[str, JsonValue]
    metadata: dict[str, JsonValue] = {}
    buffers: list[Annotated[str, AfterValidator(_checked_base64)]] = Field(default=[], max_length=1_000)


class CommsMessage(RunnerMessage):
    """Answer to the question which comms are open: their targets by comm id."""

    type: Literal["comms"]
    opened: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=200)]] = Field(
        max_length=10_000
    )


class DoneMessage(RunnerMessage):
    """The cell has ended."""

    type: Literal["finished"]
    is_ok: bool
    execution_count: int = Field(ge=0, lt=2**63)
    cpu_s: float = Field(ge=0, allow_inf_nan=False)
    variables: list[Annotated[str, Field(max_length=1_000)]] = Field(default=[], max_length=200)


class ResumedMessage(RunnerMessage):
    """Answer to the `attend` of a server that takes over: what the runner waits for, or how its last cell ended."""

    type: Literal["resumed"]
    awaits: Literal["", "ack", "input"] = ""
    prompt: str = ""
    is_password: bool = False
    form: Annotated[dict[str, JsonValue], AfterValidator(checked_form)] | None = None
    last: DoneMessage | None = None


class CompletedMessage(RunnerMessage):
    """Answer to a completion request."""

    type: Literal["completion"]
    matches: list[str] = Field(max_length=2_000)
    start: int = Field(ge=0, lt=2**63)
    end: int = Field(ge=0, lt=2**63)


class InspectedMessage(RunnerMessage):
    """Answer to a question about a name; empty when nothing is known of it."""

    type: Literal["inspection"]
    data: dict[str, JsonValue] = Field(max_length=20)


class CheckedMessage(RunnerMessage):
    """Answer to the question whether code is complete."""

    type: Literal["checked"]
    status: Literal["complete", "incomplete", "invalid"]
    indent: Annotated[str, Field(max_length=1_000)]


class VariablesMessage(VariableListing, RunnerMessage):
    """Answer to the question for variables."""

    type: Literal["variables"]


class RowsMessage(TablePage, RunnerMessage):
    """Answer to the question for rows of a variable."""

    type: Literal["rows"]


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
    """Answer to a request to fork, from the process that was forked."""

    type: Literal["forked"]
    lost: list[Annotated[str, Field(max_length=500)]] = Field(max_length=100)
    error: Annotated[str, Field(max_length=2_000)] = ""


class RehearsedMessage(RunnerMessage):
    """Answer to a request to rehearse, see `RehearsableKernel`."""

    type: Literal["rehearsed"]
    failure: Annotated[str, Field(max_length=2_000)] = ""


class WarmMessage(RunnerMessage):
    """A zygote has imported everything and is ready to be forked."""

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
    | VariablesMessage
    | RowsMessage
    | ImportedMessage
    | ForkedMessage
    | RehearsedMessage
    | WarmMessage
    | StateMessage
)
_message: TypeAdapter[Message] = TypeAdapter(
    Annotated[Message, Field(discriminator="type")], config=ConfigDict(defer_build=True)
)


def build_reader() -> None:
    """Build what reads messages, which takes 20 ms once in a server: as well while its first runner starts."""
    _message.rebuild()


def read_message(frame: bytes) -> Message:
    """Return the message in a frame; KernelDied for a malformed one, because its sender is not to be trusted."""
    if has_too_many_values(frame):
        raise KernelDied(f"the kernel sent a message of more than {MAX_VALUES:,} values")
    try:
        message = _message.validate_json(frame)
    except ValidationError as error:
        raise KernelDied(f"the kernel sent a malformed message ({error.error_count()} faults)") from error
    if isinstance(message, VariablesMessage | RowsMessage) and len(frame) > MAX_LOOK_BYTES:
        raise KernelDied(f"the kernel sent {len(frame):,} bytes about variables, over the limit of {MAX_LOOK_BYTES:,}")
    return message


# Messages of a runner as events of a cell

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def event_of(message: Message) -> Event | None:
    """Return the event for a message, or None if it stands for none. The caller adds the memory peak to `Finished`."""
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
            return InputRequest(message.prompt, message.is_password, message.form)
        case CommMessageIn():
            buffers = tuple(message.buffers)
            return CommMessage(message.kind, message.comm_id, message.data, message.target, message.metadata, buffers)
        case DoneMessage():
            variables = tuple(message.variables)
            return Finished(message.is_ok, message.execution_count, message.cpu_s, variables=variables)
        case _:
            return None


def plain_text(text: str) -> str:
    """Remove ANSI codes, because tracebacks are shown to models and on pages, not in terminals."""
    return _ANSI.sub("", text) if "\x1b" in text else text


# Which message may come when. The runner's process also runs the session's code, which can write to the same socket.
# A message that our runner never sends at that point was written by the session's code, so the connection is cut, as
# for a malformed message.

# Threads and tasks of earlier cells may send output at any time, under the number of their cell or under none.
_OUTPUT = (DisplayMessage, ClearMessage, ResultMessage, ErrorMessage, CommMessageIn)
_OF_A_CELL = (SyncMessage, InputMessage, DoneMessage)
# How many requests are remembered whose answer the host stopped waiting for, such as a name that took too long to
# inspect or a fork that took too long. Their answers may still come.
MAX_ABANDONED = 100


class TurnChecker:
    """Knows which request a runner works on, and refuses messages that do not answer it."""

    def __init__(self) -> None:
        self._request: int | None = None
        self._answer: type[RunnerMessage] | None = None
        self._may_ask = False
        self._abandoned: deque[int] = deque(maxlen=MAX_ABANDONED)

    def begin_cell(self, request: int, *, allow_input: bool) -> None:
        """Expect the messages of a cell, or of a comm message, which runs like a cell."""
        self._begin(request)
        self._may_ask = allow_input

    def begin_question(self, request: int, answer: type[RunnerMessage]) -> None:
        """Expect one answer of this kind to the request that is about to be sent."""
        self._begin(request)
        self._answer = answer

    def _begin(self, request: int) -> None:
        if self._request is not None:
            self._abandoned.append(self._request)
        self._request, self._answer, self._may_ask = request, None, False

    def check(self, message: Message) -> None:
        """Raise KernelDied for a message that is not due. The message that ends a request is accepted once."""
        if isinstance(message, _OUTPUT) or message.id in self._abandoned:
            return
        if message.id is None or message.id != self._request:
            raise KernelDied(f"the kernel sent the message {message.type!r}, which nobody had asked for")
        if self._answer is not None:
            # Saving variables and inspecting names run code of the session; `sync` keeps its output in order.
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
    """Raise KernelDied for a question that the execution does not allow, because a question stops its clock."""
    if isinstance(message, InputMessage) and not may_ask:
        raise KernelDied("the kernel asked for input, which this execution does not allow")
