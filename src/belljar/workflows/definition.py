"""The form of a workflow: the models of its parts, the types of its steps, and its JSON Schema.

`parser.py` makes a definition of a text; `checks.py` checks what names and expressions mean. The keys of the original
for `retry` and `guardrails` are read too.
"""

import keyword
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from belljar.facts import CodeStep
from belljar.plugins import Plugins
from belljar.policy.rules import Policy
from belljar.workflows import switches
from belljar.workflows.source_text import LocatedText, Path
from belljar.workflows.switches import with_own_rules

log = logging.getLogger(__name__)

MAX_BRANCHES = 16
MAX_ITERATIONS = 10_000
MAX_RUN_STEPS = 50_000
"""The most steps of one run, each round of a loop counted."""
MAX_RUN_BYTES = 64 * 1024 * 1024
"""The most that all steps of one run may give together, as JSON."""
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
    "delay": "delay_s",
    "delay_seconds": "delay_s",
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
    delay_s: float = Field(0, ge=0, le=3_600, description="Seconds before each repetition")
    on: list[Literal["error", "timeout", "died", "out_of_memory"]] = Field(
        ["error", "timeout"], description="Which failures are worth another try"
    )


class Goto(DefinitionTable):
    """Where to go on after a failure."""

    goto: Name = Field(description="The name of a later step of the same list")


OnError = Literal["stop", "skip"] | Goto


Guardrails = Annotated[Policy | None, BeforeValidator(with_own_rules)]


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
    guardrails: Guardrails = Field(None, description="Rules like those of a policy file, which make it stricter")


class WorkflowForm(DefinitionTable):
    """A workflow, as it is written."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w][\w .:-]*$")]
    description: str = Field("", max_length=2_000, description="What a person reads in the list")
    version: str | int | float = ""
    variables: dict[str, Any] = Field({}, description="Names and their first values")
    environment: str = Field("", description="The environment of its session; empty for the configured one")
    save: bool = Field(True, description="Whether variables are saved after each step, so that a resumed run has them")
    guardrails: Guardrails = Field(None, description="Rules like those of a policy file, which make it stricter")
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


OWN_TYPES = (
    StepKind("code_execution", CodeExecution, "Runs Python in the run's session"),
    StepKind("tool_call", ToolCallStep, "Calls a tool of another MCP server"),
    StepKind("form", FormStep, "Asks a person, for consent or for values"),
    StepKind("condition", Condition, "Takes one of two ways", ("then", "else")),
    StepKind("loop", Loop, "Repeats steps", ("steps",)),
    StepKind("parallel", Parallel, "Runs lists of steps side by side, each in a fork of the session", ("branches",)),
    StepKind("workflow", SubWorkflow, "Runs another workflow in the same session"),
)


def step_types(plugins: Plugins) -> Mapping[str, StepKind]:
    """Return all step types by name: belljar's own, which nothing can replace, and those of plugins."""
    found: dict[str, StepKind] = {}
    for name, kind in plugins.named("workflow_step_types").items():
        if isinstance(kind, StepKind):
            found[name] = kind
        elif isinstance(kind, CodeStep) and NAME.fullmatch(name):
            description = str(kind.config_schema.get("description", "A step of a plugin"))
            found[name] = StepKind(
                name, FreeConfig, description, code=kind.code, schema=kind.config_schema, repeat=kind.repeat
            )
        else:
            log.warning(
                "the step type %s of a plugin is no CodeStep, or has no name that workflows can use", name[:100]
            )
    return found


# What a text becomes: see `parser.py`


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
    definitions["Policy"]["properties"] |= switches.SCHEMA
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
