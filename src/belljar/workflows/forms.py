"""The `form` step with a target: cells that read and fill in a document or page with the session's module `forms`.

What a form asks for comes out of the session, so it is checked like everything that does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from belljar.workflows.definition import CodeExecution, FilledTarget, Step, StepForm
from belljar.workflows.questions import schema_problem

MAX_FIELDS = 500
MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class ReadForm:
    """A form as the session has read it."""

    values: dict[str, Any]
    """Values that it has, or that were given and fit."""
    missing: dict[str, str]
    """Why each of the other fields needs a value."""
    asked: dict[str, Any]
    """The schema of what a person has to be asked; empty when nothing is missing."""
    fingerprint: str


def reading(target: FilledTarget, values: Mapping[str, Any]) -> Step:
    """Return the step that reads a form."""
    options = {name: value for name in ("form", "browser") if (value := getattr(target, name))}
    code = f"import forms\nforms.read({target.source!r}, {dict(values)!r}{_named(options)})"
    return _code_step("read", code, repeat=True)


def filling(target: FilledTarget, form: ReadForm, values: Mapping[str, Any], person: Sequence[str]) -> Step:
    """Return the step that fills in a form and saves or sends it; `person` names the values that the person gave."""
    options: dict[str, Any] = {
        name: value for name in ("form", "browser", "save", "button", "dry_run") if (value := getattr(target, name))
    }
    by = {name: "the person" if name in person else "the workflow" for name in values}
    options |= {"by": by, "fingerprint": form.fingerprint}
    code = f"import forms\nforms.fill({target.source!r}, {dict(values)!r}{_named(options)})"
    # A page is sent once; a file can be written again, and nothing is sent in a trial.
    return _code_step("fill", code, repeat=target.dry_run or bool(target.save))


def read_form(found: Any) -> ReadForm:
    """Return what the session says of a form; raise ValueError for anything that no form can be."""
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    schema, values, missing = (fields.get(key) for key in ("asked", "values", "missing"))
    if not all(isinstance(each, dict) for each in (schema, values, missing)):
        raise ValueError("the session read no form")
    properties: Any = cast("dict[str, Any]", schema).get("properties")
    reasons = {str(name): str(why)[:MAX_REASON_CHARS] for name, why in cast("dict[str, Any]", missing).items()}
    if len(reasons) > MAX_FIELDS or not isinstance(properties, dict):
        raise ValueError("the session read a form whose fields do not fit its schema")
    if secret := [name for name in reasons if name not in properties]:
        # A run's questions and answers are on record, where no password belongs.
        raise ValueError(
            f"the form needs a password, {secret[0]}, which no person is asked for here: put it into values"
        )
    asked: dict[str, Any] = {}
    if reasons:
        asked = {
            "type": "object",
            "properties": {name: properties[name] for name in reasons},
            "required": [*reasons],
        }
        if problem := schema_problem(asked):
            raise ValueError(f"a person cannot be asked for what is missing: {problem}")
    return ReadForm(cast("dict[str, Any]", values), reasons, asked, str(fields.get("fingerprint", ""))[:100])


def _named(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _code_step(name: str, code: str, *, repeat: bool) -> Step:
    form = StepForm.model_validate({"name": name, "type": "code_execution", "repeat": repeat})
    return Step(name, "code_execution", CodeExecution(code=code), form, (), (), 0)
