"""The table of step types. A plugin's types join it; a name that is taken already is refused."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from belljar.errors import SettingsError
from belljar.hooks import hookimpl
from belljar.plugins import Plugins
from belljar.workflows.definition import (
    CodeExecution,
    Condition,
    FormStep,
    FreeConfig,
    Loop,
    Parallel,
    StepType,
    SubWorkflow,
    ToolCall,
)

CORE = (
    StepType("code_execution", CodeExecution, "Runs Python in the run's session"),
    StepType("tool_call", ToolCall, "Calls a tool of another MCP server"),
    StepType("form", FormStep, "Asks a person, for consent or for values"),
    StepType("condition", Condition, "Takes one of two ways", ("then", "else")),
    StepType("loop", Loop, "Repeats steps", ("steps",)),
    StepType("parallel", Parallel, "Runs lists of steps side by side, each in a fork of the session", ("branches",)),
    StepType("workflow", SubWorkflow, "Runs another workflow in the same session"),
)


@runtime_checkable
class PluginStep(Protocol):
    """A step type of a plugin: Python in the session of its run."""

    @property
    def name(self) -> str:
        """Return the name that `type` has in workflows."""
        ...

    @property
    def code(self) -> str:
        """Return the Python to run."""
        ...

    @property
    def config_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the step's `config`."""
        ...

    @property
    def repeat(self) -> bool:
        """Return whether it may run again when it is not known how far it came."""
        ...


def plugin_type(step: PluginStep) -> StepType:
    """Return the type of a plugin's steps."""
    description = str(step.config_schema.get("description", "A step of a plugin"))
    return StepType(step.name, FreeConfig, description, code=step.code, schema=step.config_schema, repeat=step.repeat)


class OwnStepTypes:
    """belljar's own step types, as a plugin."""

    @hookimpl
    def workflow_step_types(self) -> Iterable[StepType]:
        """Return them."""
        return CORE


def plugin_types(plugins: Plugins) -> list[StepType]:
    """Return the step types that the operator's plugins bring; one that is no Python for a session is named."""
    brought = plugins.named("workflow_step_types").values()
    return [plugin_type(each) for each in brought if not isinstance(each, StepType) and isinstance(each, PluginStep)]


def step_types(others: Iterable[StepType] = ()) -> Mapping[str, StepType]:
    """Return all step types by name: those of belljar, and the others."""
    found = {kind.name: kind for kind in CORE}
    for kind in others:
        if kind.name in found:
            raise SettingsError(f"the step type {kind.name!r} is there already", hint="Give the other one another name")
        found[kind.name] = kind
    return found
