"""The errors that a tool call or an import of a server raises in the session's code."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

_MAX_LISTED = 20


class ToolError(Exception):
    """A call failed: which tool of which server, why, and which parameters the tool takes."""

    def __init__(self, message: str, server: str = "", tool: str = "", parameters: list[str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.server = server
        self.tool = tool
        self.parameters = list(parameters or ())

    def __str__(self) -> str:
        text = f"{self.server}.{self.tool}: {self.message}" if self.tool else self.message
        return f"{text}\nIt takes: {', '.join(self.parameters)}" if self.parameters else text

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.server, self.tool, self.parameters)


class ArgumentError(ToolError, TypeError):
    """The call was not made, because its arguments do not fit the tool's parameters."""


class ToolMissing(ToolError, ImportError):
    """There is no such server or tool, or the server was never reached."""


class ToolRefused(ToolError):
    """The policy or the user refused the call."""


def error_from(answer: dict[str, Any]) -> ToolError:
    """Return the error that the host's answer describes."""
    kinds: dict[str, type[ToolError]] = {
        "arguments": ArgumentError,
        "refused": ToolRefused,
        "unknown": ToolMissing,
    }
    kind = kinds.get(str(answer.get("kind")), ToolError)
    return kind(
        str(answer.get("message", "")),
        str(answer.get("server", "")),
        str(answer.get("tool", "")),
        [str(each) for each in answer.get("parameters", ())],
    )


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown name: the known name most like it, or all known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        return f": did you mean {near[0]!r}?"
    more = f" and {len(known) - _MAX_LISTED:,} more" if len(known) > _MAX_LISTED else ""
    return f": there is {', '.join(map(repr, list(known)[:_MAX_LISTED]))}{more}" if known else ""
