"""Messages of a runner as events of a cell."""

import re

from belljar.kernels import messages
from belljar.outputs.events import (
    ClearOutput,
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    Finished,
    InputRequest,
    Raised,
)

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def event_of(message: messages.Message) -> Event | None:
    """The event; None for what is none. The peak of memory is left for whoever measures it."""
    match message:
        case messages.Display():
            return DisplayData(message.data, message.display_id, message.update)
        case messages.Clear():
            return ClearOutput(message.wait, message.in_widget)
        case messages.Result():
            return ExecuteResult(message.data)
        case messages.Error():
            lines = [plain_text(line) for line in message.traceback]
            return Raised(message.name, plain_text(message.message), lines)
        case messages.Input():
            return InputRequest(message.prompt, message.is_password)
        case messages.Comm():
            buffers = tuple(message.buffers)
            return CommMessage(message.kind, message.comm_id, message.data, message.target, message.metadata, buffers)
        case messages.Done():
            variables = tuple(message.variables)
            return Finished(message.is_ok, message.execution_count, message.cpu_s, variables=variables)
        case _:
            return None


def plain_text(text: str) -> str:
    """Without ANSI codes: tracebacks are for models and pages, not for terminals."""
    return _ANSI.sub("", text) if "\x1b" in text else text
