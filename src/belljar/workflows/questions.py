"""Questions of a run to a person: what is asked, which answers fit, and which of the values are still missing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from belljar.errors import InvalidArgument
from belljar.outputs.terminal_text import printable
from belljar.toolbox.base import Question

Kind = Literal["form", "approval", "fate", "held"]
MAX_FIELDS = 50
MAX_ANSWER_BYTES = 64 * 1024
_FLAT = ("string", "number", "integer", "boolean")
_KEYWORDS = frozenset(
    [
        "type",
        "title",
        "description",
        "default",
        "enum",
        "enumNames",
        "const",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "format",
        "oneOf",
        "items",
        "minItems",
        "maxItems",
        "anyOf",
    ]
)


@dataclass(frozen=True, slots=True)
class RunQuestion:
    """What a step asks. `fate` is asked of a step that was under way when its server died."""

    kind: Kind
    message: str
    schema: dict[str, Any] = field(default_factory=dict[str, Any])
    """A flat JSON Schema of the answer; empty for plain consent."""
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values that are known already, to which the answer is added."""
    asked_at: float = 0.0
    is_password: bool = False
    in_console: bool = False
    """Whether it is never put to the client, because a rule of the policy says so."""
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it is about, as `QuestionSubject` has it; empty for a question of the workflow itself."""

    def as_json(self) -> str:
        """Return it as it is recorded."""
        return json.dumps(asdict(self))

    def for_person(self) -> Question:
        """Return it as surfaces put it to a person."""
        return Question(
            self.message, self.schema, is_ours=True, is_password=self.is_password, in_console=self.in_console
        )


def about_fields(question: Question) -> dict[str, Any]:
    """Return what a question is about, as it is recorded."""
    return question.about.with_texts(printable).model_dump() if question.about is not None else {}


def read_question(text: str) -> RunQuestion:
    """Return a question from the record."""
    return RunQuestion(**json.loads(text))


def fate_question(path: str, why: str) -> RunQuestion:
    """Return the question what to do with a step of which it is not known how far it came."""
    choices = ["again", "skip", "stop"]
    schema = {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": choices, "title": "again, skip or stop?"}},
        "required": ["choice"],
    }
    return RunQuestion("fate", f"Step {path} {why}. Run it again, skip it, or stop the run?", schema)


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Return why a schema cannot be asked for; empty when it can. It must be flat, as elicitation has it."""
    properties = schema.get("properties")
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping) or not properties:
        return "the schema is no object with properties"
    named = cast("Mapping[str, Any]", properties)
    if len(named) > MAX_FIELDS:
        return f"the schema has {len(named)} fields, the limit is {MAX_FIELDS}"
    for name, entry in named.items():
        if not isinstance(entry, Mapping):
            return f"field {name} is no schema"
        given = cast("Mapping[str, Any]", entry)
        kind = given.get("type", "string")
        if kind != "array" and kind not in _FLAT:
            return (
                f"field {name} is of type {kind}; a person can be asked for {', '.join(_FLAT)} or a choice of several"
            )
        if unknown := [key for key in given if key not in _KEYWORDS]:
            return f"field {name} has the keyword {unknown[0]!r}, which a form cannot show"
        if kind == "array" and not (isinstance(given.get("items"), Mapping) and _choices(given["items"])):
            return f"field {name} is a list of anything; give its items an enum"
    required: Any = schema.get("required", [])
    if not isinstance(required, list) or any(name not in named for name in cast("list[Any]", required)):
        return "required names a field that is not there"
    from jsonschema import Draft202012Validator  # it takes 80 ms to import, and most servers run no workflow
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(dict(schema))
    except SchemaError as error:
        return f"this is no JSON Schema: {error.message[:200]}"
    return ""


def _choices(items: Any) -> bool:
    return bool(items.get("enum") or items.get("anyOf") or items.get("oneOf"))


def missing_fields(schema: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the schema of what is still to be asked, and why each value that was given is not taken."""
    properties: dict[str, Any] = dict(schema.get("properties", {}))
    required: list[str] = list(schema.get("required", []))
    faults: dict[str, str] = {}
    for name, value in values.items():
        if name in properties and (fault := _fault(properties[name], value)):
            faults[name] = fault
    asked = [name for name in properties if name in faults or (name in required and name not in values)]
    if not asked:
        return {}, faults
    return {
        "type": "object",
        "properties": {name: properties[name] for name in asked},
        "required": [name for name in asked if name in required or name in faults],
    }, faults


def checked_answer(question: RunQuestion, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an answer; raise `InvalidArgument` for one that does not fit."""
    if len(json.dumps(answer)) > MAX_ANSWER_BYTES:
        raise InvalidArgument(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes", hint="Answer with less text")
    properties: dict[str, Any] = question.schema.get("properties", {})
    if unknown := [name for name in answer if name not in properties]:
        hint = f"It asks for {', '.join(properties)}" if properties else "It asks for consent: answer with {}"
        raise InvalidArgument(f"the answer has a field {unknown[0][:64]!r} that was not asked for", hint=hint)
    if missing := [name for name in question.schema.get("required", []) if name not in answer]:
        raise InvalidArgument(f"the answer lacks {', '.join(missing)}", hint="Answer with all required fields")
    for name, value in answer.items():
        if fault := _fault(properties[name], value):
            raise InvalidArgument(f"{name} is {json.dumps(value)[:100]}: {fault}", hint="Answer with a value that fits")
    return dict(answer)


def _fault(schema: Mapping[str, Any], value: Any) -> str:
    # The schema is flat and has no patterns, which could take any amount of time.
    from jsonschema import Draft202012Validator

    validator: Any = Draft202012Validator(dict(schema))
    error = next(iter(validator.iter_errors(value)), None)
    return error.message[:200] if error is not None else ""
