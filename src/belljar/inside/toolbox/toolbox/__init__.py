"""Tools of other servers, called from a session: `from servers.SERVER import TOOL`, or `toolbox.search("what for")`.

Runs in whatever Python the session has, 3.9 or later, on the standard library alone. Only the name of a server, the
name of a tool, and arguments leave the session; the host makes the call.
"""

from .errors import ArgumentError, ToolError, ToolMissing, ToolRefused
from .imports import connect, explain_imports, watch_cells
from .results import Answer, LargeResult, Media
from .tools import Found, Tool, get, search, tool

__all__ = [
    "Answer",
    "ArgumentError",
    "Found",
    "LargeResult",
    "Media",
    "Tool",
    "ToolError",
    "ToolMissing",
    "ToolRefused",
    "connect",
    "get",
    "search",
    "tool",
]

watch_cells()
explain_imports()
