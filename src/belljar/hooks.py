"""The hooks that plugins implement, a line each, and the types that they pass.

A plugin is the operator's code on the host: a package with an entry point of the group `belljar`, or a file in
`plugins_directory`. It marks functions with `hookimpl`, named as below, which take as many of the arguments as they
like. `def` runs in a thread, `async def` on the server's event loop; either may take `HOOK_S` seconds. belljar's own
policy, sandboxes, kernels, surfaces, workflow steps and form targets are registered through the same hooks.

    from belljar.hooks import ToolCallFacts, Verdict, hookimpl

    @hookimpl
    def judge_tool_call(call: ToolCallFacts) -> Verdict | None:
        return Verdict("deny", "mail goes out on weekdays") if call.server == "mail" else None

Knows nothing of how plugins are found and called; that is `plugins.py`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import pluggy

if TYPE_CHECKING:
    from belljar.kernels.base import Kernel, KernelRequest
    from belljar.models import ExecutionResult
    from belljar.outputs.recorder import OutputScreen
    from belljar.runtime import Runtime
    from belljar.sandboxes.base import Provider
    from belljar.settings import Settings

PROJECT: Final = "belljar"
HOOK_S: Final = 10.0
"""How long one hook of one plugin may take before it counts as failed."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A guardrail's decision. `ask` means that the call or the code may go on if the person agrees."""

    decision: Literal["allow", "warn", "ask", "deny"]
    """`warn` lets code run with a notice in its output; for a tool call it means `allow`."""
    reason: str = ""
    """The rule, the value and what to do next, in words for the code that called and for the person."""
    rule: str = ""
    """The place of the rule in the policy, like `tools.3`, or the name of the plugin, like `plugin:NAME`."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Whose session something happens in."""

    session_id: str
    principal: str
    environment: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallFacts:
    """A call of a tool from the code of a session, before it leaves the host."""

    session_id: str
    principal: str
    server: str
    tool: str
    arguments: Mapping[str, Any]
    """As the code passed them: privacy tokens stand for the values behind them."""
    read_only: bool = False
    """What the server claims about the tool, like `destructive`."""
    destructive: bool = True
    has_values: bool = False
    """Whether this is the second question about a call, with values in place of its tokens; do not count it twice."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended."""

    state: Literal["returned", "failed", "refused", "cancelled"]
    duration_s: float
    reason: str = ""
    """Why it was refused or failed."""
    value: Any = None
    """What the code gets of a call that returned, personal data replaced by tokens as the policy has it."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """A cell that is to run, runs, or ran; programs of the executor surface count as cells too."""

    session_id: str
    principal: str
    execution_id: str
    code: str
    environment: str = ""
    author: str = ""
    """Who submitted it; empty for the session's owner."""


class StepType(Protocol):
    """A type of workflow steps. Those of plugins are `CodeStep`s; belljar's own also steer the run."""

    @property
    def name(self) -> str:
        """Return the name that `type` has in workflows."""
        ...

    @property
    def config_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the step's `config`."""
        ...


@dataclass(frozen=True, slots=True)
class CodeStep:
    """A step that is Python in the session of its run, so that policy, privacy and limits hold for it."""

    name: str
    code: str
    """The Python to run. It finds the step's `config`, its expressions evaluated, in the variable `config`; the value
    of its last expression is the step's result."""
    config_schema: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeat: bool = False
    """Whether it may run again after a crash in the middle of it, because it changes nothing outside the session."""


@dataclass(frozen=True, slots=True)
class FormTarget:
    """A kind of form that `forms.open` in sessions can fill in."""

    name: str
    module: Path
    """A Python file that sessions see and import: `open_form(source, options)` returns a subclass of `forms.Form`, or
    None for a source that is none of its own."""


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
def register_surface(server: Any, runtime: "Runtime", surfaces: Sequence[str]) -> None:
    """Add tools, resources or prompts to an MCP server that is being built for these surfaces."""
