"""A plugin for belljar: keep the hooks that you need, and remove the rest. `belljar.hooks` describes each.

`def` runs in a thread and `async def` on the server's event loop. This is code of the server, with all its rights:
what a session or a model says is hostile here.
"""

import logging

from belljar.hooks import CallEnd, CellFacts, ToolCallFacts, Verdict, hookimpl

log = logging.getLogger(__name__)


@hookimpl
def judge_tool_call(call: ToolCallFacts) -> Verdict | None:
    """Decide on a tool call: None has no say, `deny` refuses with a reason, `ask` asks the person."""
    if call.tool.startswith("delete_") and call.arguments.get("recursive"):
        return Verdict("deny", "nothing is deleted with all that is below it")
    return None


@hookimpl
def judge_code(cell: CellFacts) -> Verdict | None:
    """Decide on a cell before it runs."""
    return Verdict("warn", "that is a long cell") if len(cell.code) > 100_000 else None


@hookimpl
def after_tool_call(call: ToolCallFacts, end: CallEnd) -> None:
    """Look at how a call ended."""
    log.info("%s.%s %s after %.3f s", call.server, call.tool, end.state, end.duration_s)
