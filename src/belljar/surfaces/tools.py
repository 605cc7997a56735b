"""What the tools of all surfaces share: how they are added, which arguments recur, how refusals become results."""

import inspect
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import wraps
from typing import Annotated, Any, ParamSpec

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, InputRequiredResult, ToolAnnotations
from pydantic import Field

from belljar.errors import BelljarError, InvalidArgument, out_of_descriptors
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session
from belljar.surfaces.auth import current_principal
from belljar.surfaces.content import error_blocks
from belljar.surfaces.request_tracing import note_refusal

SessionId = str
OptionalSession = Annotated[str, Field(description="Empty starts a new one")]
FileName = Annotated[str, Field(description="Path in the session folder")]

READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
ENDS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
REPLACES = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=True)
"""Annotations of tools that bring something from elsewhere, which replaces what has the same name."""

STAGE_CHARS = 200
_SHOWN_NAMES = 5
_NAME_CHARS = 64
P = ParamSpec("P")
Answer = CallToolResult | InputRequiredResult
Ctx = Context[Any, Any]
Tool = Callable[..., Coroutine[Any, Any, Answer]]


def add_tools(server: MCPServer[Any], *tools: tuple[Tool, ToolAnnotations]) -> None:
    """Add tools that build their own answers and so have no output schema; see `content.py`."""
    for tool, annotations in tools:
        description = inspect.cleandoc(tool.__doc__ or "")  # the indentation of our source costs tokens
        name = tool.__name__.partition("_with_")[0]  # a variant for servers that can do more has the same name
        server.add_tool(tool, name=name, description=description, annotations=annotations, structured_output=False)


def idempotent(hints: ToolAnnotations) -> ToolAnnotations:
    """Return the hints of a tool that changes nothing more when the same call is made again."""
    return hints.model_copy(update={"idempotent_hint": True})


def stage_reporter(ctx: Ctx) -> Callable[[str], Awaitable[None]]:
    """Return a callback that tells the client what a long call is busy with."""
    counted = itertools.count(1)

    async def report(stage: str) -> None:
        await ctx.report_progress(next(counted), None, stage[:STAGE_CHARS])

    return report


def refusals_as_results(tool: Callable[P, Coroutine[Any, Any, Answer]]) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """Wrap a tool: our own errors become results that a model can read, because they are refusals and not crashes."""

    @wraps(tool)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return await tool(*args, **kwargs)
        except BelljarError as error:
            note_refusal(error)
            return error_blocks(error)
        except Exception as error:
            if (named := out_of_descriptors(error)) is None:
                raise
            note_refusal(named)
            return error_blocks(named)

    return answered


def connection_of(ctx: Ctx) -> tuple[str, str]:
    """Return the caller and its connection; the connection is empty where the protocol has none."""
    return current_principal(), (ctx.headers or {}).get("mcp-session-id", "")


NO_SESSION = ("", "0")
"""Session ids that stand for a new session."""


async def find_or_create_session(sessions: Registry, session_id: str) -> Session:
    """Return the caller's session; an empty id (or "0", which older clients send) makes a new one."""
    if session_id in NO_SESSION:
        await sessions.make_room(current_principal())
        return sessions.create(current_principal())
    return await sessions.reach(session_id, current_principal())


def known_arguments(tool: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without the nulls that stand for a default; raise InvalidArgument for unknown ones."""
    known: Mapping[str, Any] = schema.get("properties", {})
    if unknown := [name for name in arguments if name not in known]:
        named = ", ".join(repr(name[:_NAME_CHARS]) for name in unknown[:_SHOWN_NAMES])
        raise InvalidArgument(f"{tool} has no argument {named}", hint=f"It takes {', '.join(known) or 'none'}")
    required = schema.get("required", ())
    return {name: value for name, value in arguments.items() if value is not None or name in required}
