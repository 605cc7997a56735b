"""Makes a workflow of a text, or tells every problem of the text's form: keys, types, nesting.

What names and expressions mean is checked in `checks.py`. A text may also hold several workflows, in an outer list
`workflows`.
"""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from belljar.toolbox.server_text import nearest
from belljar.workflows.definition import Definition, Step, StepForm, StepKind, WorkflowForm
from belljar.workflows.source_text import LocatedText, Path, TextProblem, invalid

MAX_STEPS = 10_000
MAX_NESTED = 8


def parse(source: LocatedText, types: Mapping[str, StepKind], which: str = "") -> Definition:
    """Return the workflow of a text; raise `WorkflowInvalid` with every problem of its form.

    `which` chooses one where the text has several in an outer `workflows` list.
    """
    data, place = _select(source, which)
    parser = _Parser(source, types)
    form = parser.model(WorkflowForm, data, place)
    steps = parser.steps(data.get("steps"), (*place, "steps"), 0)
    if parser.problems or form is None:
        raise invalid(parser.problems)
    return Definition(form.name, form, steps, source, place)


def names_in(source: LocatedText) -> list[str]:
    """Return the names of the workflows in a text that has an outer list; empty for any other text."""
    data: Any = source.data
    listed: Any = cast("dict[str, Any]", data).get("workflows") if isinstance(data, dict) else None
    entries = cast("list[Any]", listed) if isinstance(listed, list) else []
    return [str(cast("dict[str, Any]", each).get("name")) for each in entries if isinstance(each, dict)]


def _select(source: LocatedText, which: str) -> tuple[dict[str, Any], Path]:
    data: Any = source.data
    if not isinstance(data, dict):
        raise invalid([source.problem((), "a workflow is a mapping with name and steps")])
    found = cast("dict[str, Any]", data)
    if "workflows" not in found:
        return found, ()
    listed: Any = found["workflows"]
    others = [key for key in found if key not in ("workflows", "version", "description")]
    if others or not isinstance(listed, list) or not listed:
        hint = "Write name and steps at the top, or a list of workflows and nothing else"
        raise invalid([source.problem(("workflows",), "workflows is no list of workflows", hint)])
    entries = cast("list[Any]", listed)
    names = [str(cast("dict[str, Any]", each).get("name")) if isinstance(each, dict) else "" for each in entries]
    if which and which not in names:
        raise invalid([source.problem(("workflows",), f"there is no workflow {which!r}: there is {', '.join(names)}")])
    if len(entries) > 1 and not which:
        hint = f"Name one of them, with --name in a command: {', '.join(names)}"
        raise invalid([source.problem(("workflows",), f"there are {len(entries)} workflows in this text", hint)])
    index = names.index(which) if which else 0
    if not isinstance(entries[index], dict):
        raise invalid([source.problem(("workflows", index), "a workflow is a mapping with name and steps")])
    return cast("dict[str, Any]", entries[index]), ("workflows", index)


