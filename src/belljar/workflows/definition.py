"""The form of a workflow: its models, its JSON Schema, and how a text that was read becomes steps.

Checks form only: keys, types, nesting. What names and expressions mean is checked in `checks.py`. The forms of the
original are read too: an outer `workflows` list, and its words for `retry`.
"""

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from belljar.policy.rules import Policy
from belljar.toolbox.texts import nearest
from belljar.workflows.text import LocatedText, Path, TextProblem, invalid

MAX_STEPS = 10_000
MAX_NESTED = 8
MAX_BRANCHES = 16
MAX_ITERATIONS = 10_000
MAX_VARIABLES = 1_000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Words that CEL or the format keeps for itself.
RESERVED = frozenset(
    [
        "steps",
        "in",
        "null",
        "true",
        "false",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    ]
)
_RETRY_SYNONYMS = {
    "max_retries": "times",
    "retries": "times",
    "count": "times",
    "delay": "backoff_s",
    "delay_s": "backoff_s",
    "delay_seconds": "backoff_s",
    "backoff": "backoff_s",
    "backoff_seconds": "backoff_s",
    "wait": "backoff_s",
}
_ATTEMPT_SYNONYMS = ("max_attempts", "attempts")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
RawSteps = list[dict[str, Any]]


class DefinitionTable(BaseModel):
    """A mapping of the text. An unknown key is an error, because it is probably a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True, strict=True)


def _own_retry_keys(value: Any) -> Any:
    """Return the table with our keys in place of synonyms."""
    if not isinstance(value, dict):
        return value
    found = {_RETRY_SYNONYMS.get(key, key): each for key, each in cast("dict[str, Any]", value).items()}
    for key in _ATTEMPT_SYNONYMS:
        if isinstance(attempts := found.get(key), int):
            found = {name: each for name, each in found.items() if name != key} | {"times": max(0, attempts - 1)}
    return found


class Retry(DefinitionTable):
    """When a step that failed is tried again."""

    times: int = Field(1, ge=0, le=100, description="How often a failed step is tried again")
    backoff_s: float = Field(0, ge=0, le=3_600, description="Seconds before the first repetition, doubled each time")
    on: list[Literal["error", "timeout", "died", "out_of_memory"]] = Field(
        ["error", "timeout"], description="Which failures are worth another try"
    )


class Goto(DefinitionTable):
    """Where to go on after a failure."""

    goto: Name = Field(description="The name of a later step of the same list")


OnError = Literal["stop", "skip"] | Goto


class StepForm(DefinitionTable):
    """One step, as it is written."""

    name: Name = Field(description="What later steps call it: {{ name.result }}")
    type: str = Field(description="What it does")
    description: str = ""
    config: dict[str, Any] = Field({}, description="What its type needs")
    retry: Annotated[Retry | None, BeforeValidator(_own_retry_keys)] = None
    timeout_s: float | None = Field(None, gt=0, le=86_400, description="Interrupt its code after this long")
    on_error: OnError = "stop"
    repeat: bool = Field(False, description="Whether it may run again when it is not known how far it came")
    guardrails: Policy | None = Field(None, description="Rules like those of a policy file, which make it stricter")


class WorkflowForm(DefinitionTable):
    """A workflow, as it is written."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w][\w .:-]*$")]
    description: str = Field("", max_length=2_000, description="What a person reads in the list")
    version: str | int | float = ""
    variables: dict[str, Any] = Field({}, description="Names and their first values")
    environment: str = Field("", description="The environment of its session; empty for the configured one")
    save: bool = Field(True, description="Whether variables are saved after each step, so that a resumed run has them")
    guardrails: Policy | None = Field(None, description="Rules like those of a policy file, which make it stricter")
    steps: RawSteps = Field(min_length=1)


# Configurations of the step types that have other steps in them


class Condition(DefinitionTable):
    """One of two lists of steps."""

    if_: str | bool = Field(alias="if", description="An expression that is true or false")
    then: RawSteps = []
    else_: RawSteps = Field([], alias="else")


