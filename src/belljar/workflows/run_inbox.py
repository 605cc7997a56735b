"""The waits of workflows in the inbox, beside the questions of executions."""

from collections.abc import Mapping
from typing import Any

from belljar.questions.models import Action, InboxQuestion
from belljar.workflows.questions import inbox_question
from belljar.workflows.workflows import Workflows


class RunInbox:
    """See `QuestionSource`. The id of a question is that of its run and the path of its step."""

    def __init__(self, workflows: Workflows) -> None:
        self._workflows = workflows

    def waiting(self, principal: str | None) -> list[InboxQuestion]:
        """See `QuestionSource`."""
        return [inbox_question(run, step) for run, step in self._workflows.waiting(principal)]

    def find(self, question_id: str) -> InboxQuestion | None:
        """See `QuestionSource`."""
        run_id, _, path = question_id.partition(":")
        found = self._workflows.asked(run_id, path)
        return inbox_question(*found) if found is not None else None

    async def answer(
        self, question: InboxQuestion, action: Action, values: Mapping[str, Any], by: str, *, is_operator: bool
    ) -> None:
        """See `QuestionSource`."""
        run_id, _, path = question.id.partition(":")
        await self._workflows.answer(
            run_id, question.owner, values, action=action, step=path, by=by, is_operator=is_operator
        )
