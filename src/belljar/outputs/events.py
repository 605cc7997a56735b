"""The events that a kernel reports while a cell runs, in order. Kernels make them, executions consume them."""

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from belljar.outputs.forms import form_of

VALUE = "application/vnd.belljar.value+json"
"""The form of a result that has its value as JSON: `{"value": …}`, or `{"size": …}` where that would be too large."""
MimeBundle = dict[str, JsonValue]
CommKind = Literal["comm_open", "comm_msg", "comm_close"]


@dataclass(frozen=True, slots=True)
class Stream:
    """Text that the cell wrote to one of the two streams."""

    name: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class DisplayData:
    """A rich output; with `update`, it replaces those with the same id. Binary values are base64."""

    data: MimeBundle
    display_id: str | None = None
    update: bool = False


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """A request to forget the output so far; with `wait`, only when the next one comes."""

    wait: bool = False
    in_widget: bool = False
    """Whether it clears only what a widget shows inside itself; the record does not say which output that is."""


@dataclass(frozen=True, slots=True)
class ExecuteResult:
    """The value of the last expression."""

    data: MimeBundle


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception that a cell raised; `traceback` has no ANSI codes."""

    name: str
    message: str
    traceback: list[str]


@dataclass(frozen=True, slots=True)
class InputRequest:
    """A call of `input()` in the cell: the consumer must call `Kernel.reply_input`."""

    prompt: str
    is_password: bool = False
    form: MimeBundle | None = None
    """A flat JSON Schema, where the module `forms` asks; it is answered with the values as JSON."""


@dataclass(frozen=True, slots=True)
class CommMessage:
    """A message from a widget to its views in front ends, or from a view to its widget; `buffers` are base64."""

    kind: CommKind
    comm_id: str
    data: MimeBundle
    target: str = ""
    """Of `comm_open`: Jupyter's `target_name`, the kind of peer that the comm is opened for."""
    metadata: MimeBundle = field(default_factory=MimeBundle)
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the cell; always the last event of a kernel that lives."""

    is_ok: bool
    execution_count: int
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0
    variables: tuple[str, ...] = ()
    """Names of the variables that the session has now, the first 200: they are lost if the process dies."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Words of belljar's own about the output. Screens make them; no kernel does."""

    text: str

    @property
    def line(self) -> str:
        """Return it as it stands among the output: one line, whatever the names that it quotes contain."""
        return f"[belljar: {' '.join(self.text.splitlines())}]\n"


Event = Stream | DisplayData | ClearOutput | ExecuteResult | Raised | InputRequest | CommMessage | Finished | Notice


# The text in a bundle


def with_clean_text(bundle: MimeBundle, clean: Callable[[JsonValue], JsonValue]) -> MimeBundle:
    """Return a bundle whose texts, media types included, have been passed through `clean`."""
    return {str(clean(mime)): _with_clean_text(mime, value, clean) for mime, value in bundle.items()}


def _with_clean_text(mime: str, value: JsonValue, clean: Callable[[JsonValue], JsonValue]) -> JsonValue:
    """Return one form. Code can give any text a binary type, so bytes that are text are cleaned too."""
    if not form_of(mime).is_binary or not isinstance(value, str):
        return clean(value)
    try:
        text = base64.b64decode("".join(value.split()), validate=True).decode()
    except UnicodeDecodeError:
        return value
    except ValueError:  # no base64, and so shown as text
        return clean(value)
    cleaned = str(clean(text))
    return value if cleaned == text else base64.b64encode(cleaned.encode(errors="replace")).decode()
