"""What the tools of all surfaces share: how they are added, which arguments recur, how refusals become results.

Every request is recorded for operators by middleware: a span, its time in a histogram, and ids for log lines. It
replaces the SDK's own span, which would hold the text of errors: names of files, for instance.

What is wrong with arguments is said in our own words. The SDK validates them with pydantic, whose text names classes of
ours and a web page. A model needs the name of the argument, the value it sent, and what the argument must be.
"""

import inspect
import itertools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Annotated, Any, Final, ParamSpec, cast

from mcp.server._otel import OpenTelemetryMiddleware
from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, InputRequiredResult, ToolAnnotations
from pydantic import Field, ValidationError
from starlette.requests import Request

from belljar import logs, metrics, tracing
from belljar.engine.contract import Access
from belljar.engine.models import ProgressStep
from belljar.errors import BelljarError, Busy, EngineError, InvalidArgument, out_of_descriptors
from belljar.http.auth import current_principal
from belljar.mcp.content import error_blocks

SessionId = str
OptionalSession = Annotated[str, Field(description="Empty starts a new one")]
FileName = Annotated[str, Field(description="Path there")]

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
_CALL: Final = "tools/call"
_UNKNOWN: Final = "unknown"
Schema = Mapping[str, Any]

_SHOWN_ARGUMENTS: Final = 5
_SHOWN_CHARS: Final = 64
_KINDS: Final = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
# The least and the greatest value of a schema, and the words for both, for the first and for the second alone.
_BOUNDS: Final = (
    ("minimum", "maximum", "from {0} to {1}", "of at least {0}", "of at most {1}"),
    ("exclusiveMinimum", "exclusiveMaximum", "above {0} and below {1}", "above {0}", "below {1}"),
    ("minLength", "maxLength", "of {0} to {1} characters", "of at least {0} characters", "of at most {1} characters"),
    ("minItems", "maxItems", "of {0} to {1} items", "of at least {0} items", "of at most {1} items"),
)


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


def current_client() -> Access:
    """Return who made the current request, for the engine."""
    return Access(current_principal(), via="client")


async def last_step(steps: AsyncGenerator[ProgressStep], report: Callable[[str], Awaitable[None]]) -> ProgressStep:
    """Report the stages of what takes long, and return the step that says what came of it."""
    async with aclosing(steps) as told:
        async for step in told:
            if step.kind == "done":
                return step
            await report(step.text)
    raise EngineError("the work ended without telling what came of it")


def connection_of(ctx: Ctx) -> tuple[str, str]:
    """Return the caller and its connection; the connection is empty where the protocol has none."""
    return current_principal(), (ctx.headers or {}).get("mcp-session-id", "")


NO_SESSION = ("", "0")
"""Session ids that stand for a new session."""


