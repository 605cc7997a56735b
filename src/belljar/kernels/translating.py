"""Messages of a runner as events of a cell."""

import re

from belljar.kernels import frames
from belljar.outputs.events import ClearOutput, DisplayData, Event, ExecuteResult, Finished, InputRequest, Raised

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def event_of(message: frames.Message) -> Event | None:
    """The event; None for what is none. The peak of memory is left for whoever measures it."""
    match message:
        case frames.Display():
            return DisplayData(message.data, message.display_id, message.update)
        case frames.Clear():
            return ClearOutput(message.wait)
        case frames.Result():
            return ExecuteResult(message.data)
        case frames.Error():
            lines = [plain_text(line) for line in message.traceback]
            return Raised(message.name, plain_text(message.message), lines)
        case frames.Input():
            return InputRequest(message.prompt, message.is_password)
        case frames.Done():
            variables = tuple(message.variables)
            return Finished(message.is_ok, message.execution_count, message.cpu_s, variables=variables)
        case _:
            return None


def plain_text(text: str) -> str:
    """Without ANSI codes: tracebacks are for models and pages, not for terminals."""
    return _ANSI.sub("", text) if "\x1b" in text else text