class Loop(DefinitionTable):
    """Steps for each of several values, or while something holds."""

    for_: str | list[Any] | None = Field(None, alias="for", description="A list, or an expression that is one")
    as_: Name = Field("item", alias="as", description="The variable that has the value")
    while_: str | bool | None = Field(None, alias="while", description="An expression that is true or false")
    most: int | None = Field(None, ge=1, le=MAX_ITERATIONS, description="The most rounds of `while`")
    steps: RawSteps = Field(min_length=1)

    @model_validator(mode="after")
    def _has_one(self) -> "Loop":
        if (self.for_ is None) == (self.while_ is None):
            raise ValueError("a loop has either for or while")
        if self.while_ is not None and self.most is None:
            raise ValueError("a loop with while needs most, the number of rounds after which it fails")
        return self


class Parallel(DefinitionTable):
    """Lists of steps side by side, each in a fork of the session."""

    branches: list[RawSteps] = Field(min_length=1, max_length=MAX_BRANCHES)


class CodeExecution(DefinitionTable):
    """A cell."""

    code: str = Field(min_length=1, description="Python; variables of the workflow are variables, steps has results")


class ToolCallStep(DefinitionTable):
    """A call of a tool of another MCP server."""

    server: str = Field(min_length=1, max_length=200)
    tool: str = Field(min_length=1, max_length=200)
    arguments: dict[str, Any] = {}


class FilledTarget(DefinitionTable):
    """A document or page that the session fills in, with its module `forms`."""

    source: str = Field(min_length=1, description="A PDF or HTML file of the session, or a URL")
    form: str = Field("", description="Which form of a page: its id, name or number")
    browser: str = Field("", description="The browser server of the toolbox that drives the page")
    save: str = Field("", description="Where a filled-in PDF is saved, in the session folder")
    button: str = Field("", description="Which button of a page sends it")
    dry_run: bool = Field(False, description="Show what would be sent, and send nothing")


class FormStep(DefinitionTable):
    """A question to a person: consent to a message, or fields to fill in."""

    message: str = Field("", max_length=8_000)
    fields: dict[str, Any] = Field({}, alias="schema", description="A flat JSON Schema of what is asked for")
    values: dict[str, Any] = Field({}, description="What is known already; only what is missing or invalid is asked")
    expires_s: float | None = Field(None, gt=0, description="Seconds after which nobody needs to answer any more")
    on_expiry: Literal["stop", "skip"] = "stop"
    target: FilledTarget | None = Field(None, description="A document or page to fill in; its fields are the schema")

    @model_validator(mode="after")
    def _asks_something(self) -> "FormStep":
        if not self.message and not self.fields and self.target is None:
            raise ValueError("a form needs a message, a schema or a target")
        if self.fields and self.target is not None:
            raise ValueError("a form has either a schema or a target, whose fields are the schema")
        return self


class SubWorkflow(DefinitionTable):
    """Another workflow, with variables of its own, in the same session."""

    file: str = Field("", max_length=500, description="A file beside this one")
    workflow: str = Field("", max_length=100, description="The name of one in workflows_directory")
    variables: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_one(self) -> "SubWorkflow":
        if bool(self.file) == bool(self.workflow):
            raise ValueError("a sub-workflow has either file or workflow")
        return self


