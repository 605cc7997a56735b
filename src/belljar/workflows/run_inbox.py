"""The waits of workflows in the inbox, beside the questions of executions."""

from collections.abc import Mapping
from typing import Any

from belljar.journal.run_records import RunRecords
from belljar.questions.models import Action, InboxQuestion
from belljar.workflows.questions import inbox_question
from belljar.workflows.workflows import Workflows


class RunInbox:
    """See `QuestionSource`. The id of a question is that of its run and the path of its step."""

    def __init__(self, workflows: Workflows, records: RunRecords) -> None:
        self._workflows = workflows
        self._records = records

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
        await self._workflows.answer(
            run_id, question.owner, values, action=action, step=path, by=by, is_operator=is_operator
        )
