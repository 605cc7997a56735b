"""How a cell ended, as a shell understands it: an exit status, and a last line for the person."""

from belljar.models import ExecutionResult

INTERRUPTED = 130
_STATUSES = {"ok": 0, "error": 1, "timeout": 124, "interrupted": INTERRUPTED, "died": 137, "out_of_memory": 137}
_SYSTEM_EXIT = "SystemExit"


def exit_status(result: ExecutionResult) -> int:
    """The status a shell would see, had it run the code itself."""
    argument = exit_argument(result.error) if result.status == "error" else None
    if argument is not None and argument.removeprefix("-").isdecimal():
        return int(argument) & 0xFF
    return _STATUSES.get(result.status, 1)


def exit_argument(error: str | None) -> str | None:
    """What the code gave to `sys.exit`, as text; None for any other error."""
    name, _, argument = (error or "").partition(": ")
    return argument if name == _SYSTEM_EXIT else None


def last_line(result: ExecutionResult) -> str:
    """What is left to say when the output is over; empty when that has said it all."""
    match result.status:
        case "error":
            argument = exit_argument(result.error) or ""
            return "" if argument.removeprefix("-").isdecimal() else argument
        case "timeout":
            return f"error: stopped after {result.usage.wall_s:.1f} s, its time limit"
        case "interrupted":
            return "interrupted"
        case "died" | "out_of_memory":
            return f"error: {result.cause or result.error}"
        case _:
            return ""