def known_arguments(tool: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without the nulls that stand for a default; raise InvalidArgument for unknown ones."""
    known: Mapping[str, Any] = schema.get("properties", {})
    if unknown := [name for name in arguments if name not in known]:
        named = ", ".join(repr(name[:_NAME_CHARS]) for name in unknown[:_SHOWN_NAMES])
        raise InvalidArgument(f"{tool} has no argument {named}", hint=f"It takes {', '.join(known) or 'none'}")
    required = schema.get("required", ())
    return {name: value for name, value in arguments.items() if value is not None or name in required}


class RequestTracing(ServerMiddleware[Any]):
    """Middleware around each request to a server with these tools."""

    def __init__(self, tools: frozenset[str]) -> None:
        self._tools = tools

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Pass the request on, and record how it ended."""
        if ctx.request_id is None:  # a notification
            return await call_next(ctx)
        tool = self._tool(ctx)
        began_at = time.perf_counter()
        outcome = "error"
        with logs.about(principal=current_principal()), tracing.request_span(ctx.method, tool, _carriers(ctx)) as span:
            try:
                answer = await call_next(ctx)
                if _is_error(answer):
                    tracing.fail_if_unset(span, "tool_error")
                else:
                    outcome = "ok"
                return answer
            finally:
                if tool is not None:
                    metrics.tool_calls.observe(time.perf_counter() - began_at, tool, outcome)

    def _tool(self, ctx: ServerRequestContext[Any, Any]) -> str | None:
        """Return the tool that is called, or `_UNKNOWN`: names that a caller makes up are not recorded."""
        if ctx.method != _CALL:
            return None
        name = ctx.params.get("name") if ctx.params else None
        return name if name in self._tools else _UNKNOWN


def _is_error(answer: HandlerResult) -> bool:
    """Return whether a tool refused or failed; by now answers have the form in which they are sent."""
    return isinstance(answer, dict) and answer.get("isError") is True


def in_place_of_sdk_spans(middleware: list[ServerMiddleware[Any]], calls: RequestTracing) -> None:
    """Replace the SDK's tracing middleware by ours, as the outermost."""
    middleware[:] = [calls, *(each for each in middleware if not isinstance(each, OpenTelemetryMiddleware))]


def _carriers(ctx: ServerRequestContext[Any, Any]) -> tuple[Mapping[str, object], ...]:
    """Return where a caller's trace may be: in the message, which is nearer to the call, or in the HTTP headers."""
    meta = cast("Mapping[str, object]", ctx.meta or {})
    request: object = ctx.request
    return (meta, cast("Request[Any]", request).headers) if isinstance(request, Request) else (meta,)


def note_refusal(error: BelljarError) -> None:
    """Record that the current request is refused."""
    tracing.note_failure(error.code)
    if isinstance(error, Busy):
        metrics.refusals.add("admission")


def wrong_arguments(tool: str, schema: Schema, arguments: Mapping[str, Any], error: ValidationError) -> InvalidArgument:
    """Return what is wrong with the arguments that the SDK refused, and what they must be."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    names = [*dict.fromkeys(str(fault["loc"][0]) for fault in faults if fault["loc"])]
    missing = [name for name in names if name not in arguments]
    wrong = [f"{name}={_shown(arguments[name])}" for name in names if name in arguments][:_SHOWN_ARGUMENTS]
    facts = [f"{tool} needs {_listed(missing)}"] if missing else []
    facts += [f"{tool} cannot take {', '.join(wrong)}"] if wrong else []
    hint = "; ".join(_described(name, schema) for name in names[:_SHOWN_ARGUMENTS])
    return InvalidArgument("; ".join(facts) or f"{tool} cannot take these arguments", hint=hint)


def _described(name: str, schema: Schema) -> str:
    about = _property(schema, name)
    description = str(about.get("description", ""))
    return f"`{name}` must be {_expected(about, schema)}{description and f' ({description})'}"


def _property(schema: Schema, name: str) -> Schema:
    return schema.get("properties", {}).get(name, {})


def _expected(about: Schema, schema: Schema) -> str:
    """Return in words what a JSON schema asks for, as far as the schemas of our tools go."""
    if reference := str(about.get("$ref", "")):
        return _expected(schema.get("$defs", {}).get(reference.rpartition("/")[2], {}), schema)
    if "enum" in about or "const" in about:
        return "one of " + ", ".join(_shown(choice) for choice in about.get("enum", [about.get("const")]))
    if choices := cast("list[Schema]", about.get("anyOf", [])):
        return " or ".join(_expected(choice, schema) for choice in choices if choice.get("type") != "null")
    items = f", each {_expected(about['items'], schema)}" if about.get("items") else ""
    return f"{' '.join(_type_and_bounds(about))}{items}"


def _type_and_bounds(about: Schema) -> Iterator[str]:
    yield _KINDS.get(str(about.get("type")), "a value")
    for least, most, both, only_least, only_most in _BOUNDS:
        limits = [f"{about[key]:,g}" if key in about else "" for key in (least, most)]
        if any(limits):
            yield (both if all(limits) else only_least if limits[0] else only_most).format(*limits)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text):,} characters)"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_ARGUMENTS} more" if len(names) > _SHOWN_ARGUMENTS else ""
    kind = "the argument" if len(names) == 1 else "the arguments"
    return f"{kind} {', '.join(f'`{name}`' for name in names[:_SHOWN_ARGUMENTS])}{more}"