class FreeConfig(BaseModel):
    """A configuration that a plugin's schema describes."""

    model_config = ConfigDict(extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class StepKind:
    """A type of step: the model of its configuration, and where that has other steps."""

    name: str
    config: type[BaseModel]
    description: str
    blocks: tuple[str, ...] = ()
    """The keys of its configuration that hold lists of steps."""
    code: str = ""
    """The Python of a plugin's type; it finds the configuration in the variable `config`."""
    schema: Mapping[str, Any] | None = None
    """The JSON Schema of a plugin's configuration."""
    repeat: bool = False
    """Whether its steps may run again when it is not known how far they came."""

    @property
    def config_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of its configuration."""
        return self.schema if self.schema is not None else self.config.model_json_schema(by_alias=True)


# ── parsed ──


@dataclass(frozen=True, slots=True)
class Step:
    """One step that is in order."""

    name: str
    type: str
    config: Any
    """A model of its type's configuration."""
    form: StepForm
    blocks: tuple[tuple["Step", ...], ...]
    """The lists of steps inside it, in the order of its type's keys."""
    place: Path
    """Where it is in its text."""
    line: int

    @property
    def retry(self) -> Retry | None:
        """Return when it is tried again."""
        return self.form.retry

    @property
    def is_code(self) -> bool:
        """Return whether it runs code of its author or of a plugin, which may leave something in variables."""
        return isinstance(self.config, CodeExecution | FreeConfig)


@dataclass(frozen=True, slots=True)
class Definition:
    """A workflow that is in order as far as its form goes."""

    name: str
    form: WorkflowForm
    steps: tuple[Step, ...]
    source: LocatedText
    place: Path
    children: Mapping[str, "Definition"] = field(default_factory=dict[str, "Definition"])
    """Its sub-workflows, and theirs, by the name under which a step finds them."""

    @property
    def variables(self) -> dict[str, Any]:
        """Return the first values of its variables."""
        return self.form.variables

    def walk(self) -> list[Step]:
        """Return all steps of its own text, in order."""
        found: list[Step] = []
        _collect(self.steps, found)
        return found


def _collect(steps: tuple[Step, ...], found: list[Step]) -> None:
    for step in steps:
        found.append(step)
        for block in step.blocks:
            _collect(block, found)


def parse(source: LocatedText, types: Mapping[str, StepKind], which: str = "") -> Definition:
    """Return the workflow of a text; raise `WorkflowInvalid` with every problem of its form.

    `which` chooses one where the text has several in an outer `workflows` list.
    """
    data, place = _chosen(source, which)
    parser = _Parser(source, types)
    form = parser.model(WorkflowForm, data, place)
    steps = parser.steps(data.get("steps"), (*place, "steps"), 0)
    if parser.problems or form is None:
        raise invalid(parser.problems)
    return Definition(form.name, form, steps, source, place)


def _chosen(source: LocatedText, which: str) -> tuple[dict[str, Any], Path]:
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
        hint = f"Name one of them: {', '.join(names)}"
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


def name_problem(name: str, taken: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong with the name of a variable or step and a hint; None where nothing is."""
    if not NAME.fullmatch(name):
        return f"{name[:100]!r} is no name", "Use letters, digits and underscores, and begin with a letter"
    if name in RESERVED or keyword.iskeyword(name):
        return f"{name} is a word of the language", "Choose another name"
    if name in taken:
        return f"{name} is the name of {taken[name]} already", "Choose another name"
    return None


def json_schema(types: Mapping[str, StepKind]) -> dict[str, Any]:
    """Return the JSON Schema of workflow texts, for editors and models."""
    schema = WorkflowForm.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.pop("$defs", {})
    step = StepForm.model_json_schema(by_alias=True)
    definitions |= step.pop("$defs", {})
    step["properties"]["type"] = {"enum": [*types], "description": "What it does"}
    rules: list[dict[str, Any]] = []
    for kind in types.values():
        config = dict(kind.config_schema)
        definitions |= config.pop("$defs", {})
        for key in kind.blocks:
            many: dict[str, Any] = config["properties"][key]
            inner = many["items"] if many.get("items", {}).get("type") == "array" else many
            inner["items"] = {"$ref": "#/$defs/Step"}
        config["description"] = kind.description
        definitions[f"Config_{kind.name}"] = config
        rules.append(
            {
                "if": {"properties": {"type": {"const": kind.name}}},
                "then": {"properties": {"config": {"$ref": f"#/$defs/Config_{kind.name}"}}},
            }
        )
    others = {key: definitions["Retry"]["properties"][ours] for key, ours in _RETRY_SYNONYMS.items()}
    attempts = {key: {"type": "integer", "minimum": 1} for key in _ATTEMPT_SYNONYMS}
    definitions["Retry"]["properties"] |= {**others, **attempts}
    definitions["Step"] = {**step, "allOf": rules, "title": "Step"}
    schema["properties"]["steps"]["items"] = {"$ref": "#/$defs/Step"}
    workflow = {**schema, "title": "Workflow"}
    definitions["Workflow"] = workflow
    several = {
        "type": "object",
        "properties": {"workflows": {"type": "array", "items": {"$ref": "#/$defs/Workflow"}, "minItems": 1}},
        "required": ["workflows"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "belljar workflow",
        "anyOf": [{"$ref": "#/$defs/Workflow"}, several],
        "$defs": definitions,
    }
