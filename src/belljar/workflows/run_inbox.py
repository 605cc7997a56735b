"""The waits of workflows in the inbox, beside the questions of executions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from belljar.models import iso_ms
from belljar.questions.models import Action, InboxQuestion, QuestionSubject, shown_fields
from belljar.workflows.questions import read_question
from belljar.workflows.workflows import Workflows


class RunInbox:
    """See `QuestionSource`. The id of a question is that of its run and the path of its step."""

    def __init__(self, workflows: Workflows) -> None:
        self._workflows = workflows

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """See `QuestionSource`."""
        found: list[InboxQuestion] = []
        for run, step in self._workflows.waiting(principal):
            question = read_question(step.question or "")
            about = question.about or QuestionSubject(asked_by="workflow")
            message = f"workflow {run.name}, step {step.path}: {question.message}"
            asked = replace(question, message=message, about=about)
            found.append(
                InboxQuestion(
                    id=f"{run.id}:{step.path}",
                    kind="workflow",
                    owner=run.principal,
                    session_id=run.session_id,
                    execution_id=step.execution_id,
                    **shown_fields(asked),
                    put_at=iso_ms(question.asked_at or step.began_at),
                    expires_at=iso_ms(step.expires_at) if step.expires_at else None,
                )
            )
        return found

    async def answer(
        self, question: InboxQuestion, action: Action, values: Mapping[str, Any], by: str, *, is_operator: bool
    ) -> None:
        """See `QuestionSource`."""
        run_id, _, path = question.id.partition(":")
        await self._workflows.answer(
            run_id, question.owner, values, action=action, step=path, by=by, is_operator=is_operator
        )
