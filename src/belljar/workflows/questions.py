"""Questions of a run to a person, as its record has them, and which of the values of a form are still missing."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from belljar.journal.run_records import ENDED, RunRecord, RunRecords, StepRecord
from belljar.models import iso_ms
from belljar.outputs.terminal_text import printable
from belljar.questions.models import Action, InboxQuestion, Question, QuestionState, QuestionSubject, shown_fields
from belljar.questions.schema import fault_of, fields_of, required_of

if TYPE_CHECKING:
    from belljar.workflows.workflows import Workflows

Kind = Literal["form", "approval", "fate", "held"]
# A step on record is read by older versions too, which know these and no others.
_RECORDED = ("kind", "message", "schema", "given", "asked_at", "is_password", "in_console")

# What became of a question, by the state of its step.
_FATES: dict[str, QuestionState] = {
    **dict.fromkeys(("answered", "running", "done", "failed", "repeated"), "answered"),
    "declined": "declined",
    "expired": "expired",
}


@dataclass(frozen=True, slots=True)
class RunQuestion(Question):
    """What a step asks. `fate` is asked of a step that was under way when its server died."""

    kind: Kind = "form"
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values that are known already, to which the answer is added."""
    asked_at: float = 0.0

    def as_json(self) -> str:
        """Return it as it is recorded."""
        about = self.about.with_texts(printable).model_dump() if self.about is not None else {}
        return json.dumps({name: getattr(self, name) for name in _RECORDED} | {"about": about})


def run_question(question: Question, kind: Kind) -> RunQuestion:
    """Return what a cell or the policy asks as the question of a step, from now on.

    A run does what its workflow says, so that nobody can change what is asked about.
    """
    about = question.about.model_copy(update={"editable": ""}) if question.about is not None else None
    return RunQuestion(
        question.whole_message,
        question.schema,
        is_password=question.is_password,
        in_console=question.in_console,
        about=about,
        kind=kind,
        asked_at=time.time(),
    )


def read_question(text: str) -> RunQuestion:
    """Return a question from the record."""
    known = json.loads(text)
    about = known.pop("about", None)
    return RunQuestion(**known, about=QuestionSubject.model_validate(about) if about else None)


def inbox_question(run: RunRecord, step: StepRecord) -> InboxQuestion:
    """Return the question that a step waits with as the inbox shows it. Its id is that of the run and the path."""
    question = read_question(step.question or "")
    about = question.about or QuestionSubject(asked_by="workflow")
    message = f"workflow {run.name}, step {step.path}: {question.message}"
    is_open = step.state == "waiting" and run.state not in ENDED
    return InboxQuestion(
        id=f"{run.id}:{step.path}",
        kind="workflow",
        owner=run.principal,
        session_id=run.session_id,
        execution_id=step.execution_id,
        **shown_fields(replace(question, message=message, about=about)),
        put_at=iso_ms(question.asked_at or step.began_at),
        expires_at=iso_ms(step.expires_at) if step.expires_at else None,
        state="waiting" if is_open else _FATES.get(step.state, "withdrawn"),
        ended_at=iso_ms(step.ended_at) if step.ended_at and not is_open else None,
        answered_by=str(json.loads(step.answer).get("by", "")) if step.answer else "",
    )


def fate_question(path: str, why: str) -> RunQuestion:
    """Return the question what to do with a step of which it is not known how far it came."""
    choices = ["again", "skip", "stop"]
    schema = {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": choices, "title": "again, skip or stop?"}},
        "required": ["choice"],
    }
    return RunQuestion(f"Step {path} {why}. Run it again, skip it, or stop the run?", schema, kind="fate")


def missing_fields(schema: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the schema of what is still to be asked, and why each value that was given is not taken."""
    properties, required = fields_of(schema), required_of(schema)
    checked = {name: fault_of(properties[name], value) for name, value in values.items() if name in properties}
    faults = {name: fault for name, fault in checked.items() if fault}
    asked = [name for name in properties if name in faults or (name in required and name not in values)]
    if not asked:
        return {}, faults
    return {
        "type": "object",
        "properties": {name: properties[name] for name in asked},
        "required": [name for name in asked if name in required or name in faults],
    }, faults


class RunInbox:
    """The waits of runs in the inbox, beside the questions of executions.

    The id of a question is that of its run and the path of its step.
    """

    def __init__(self, records: RunRecords, workflows: "Callable[[], Workflows]") -> None:
        self._records = records
        self._workflows = workflows

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """See `QuestionSource`."""
        pairs = self._records.waiting()
        return [inbox_question(run, step) for run, step in pairs if principal in (None, run.principal)]

    def find(self, question_id: str) -> InboxQuestion | None:
        """See `QuestionSource`."""
        run_id, _, path = question_id.partition(":")
        record = self._records.find(run_id)
        rows = [row for row in self._records.asked(run_id) if row.path == path] if record is not None else []
        return inbox_question(record, rows[-1]) if record is not None and rows else None

    async def answer(
        self, question: InboxQuestion, action: Action, values: Mapping[str, Any], by: str, *, is_operator: bool
    ) -> None:
        """See `QuestionSource`."""
        run_id, _, path = question.id.partition(":")
        await self._workflows().answer(
            run_id, question.owner, values, action=action, step=path, by=by, is_operator=is_operator
        )
