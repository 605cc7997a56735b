"""Output events as the messages with which a Jupyter kernel publishes them. This module sends nothing."""

from collections.abc import Iterator
from typing import Any, Literal, cast

from belljar.models import ExecutionResult, OutputEvent
from belljar.outputs.events import ClearOutput, CommKind, CommMessage, DisplayData, Event, Notice, Raised, Stream
from belljar.outputs.forms import ReadDisplay, error_fields, mime_bundle
from belljar.outputs.notebook import BROKEN_OFF
from belljar.outputs.spoofed_notices import disarmed

OutputKind = (
    Literal["stream", "display_data", "update_display_data", "clear_output", "execute_result", "error"] | CommKind
)
Output = tuple[OutputKind, dict[str, Any]]


def output_of(event: OutputEvent, read_display: ReadDisplay, count: int) -> Output | None:
    """Return the message for an event; None for a question, which is sent another way. Reads files, so it may block."""
    match event.kind:
        case "stdout" | "stderr":
            return "stream", {"name": event.kind, "text": event.text}
        case "notice":
            return "stream", {"name": "stderr", "text": event.text}
        case "display":
            kind = "update_display_data" if event.data.get("update") else "display_data"
            return kind, {**_bundle(event, read_display), "transient": _transient(event)}
        case "result":
            return "execute_result", {**_bundle(event, read_display), "execution_count": count}
        case "error":
            return "error", _sendable(error_fields(event))
        case "clear":
            return "clear_output", {"wait": bool(event.data.get("wait"))}
        case "input":
            return None


def output_at_once(event: Event) -> Output | None:
    """Return the message for an event that goes to connected front ends only, and is not recorded."""
    match event:
        case Stream():
            return "stream", {"name": event.name, "text": disarmed(event.text)}
        case Notice():
            return "stream", {"name": "stderr", "text": event.line}
        case DisplayData():
            kind = "update_display_data" if event.update else "display_data"
            transient = {"display_id": event.display_id} if event.display_id else {}
            return kind, {"data": _sendable(event.data), "metadata": {}, "transient": transient}
        case Raised():
            return "error", _sendable({"ename": event.name, "evalue": event.message, "traceback": event.traceback})
        case ClearOutput():
            return "clear_output", {"wait": event.wait}
        case CommMessage():
            target = {"target_name": event.target} if event.kind == "comm_open" else {}
            return event.kind, _sendable({"comm_id": event.comm_id, "data": event.data, **target})
        case _:
            return None


def ending(result: ExecutionResult, *, has_error: bool) -> Iterator[Output]:
    """Yield what is left to publish of a cell that did not end by itself."""
    if result.status not in BROKEN_OFF:
        return
    cause = result.cause or result.error or result.status
    if has_error:
        yield "stream", {"name": "stderr", "text": Notice(cause).line}
    else:
        yield "error", {"ename": result.status, "evalue": cause, "traceback": [f"{result.status}: {cause}"]}


def _bundle(event: OutputEvent, read_display: ReadDisplay) -> dict[str, Any]:
    return {"data": _sendable(mime_bundle(event, read_display)), "metadata": {}}


def _sendable(value: Any) -> Any:
    """Replace lone surrogates, which cells may show and no message can carry. Values from the journal are not deep."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_sendable(key): _sendable(part) for key, part in cast("dict[str, Any]", value).items()}
        case list():
            return [_sendable(part) for part in cast("list[Any]", value)]
        case _:
            return value


def _transient(event: OutputEvent) -> dict[str, Any]:
    display_id = event.data.get("display_id")
    return {"display_id": display_id} if isinstance(display_id, str) else {}
