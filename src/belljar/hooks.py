"""The hooks that plugins implement, a line each, and the types that they pass.

A plugin is the operator's code on the host: a package with an entry point of the group `belljar`, or a file in
`plugins_directory`. It marks functions with `hookimpl`, named as below, which take as many of the arguments as they
like. `def` runs in a thread, `async def` on the server's event loop; either may take ten seconds. belljar's own
policy, sandboxes, kernels, surfaces, workflow steps and form targets are registered through the same hooks.

    from belljar.hooks import ToolCallFacts, Verdict, hookimpl

    @hookimpl
    def judge_tool_call(call: ToolCallFacts) -> Verdict | None:
        return Verdict("deny", "mail goes out on weekdays") if call.server == "mail" else None

The types lie in `facts.py`; how plugins are found and called is `plugins.py`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from belljar.facts import (
    PROJECT,
    CallEnd,
    CellFacts,
    CodeStep,
    FormTarget,
    SessionFacts,
    StepType,
    ToolCallFacts,
    Verdict,
    hookimpl,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from belljar.kernels.base import Kernel, KernelRequest
    from belljar.models import ExecutionResult
    from belljar.outputs.recorder import OutputScreen
    from belljar.runtime import Runtime
    from belljar.sandboxes.base import Provider
    from belljar.settings import Settings

__all__ = [
    "CallEnd",
    "CellFacts",
    "CodeStep",
    "FormTarget",
    "SessionFacts",
    "StepType",
    "ToolCallFacts",
    "Verdict",
    "hookimpl",
]

hookspec = pluggy.HookspecMarker(PROJECT)


# Guardrails


@hookspec
def judge_tool_call(call: ToolCallFacts) -> Verdict | None:
    """Decide on a tool call; the strictest verdict counts, and a hook that fails refuses the call."""


@hookspec
def judge_code(cell: CellFacts) -> Verdict | None:
    """Decide on a cell before it runs; the strictest verdict counts, and a hook that fails refuses the cell."""


@hookspec
def screen_output(session: SessionFacts) -> "Sequence[OutputScreen] | OutputScreen | None":
    """Return filters for the output of one execution; of a filter that fails, the output is withheld."""


# Tool calls and executions


@hookspec
def before_tool_call(call: ToolCallFacts) -> Mapping[str, Any] | None:
    """Look at a call before it is judged, and perhaps return other arguments; a hook that fails refuses the call."""


@hookspec
def after_tool_call(call: ToolCallFacts, end: CallEnd) -> None:
    """Look at how a call ended; a hook that fails is logged."""


@hookspec
def before_execution(cell: CellFacts) -> None:
    """Look at a cell that is about to run; a hook that fails is named in the cell's output."""


@hookspec
def after_execution(cell: CellFacts, result: "ExecutionResult") -> None:
    """Look at the result of a cell; a hook that fails is logged."""


# What sessions, workflows and clients can use


@hookspec
def workflow_step_types() -> Iterable[StepType]:
    """Return types of workflow steps; none can replace one of belljar's own."""
    return ()


@hookspec
def form_targets() -> Iterable[FormTarget]:
    """Return kinds of forms that sessions can fill in; none can replace one of belljar's own."""
    return ()


@hookspec
def sandbox_providers(settings: "Settings") -> "Mapping[str, Callable[[], Provider]]":
    """Return what makes sandbox providers, by NAME; the setting `sandbox` chooses one by `plugin:NAME`."""
    return {}


@hookspec
def kernels() -> "Mapping[str, Callable[[KernelRequest], Awaitable[Kernel]]]":
    """Return what starts kernels, by the NAME of the environment `kernel:NAME`; Jupyter's are looked for after them."""
    return {}


@hookspec
def http_routes(runtime: "Runtime") -> "Mapping[str, Callable[[Request], Awaitable[Response]]]":
    """Return endpoints of the HTTP server, by their paths; who calls them is checked as before `/mcp`."""
    return {}


@hookspec
def register_surface(server: Any, runtime: "Runtime", surfaces: Sequence[str]) -> None:
    """Add tools, resources or prompts to an MCP server that is being built for these surfaces."""
