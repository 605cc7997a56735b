"""The policy check of a cell before it runs: the guard's decision, and the question to a person where it is `ask`."""

from collections.abc import Awaitable, Callable, Sequence

from belljar.errors import CodeRejected
from belljar.hooks import CellFacts, Verdict
from belljar.plugins import Plugins
from belljar.policy.code_inspection import Inspection
from belljar.policy.guard import Guard
from belljar.toolbox.base import Question, QuestionReply
from belljar.toolbox.question_subjects import SubjectFinding, code_subject
from belljar.toolbox.texts import one_line, visible

MAX_CODE_CHARS = 2_000
MAX_FINDING_CHARS = 200
HINT = "Write it another way: the policy of this server does not allow that"


async def check_policy(
    plugins: Plugins, guard: Guard, cell: CellFacts, ask: Callable[[Question], Awaitable[QuestionReply | None]]
) -> list[str]:
    """Return the warnings for code that may run, or raise `CodeRejected`. Plugins judge it before the policy does."""
    verdicts = await plugins.judge_code(cell) if "judge_code" in plugins.used_hooks else []
    if any(verdict.decision == "deny" for verdict in verdicts):
        inspection = Inspection()
    else:
        inspection = await guard.examine(cell.code, cell.environment)
    decisions = {inspection.decision, *(verdict.decision for verdict in verdicts)}

    def record(outcome: str, by: str = "") -> None:
        guard.record_code_decision(cell.execution_id, inspection, outcome, by)
        for verdict in verdicts:
            if verdict.decision != "allow":
                guard.record_plugin_decision(cell.execution_id, verdict, outcome)

    if "deny" in decisions:
        record("denied")
        raise CodeRejected(f"the code did not run: {_reasons('deny', inspection, verdicts)}", hint=HINT)
    if "ask" in decisions:
        reasons = _reasons("ask", inspection, verdicts)
        text = f"May this code run? {reasons}\n\n{_excerpt(cell.code)}"
        about = code_subject(cell.code, _asked_about(inspection, verdicts))
        reply = await ask(Question(text, is_ours=True, in_console=inspection.in_console, about=about))
        is_approved = reply is not None and reply.action == "accept"
        record("approved" if is_approved else "declined", reply.by if reply is not None else "")
        if not is_approved:
            said = "nobody could be asked" if reply is None else "the person did not agree"
            if reply is None and inspection.in_console:
                said = f"{said}, because it has to be allowed at the server's inbox and nobody looks at that"
            raise CodeRejected(f"the code did not run, {said}: {reasons}", hint=HINT)
    elif "warn" in decisions:
        record("allowed")
    own = [f"the policy warns: {inspection_text(inspection)}"] if inspection.decision == "warn" else []
    return [*own, *(verdict.reason for verdict in verdicts if verdict.decision == "warn")]


def _reasons(decision: str, inspection: Inspection, verdicts: Sequence[Verdict]) -> str:
    """Return why a cell is refused or asked about: what the policy found, and what plugins say."""
    own = [inspection_text(inspection)] if inspection.decision == decision else []
    return "; ".join([*own, *(verdict.reason for verdict in verdicts if verdict.decision == decision)])


def _asked_about(inspection: Inspection, verdicts: Sequence[Verdict]) -> list[SubjectFinding]:
    own = subject_findings(inspection) if inspection.decision == "ask" else []
    plugins = [verdict for verdict in verdicts if verdict.decision == "ask"]
    return [*own, *(SubjectFinding(rule=verdict.rule, reason=verdict.reason) for verdict in plugins)]


def subject_findings(inspection: Inspection) -> list[SubjectFinding]:
    """Return the findings as a person sees them who is asked."""
    return [
        SubjectFinding(rule=finding.rule, reason=reason, line=finding.line, what=finding.what)
        for finding, reason in zip(inspection.findings, inspection.reasons, strict=True)
    ]


def inspection_text(inspection: Inspection) -> str:
    """Return each finding with its line and its rule, as one sentence."""
    return "; ".join(
        f"line {finding.line}: {one_line(finding.what, MAX_FINDING_CHARS)} "
        f"({finding.rule}{': ' + reason if reason else ''})"
        for finding, reason in zip(inspection.findings, inspection.reasons, strict=True)
    )


def _excerpt(code: str) -> str:
    """Return the code to show the person, without characters that could make it look like something else."""
    left_out = len(code) - MAX_CODE_CHARS
    more = f"\n… and {left_out:,} more characters" if left_out > 0 else ""
    return f"{visible(code[:MAX_CODE_CHARS], MAX_CODE_CHARS)}{more}"
