"""What a kernel reports while a cell runs, in the order it happened. Kernels make them, executions consume them."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

MimeBundle = dict[str, JsonValue]
CommKind = Literal["comm_open", "comm_msg", "comm_close"]


@dataclass(frozen=True, slots=True)
class Stream:
    """Text on one of the two streams."""

    name: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class DisplayData:
    """A rich output; with `update`, it replaces the one with the same id. Binary values are base64."""

    data: MimeBundle
    display_id: str | None = None
    update: bool = False


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """Forget the output so far; with `wait`, only when the next one comes."""

    wait: bool = False
    in_widget: bool = False
    """Only what is shown inside a widget, which is not on record as inside."""


@dataclass(frozen=True, slots=True)
class ExecuteResult:
    """The value of the last expression."""

    data: MimeBundle


@dataclass(frozen=True, slots=True)
class Raised:
    """The cell raised; `traceback` has no ANSI codes."""

    name: str
    message: str
    traceback: list[str]


@dataclass(frozen=True, slots=True)
class InputRequest:
    """The cell called `input()`: the consumer must call `Kernel.reply_input`."""

    prompt: str
    is_password: bool = False


@dataclass(frozen=True, slots=True)
class CommMessage:
    """A widget's word to its views in front ends, or theirs to it; `buffers` are base64."""

    kind: CommKind
    comm_id: str
    data: MimeBundle
    target: str = ""
    """What kind of peer it opens one for."""
    metadata: MimeBundle = field(default_factory=MimeBundle)
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The cell is over; always the last event of a kernel that lives."""

    is_ok: bool
    execution_count: int
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0
    variables: tuple[str, ...] = ()
    """Names the session holds now, the first 200: what is lost if the process dies."""


Event = Stream | DisplayData | ClearOutput | ExecuteResult | Raised | InputRequest | CommMessage | Finished
