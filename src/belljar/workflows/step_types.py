"""The table of step types: belljar's own, and those that plugins bring through the same hook."""

import logging
from collections.abc import Mapping

from belljar.facts import CodeStep, hookimpl
from belljar.plugins import Plugins
from belljar.workflows.definition import (
    NAME,
    CodeExecution,
    Condition,
    FormStep,
    FreeConfig,
    Loop,
    Parallel,
    StepKind,
    SubWorkflow,
    ToolCallStep,
)

log = logging.getLogger(__name__)

CORE = (
    StepKind("code_execution", CodeExecution, "Runs Python in the run's session"),
    StepKind("tool_call", ToolCallStep, "Calls a tool of another MCP server"),
    StepKind("form", FormStep, "Asks a person, for consent or for values"),
    StepKind("condition", Condition, "Takes one of two ways", ("then", "else")),
    StepKind("loop", Loop, "Repeats steps", ("steps",)),
    StepKind("parallel", Parallel, "Runs lists of steps side by side, each in a fork of the session", ("branches",)),
    StepKind("workflow", SubWorkflow, "Runs another workflow in the same session"),
)


class OwnStepTypes:
    """belljar's own step types, registered through the hook that plugins use."""

    @hookimpl
    def workflow_step_types(self) -> tuple[StepKind, ...]:
        """Return the types."""
        return CORE


def plugin_type(step: CodeStep) -> StepKind:
    """Return the type of a plugin's steps."""
    description = str(step.config_schema.get("description", "A step of a plugin"))
    return StepKind(step.name, FreeConfig, description, code=step.code, schema=step.config_schema, repeat=step.repeat)


def step_types(plugins: Plugins) -> Mapping[str, StepKind]:
    """Return all step types by name: belljar's own, which nothing can replace, and those of plugins."""
    found: dict[str, StepKind] = {}
    for name, kind in plugins.named("workflow_step_types").items():
        if isinstance(kind, StepKind):
            found[name] = kind
        elif isinstance(kind, CodeStep) and NAME.fullmatch(name):
            found[name] = plugin_type(kind)
        else:
            log.warning(
                "the step type %s of a plugin is no CodeStep, or has no name that workflows can use", name[:100]
            )
    return found


def own_step_types() -> Mapping[str, StepKind]:
    """Return belljar's own step types by name."""
    return {kind.name: kind for kind in CORE}
