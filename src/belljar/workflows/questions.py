"""Questions of a run to a person, as its record has them, and which of the values of a form are still missing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from belljar.outputs.terminal_text import printable
from belljar.questions.models import Question
from belljar.questions.schema import fault_of

Kind = Literal["form", "approval", "fate", "held"]


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


def missing_fields(schema: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the schema of what is still to be asked, and why each value that was given is not taken."""
    properties: dict[str, Any] = dict(schema.get("properties", {}))
    required: list[str] = list(schema.get("required", []))
    faults: dict[str, str] = {}
    for name, value in values.items():
        if name in properties and (fault := fault_of(properties[name], value)):
            faults[name] = fault
    asked = [name for name in properties if name in faults or (name in required and name not in values)]
    if not asked:
        return {}, faults
    return {
        "type": "object",
        "properties": {name: properties[name] for name in asked},
        "required": [name for name in asked if name in required or name in faults],
    }, faults
