"""Checks of a workflow beyond its form, before anything runs: names, expressions, code, tools, what the policy denies.

Every problem comes with its file, line and a hint. Nothing of the workflow is run here; code is parsed and no more.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from belljar.errors import WorkflowInvalid
from belljar.facts import ToolCallFacts
from belljar.inside.expressions import plain_value
from belljar.policy.cell_syntax import Unreadable, is_quick, read_cell
from belljar.policy.code_inspection import Inspection
from belljar.policy.guard import Guard
from belljar.policy.rules import Policy
from belljar.questions.schema import schema_problem
from belljar.toolbox.arguments import BadArguments, Parameters
from belljar.toolbox.base import Catalogue, ToolDefinition
from belljar.toolbox.server_text import nearest, suggestion
from belljar.workflows.definition import (
    MAX_VARIABLES,
    CodeExecution,
    Condition,
    Definition,
    FormStep,
    Goto,
    Loop,
    Parallel,
    Step,
    SubWorkflow,
    ToolCallStep,
    name_problem,
)
from belljar.workflows.library import reference_of
from belljar.workflows.source_text import Path, TextProblem, invalid
from belljar.workflows.step_guards import MAX_REGIONS, guardrails_problem, hidden_in
from belljar.workflows.templates import compile_expression, expressions_in, has_expression

FIELDS = ("result", "stdout", "files", "status", "error")
"""What later steps can read of a step."""
_UNKNOWN_ARGUMENT = "[EMAIL_1]"
"""Stands for an argument whose value is not known yet: a privacy token may stand for a value of any type."""


class Tools(Protocol):
    """The toolbox, as far as checks need it."""

    async def catalogue(self, server: str = "", tool: str = "") -> Catalogue:
        """Return the catalogue; wait for the server if it is still connecting."""
        ...


@dataclass(slots=True)
class Checker:
    """Checks one workflow and its sub-workflows."""

    guard: Guard
    environment: str
    tools: Tools | None = None
    max_code_bytes: int = 1024 * 1024
    problems: list[TextProblem] = field(default_factory=list[TextProblem])

    async def check(self, definition: Definition, given: Iterable[str] = ()) -> None:
        """Raise `WorkflowInvalid` with every problem; `given` are names of variables from outside."""
        await self._definition(definition, given)
        hidden = None if self.problems else hidden_in(definition)
        if hidden is not None and len(hidden.phone_regions) > MAX_REGIONS:
            message = f"the guardrails name {len(hidden.phone_regions)} phone_regions in all"
            self._add(definition, (*definition.place, "guardrails"), message, f"A run has at most {MAX_REGIONS}")
        if self.problems:
            raise invalid(self.problems)

    async def _definition(self, definition: Definition, given: Iterable[str] = ()) -> None:
        known: dict[str, str] = {}
        self._guardrails(definition, definition.form.guardrails, (*definition.place, "guardrails"))
        place = (*definition.place, "variables")
        for name, value in definition.variables.items():
            self._name(definition, name, known, (*place, name))
            known[name] = "a variable"
            if has_expression(value):
                self._add(definition, (*place, name), f"variable {name} has an expression", "Give it a plain value")
            try:
                plain_value(value)
            except ValueError as error:
                self._add(definition, (*place, name), f"variable {name}: {error}")
        for name in given:
            known.setdefault(name, "a variable")
        if len(known) > MAX_VARIABLES:
            self._add(definition, place, f"there are {len(known):,} variables, the limit is {MAX_VARIABLES:,}")
        every: dict[str, str] = dict(known)
        await self._steps(definition, definition.steps, known, every)
        for child in definition.children.values():
            await self._definition(child)

    async def _steps(
        self, definition: Definition, steps: tuple[Step, ...], known: dict[str, str], every: dict[str, str]
    ) -> None:
        """Check a list of steps; `known` are the names that its expressions may use, `every` all that are taken."""
        for index, step in enumerate(steps):
            await asyncio.sleep(0)  # there may be thousands of them
            self._name(definition, step.name, every, (*step.place, "name"))
            every[step.name] = f"a step (line {step.line})"
            self._goto(definition, step, steps[index + 1 :])
            self._guardrails(definition, step.form.guardrails, (*step.place, "guardrails"))
            await self._step(definition, step, known, every)
            known[step.name] = "a step"

    def _name(self, definition: Definition, name: str, taken: Mapping[str, str], place: Path) -> None:
        if (problem := name_problem(name, taken)) is not None:
            self._add(definition, place, *problem)

    def _goto(self, definition: Definition, step: Step, later: tuple[Step, ...]) -> None:
        if isinstance(goto := step.form.on_error, Goto):
            names = [each.name for each in later]
            if goto.goto not in names:
                hint = f"It can go to {', '.join(names)}" if names else "There is no later step in its list"
                self._add(definition, (*step.place, "on_error"), f"goto {goto.goto} is no later step beside it", hint)

    def _guardrails(self, definition: Definition, policy: Policy | None, place: Path) -> None:
        if policy is not None and (problem := guardrails_problem(policy)):
            self._add(definition, place, problem, "Set it in the policy of the server")

    async def _step(self, definition: Definition, step: Step, known: dict[str, str], every: dict[str, str]) -> None:
        config, inner = step.config, dict(known)
        match config:
            case CodeExecution():
                await self._code(definition, step, config.code, known)
            case ToolCallStep():
                await self._expressions(definition, step, "arguments", config.arguments, known)
                await self._tool(definition, step, config)
            case FormStep():
                await self._form(definition, step, config, known)
            case Condition():
                await self._expressions(definition, step, "if", _as_expression(config.if_), known)
            case Loop():
                await self._expressions(definition, step, "for", config.for_, known)
                self._name(definition, config.as_, known, (*step.place, "config", "as"))
                if config.while_ is not None:
                    # A condition of `while` may use what the steps of the loop gave in the round before.
                    within = dict(known) | {each.name: "a step" for each in step.blocks[0]}
                    await self._expressions(definition, step, "while", _as_expression(config.while_), within)
                inner[config.as_] = "the value of the loop"
            case SubWorkflow():
                await self._sub_workflow(definition, step, config, known)
            case Parallel():
                pass
            case _:
                await self._expressions(definition, step, "", config.model_dump(), known)
        for block in step.blocks:
            await self._steps(definition, block, dict(inner), every)

    # Expressions

    async def _expressions(
        self, definition: Definition, step: Step, key: str, value: Any, known: Mapping[str, str]
    ) -> None:
        place = (*step.place, "config", *([key] if key else []))
        try:
            found = expressions_in(value)
        except ValueError as error:
            self._add(definition, place, str(error))
            return
        for text in found:
            await asyncio.sleep(0)  # there may be thousands of them
            try:
                compile_expression(text, known)
            except ValueError as error:
                self._add(definition, place, f"step {step.name}: {error}", _name_hint(str(error), known))
                continue
            self._fields(definition, step, place, text, known)

    def _fields(self, definition: Definition, step: Step, place: Path, text: str, known: Mapping[str, str]) -> None:
        steps = [name for name, kind in known.items() if kind == "a step"]
        for name, attribute in re.findall(r"(?<![.\w\"'])([A-Za-z_]\w*)\.([A-Za-z_]\w*)", text):
            if name in steps and attribute not in FIELDS:
                hint = f"A step has {', '.join(FIELDS)}"
                self._add(definition, place, f"step {step.name}: {name} has no {attribute!r}", hint)

    # Code

    async def _code(self, definition: Definition, step: Step, code: str, known: Mapping[str, str]) -> None:
        place = (*step.place, "config", "code")
        if len(code.encode(errors="replace")) > self.max_code_bytes:
            self._add(definition, place, f"step {step.name}: the code is over {self.max_code_bytes:,} bytes")
            return
        for name, attribute in re.findall(r"\{\{\s*([A-Za-z_]\w*)((?:\.\w+)*)\s*\}\}", code):
            if name in known:
                path = "".join(f'["{part}"]' for part in attribute.split(".")[1:])
                instead = f'steps["{name}"]{path}' if known[name] == "a step" else name
                hint = f"Write the Python {instead}"
                self._add(
                    definition, place, f"step {step.name}: code is no template, {{{{ {name} }}}} stays text", hint
                )
        try:
            if is_quick(code):
                read_cell(code)
            else:
                await asyncio.to_thread(read_cell, code)
        except Unreadable as error:
            message = f"step {step.name}: line {error.line} of its code is no Python: {error.reason}"
            self._add(definition, place, message)
            return
        await self._judge_code(definition, place, step, code)

    async def _judge_code(self, definition: Definition, place: Path, step: Step, code: str) -> None:
        inspection: Inspection = await self.guard.examine(code, definition.form.environment or self.environment)
        if inspection.decision == "deny":
            what = "; ".join(f"line {finding.line}: {finding.what}" for finding in inspection.findings)
            self._add(definition, place, f"step {step.name}: the policy does not allow its code: {what}")

    # Tools

    async def _tool(self, definition: Definition, step: Step, config: ToolCallStep) -> None:
        place = (*step.place, "config")
        if self.tools is None:
            hint = "Start belljar with --mcp-config FILE"
            self._add(definition, place, f"step {step.name}: no MCP servers are configured", hint)
            return
        catalogue = await self.tools.catalogue(config.server, config.tool)
        tool = catalogue.find(config.server, config.tool)
        if tool is None:
            self._missing_tool(definition, (*place, "server"), step, config, catalogue)
            return
        given = {
            name: _UNKNOWN_ARGUMENT if has_expression_safely(value) else value
            for name, value in config.arguments.items()
        }
        try:
            Parameters(tool).checked(given)
        except BadArguments as error:
            self._add(definition, (*place, "arguments"), f"step {step.name}: {config.server}.{config.tool}: {error}")
        await self._judge_call(definition, place, step, tool, config.arguments)

    def _missing_tool(
        self, definition: Definition, place: Path, step: Step, config: ToolCallStep, catalogue: Catalogue
    ) -> None:
        known = catalogue.servers.get(config.server)
        if known is None:
            problem = f"there is no server {config.server!r}{suggestion(config.server, catalogue.servers)}"
        elif known.error:
            problem = f"the server {config.server} cannot be reached: {known.error[:200]}"
        else:
            names = [tool.name for tool in known.tools]
            problem = f"{config.server} has no tool {config.tool!r}{suggestion(config.tool, names)}"
        self._add(definition, place, f"step {step.name}: {problem}")

    async def _judge_call(
        self, definition: Definition, place: Path, step: Step, tool: ToolDefinition, arguments: Mapping[str, Any]
    ) -> None:
        if has_expression_safely(dict(arguments)):
            return  # rules may be about values that are not known yet
        hints = tool.annotations
        call = ToolCallFacts("", "", tool.server, tool.name, arguments, hints.read_only, hints.destructive)
        verdict = await self.guard.judge(call)
        if verdict.decision == "deny":
            self._add(definition, place, f"step {step.name}: the policy does not allow it: {verdict.reason}")

    # Forms and sub-workflows

    async def _form(self, definition: Definition, step: Step, config: FormStep, known: Mapping[str, str]) -> None:
        await self._expressions(definition, step, "message", config.message, known)
        await self._expressions(definition, step, "values", config.values, known)
        if config.target is not None:
            await self._expressions(definition, step, "target", config.target.model_dump(), known)
        if config.fields and (problem := schema_problem(config.fields)):
            self._add(definition, (*step.place, "config", "schema"), f"step {step.name}: {problem}")

    async def _sub_workflow(
        self, definition: Definition, step: Step, config: SubWorkflow, known: Mapping[str, str]
    ) -> None:
        await self._expressions(definition, step, "variables", config.variables, known)
        child = definition.children[reference_of(config)]
        if unknown := [name for name in config.variables if name not in child.variables]:
            hint = f"It has {', '.join(child.variables)}" if child.variables else "It has none"
            place = (*step.place, "config", "variables")
            self._add(definition, place, f"step {step.name}: {child.name} has no variable {unknown[0]!r}", hint)

    def _add(self, definition: Definition, place: Path, message: str, hint: str = "") -> None:
        self.problems.append(definition.source.problem(place, message, hint))


def has_expression_safely(value: Any) -> bool:
    """Return whether there is an expression in a value, or what looks like the beginning of one."""
    try:
        return has_expression(value)
    except ValueError:
        return True


def _as_expression(value: str | bool) -> Any:
    """Return a condition as a template: one without braces is an expression as it stands."""
    return value if isinstance(value, bool) or "{{" in value else f"{{{{ {value} }}}}"


def _name_hint(message: str, known: Mapping[str, str]) -> str:
    found = re.search(r" names '([^']+)'", message)
    near = nearest(found[1], known) if found else ""
    return f"Did you mean {near}?" if near else ""


__all__ = ["FIELDS", "Checker", "Tools", "WorkflowInvalid"]
