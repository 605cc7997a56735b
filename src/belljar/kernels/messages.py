"""What a runner says: one model for each kind of message, against which its JSON is checked before anyone sees it.

Knows neither how messages travel, which is `frames.py`'s, nor what they mean to a cell, which is `translating.py`'s.
"""

import base64
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from belljar.errors import KernelDied
from belljar.outputs.events import CommKind


class Base(BaseModel):
    """What every message has: the request it is about, and whether its sender waits for a word that it was read."""

    # Checked as one of many, which is made ready once, not each for itself.
    model_config = ConfigDict(defer_build=True)

    id: JsonValue = None
    ack: bool = False


class Ready(Base):
    """The runner has attached."""

    type: Literal["ready"]
    python: str


class Sync(Base):
    """Nothing but the order of the streams."""

    type: Literal["sync"]


class Display(Base):
    """A rich output or an update of one."""

    type: Literal["display"]
    data: dict[str, JsonValue]
    display_id: str | None = None
    update: bool = False


class Clear(Base):
    """Forget the output."""

    type: Literal["clear"]
    wait: bool
    in_widget: bool = False


class Result(Base):
    """The last expression's value."""

    type: Literal["result"]
    data: dict[str, JsonValue]


class Error(Base):
    """The cell raised."""

    type: Literal["error"]
    name: str
    message: str
    traceback: list[str]


class Input(Base):
    """The cell waits for an answer."""

    type: Literal["input"]
    prompt: str
    is_password: bool


def _checked_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


class Comm(Base):
    """A widget's word to its views."""

    type: Literal["comm"]
    kind: CommKind
    comm_id: Annotated[str, Field(max_length=200)]
    target: Annotated[str, Field(max_length=200)] = ""
    data: dict[str, JsonValue]
    metadata: dict[str, JsonValue] = {}
    buffers: list[Annotated[str, AfterValidator(_checked_base64)]] = Field(default=[], max_length=1_000)


class Comms(Base):
    """Answer to the question which comms are open: their targets, by their ids."""

    type: Literal["comms"]
    opened: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=200)]] = Field(
        max_length=10_000
    )


class Done(Base):
    """The cell is over."""

    type: Literal["finished"]
    is_ok: bool
    execution_count: int = Field(ge=0, lt=2**63)
    cpu_s: float = Field(ge=0, allow_inf_nan=False)
    variables: list[Annotated[str, Field(max_length=1_000)]] = Field(default=[], max_length=200)


class Resumed(Base):
    """Answer to another server's first word: what the runner waits for, or how its last cell ended."""

    type: Literal["resumed"]
    awaits: Literal["", "ack", "input"] = ""
    prompt: str = ""
    is_password: bool = False
    last: Done | None = None


class Completed(Base):
    """Answer to a completion request."""

    type: Literal["completion"]
    matches: list[str] = Field(max_length=2_000)
    start: int = Field(ge=0, lt=2**63)
    end: int = Field(ge=0, lt=2**63)


class Inspected(Base):
    """Answer to a question about a name; empty when there is nothing to say."""

    type: Literal["inspection"]
    data: dict[str, JsonValue] = Field(max_length=20)


class Checked(Base):
    """Answer to the question whether code is complete."""

    type: Literal["checked"]
    status: Literal["complete", "incomplete", "invalid"]
    indent: Annotated[str, Field(max_length=1_000)]


class Imported(Base):
    """Answer to a request for imports."""

    type: Literal["imported"]
    loaded: list[str] = Field(max_length=2_000)
    errors: dict[str, Annotated[str, Field(max_length=2_000)]]


_Name = Annotated[str, Field(max_length=200)]


class State(Base):
    """Answer to a request to save variables or to load them."""

    type: Literal["state"]
    kept: list[_Name] = Field(max_length=10_000)
    lost: list[tuple[_Name, _Name, Annotated[str, Field(max_length=600)]]] = Field(max_length=1_000)
    size_bytes: int = Field(ge=0, lt=2**63)


class Forked(Base):
    """Answer to a request for a copy, from the process that was copied."""

    type: Literal["forked"]
    lost: list[Annotated[str, Field(max_length=500)]] = Field(max_length=100)
    error: Annotated[str, Field(max_length=2_000)] = ""


class Rehearsed(Base):
    """The first times are over."""

    type: Literal["rehearsed"]


class Warm(Base):
    """A zygote is ready to be copied."""

    type: Literal["warm"]
    failed: dict[str, Annotated[str, Field(max_length=2_000)]]
    threads: int


Message = (
    Ready
    | Sync
    | Display
    | Clear
    | Result
    | Error
    | Input
    | Comm
    | Comms
    | Done
    | Resumed
    | Completed
    | Inspected
    | Checked
    | Imported
    | Forked
    | Rehearsed
    | Warm
    | State
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