class _Parser:
    """Parses one text, and collects what is wrong with it."""

    def __init__(self, source: LocatedText, types: Mapping[str, StepKind]) -> None:
        self._source = source
        self._types = types
        self._count = 0
        self.problems: list[TextProblem] = []

    def model(self, model: type[Any], data: Any, place: Path) -> Any:
        """Return a model of the data; None where it does not fit, which is among the problems then."""
        try:
            return model.model_validate(data)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                self._add_fault(model, fault, place)
            return None

    def _add_fault(self, model: type[BaseModel], fault: Any, place: Path) -> None:
        steps = [
            step for step in fault["loc"] if not (isinstance(step, str) and step.startswith(("function-", "Goto")))
        ]
        path: Path = (*place, *steps)
        key = str(steps[-1]) if steps else ""
        reason, hint = str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "it should", 1), ""
        if fault["type"] == "extra_forbidden":
            known = [info.alias or name for name, info in model.model_fields.items()] if len(steps) == 1 else []
            near = nearest(key, known)
            reason = f"there is no key {key[:100]!r} here"
            hint = f"Did you mean {near}?" if near else f"There are {', '.join(known)}" if known else ""
        elif fault["type"] == "missing":
            reason = f"{key} is missing"
        elif fault["type"] == "string_pattern_mismatch" and key in ("name", "as", "goto"):
            value = str(fault["input"])[:100]
            reason, hint = f"{key} is {value!r}", "Use letters, digits and underscores, and begin with a letter"
        elif key:
            reason = f"{'.'.join(map(str, steps))}: {reason}"
        self.problems.append(self._source.problem(path, reason[:500], hint))

    def steps(self, data: Any, place: Path, depth: int) -> tuple[Step, ...]:
        """Return the steps of a list; those that do not fit are among the problems."""
        if not isinstance(data, list):
            return ()  # the model around it has said so
        found: list[Step] = []
        for index, each in enumerate(cast("list[Any]", data)):
            self._count += 1
            if self._count > MAX_STEPS:
                if self._count == MAX_STEPS + 1:
                    message = f"there are more than {MAX_STEPS:,} steps"
                    hint = "Repeat steps in a loop over a list"
                    self.problems.append(self._source.problem((*place, index), message, hint))
                break
            if (step := self._step(each, (*place, index), depth)) is not None:
                found.append(step)
        return tuple(found)

    def _step(self, data: Any, place: Path, depth: int) -> Step | None:
        if not isinstance(data, dict):
            self.problems.append(self._source.problem(place, "a step is a mapping with name, type and config"))
            return None
        form = self.model(StepForm, data, place)
        raw = cast("dict[str, Any]", data)
        kind = self._types.get(str(raw.get("type")))
        if kind is None:
            if isinstance(raw.get("type"), str):
                near = nearest(str(raw["type"]), self._types)
                hint = f"Did you mean {near}?" if near else f"There are {', '.join(self._types)}"
                message = f"there is no step type {str(raw['type'])[:100]!r}"
                self.problems.append(self._source.problem((*place, "type"), message, hint))
            return None
        given = raw.get("config", {})
        config = self.model(kind.config, given, (*place, "config"))
        if kind.schema is not None and config is not None:
            self._check_schema(kind.schema, given, (*place, "config"))
        blocks: list[tuple[Step, ...]] = []
        if kind.blocks and depth >= MAX_NESTED:
            message = f"steps are nested more than {MAX_NESTED} deep"
            self.problems.append(
                self._source.problem(place, message, "Put the inner ones into a workflow of their own")
            )
        elif isinstance(given, dict):
            for key in kind.blocks:
                blocks += self._blocks(cast("dict[str, Any]", given).get(key), (*place, "config", key), depth + 1)
        if form is None or config is None:
            return None
        return Step(form.name, form.type, config, form, tuple(blocks), place, self._source.line(place))

    def _check_schema(self, schema: Mapping[str, Any], given: Any, place: Path) -> None:
        """Check a plugin's configuration, as far as its values are known already."""
        from jsonschema import Draft202012Validator  # it takes 80 ms to import, and few workflows need it here

        validator: Any = Draft202012Validator(dict(schema))
        for error in validator.iter_errors(given):
            if not (isinstance(error.instance, str) and "{{" in error.instance):
                path: Path = (*place, *error.absolute_path)
                self.problems.append(self._source.problem(path, str(error.message)[:500]))

    def _blocks(self, data: Any, place: Path, depth: int) -> list[tuple[Step, ...]]:
        """Return the lists of steps under a key: one, or one for each branch."""
        entries = cast("list[Any]", data) if isinstance(data, list) else []
        if entries and all(isinstance(each, list) for each in entries):
            return [self.steps(each, (*place, index), depth) for index, each in enumerate(entries)]
        return [self.steps(entries, place, depth)]
