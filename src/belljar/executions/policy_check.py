"""The policy check of a cell before it runs: the guard's decision, and the question to a person where it is `ask`."""

from collections.abc import Awaitable, Callable, Sequence

from belljar.errors import CodeRejected
from belljar.hooks import CellFacts, Verdict
from belljar.plugins import Plugins
from belljar.policy.code_inspection import Inspection
from belljar.policy.guard import Guard
from belljar.toolbox.base import Question, QuestionReply
from belljar.toolbox.texts import one_line, visible

MOST_CODE_CHARS = 2_000
MOST_WORDS_CHARS = 200
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
        guard.vetted(cell.execution_id, inspection, outcome, by)
        for verdict in verdicts:
            if verdict.decision != "allow":
                guard.vetted_by_plugin(cell.execution_id, verdict, outcome)

    if "deny" in decisions:
        record("denied")
        raise CodeRejected(f"the code did not run: {_reasons('deny', inspection, verdicts)}", hint=HINT)
    if "ask" in decisions:
        reasons = _reasons("ask", inspection, verdicts)
        text = f"May this code run? {reasons}\n\n{_excerpt(cell.code)}"
        reply = await ask(Question(text, is_ours=True, in_console=inspection.in_console))
        is_approved = reply is not None and reply.action == "accept"
        record("approved" if is_approved else "declined", reply.by if reply is not None else "")
        if not is_approved:
            said = "nobody could be asked" if reply is None else "the person did not agree"
            if reply is None and inspection.in_console:
                said = f"{said}, because it has to be allowed at the server's inbox and nobody looks at that"
            raise CodeRejected(f"the code did not run, {said}: {reasons}", hint=HINT)
    elif "warn" in decisions:
        record("allowed")
    own = [f"the policy warns: {in_words(inspection)}"] if inspection.decision == "warn" else []
    return [*own, *(verdict.reason for verdict in verdicts if verdict.decision == "warn")]


def _reasons(decision: str, inspection: Inspection, verdicts: Sequence[Verdict]) -> str:
    """Return why a cell is refused or asked about: what the policy found, and what plugins say."""
    own = [in_words(inspection)] if inspection.decision == decision else []
    return "; ".join([*own, *(verdict.reason for verdict in verdicts if verdict.decision == decision)])


def in_words(inspection: Inspection) -> str:
    """Return each finding with its line and its rule, as one sentence."""
    return "; ".join(
        f"line {finding.line}: {one_line(finding.what, MOST_WORDS_CHARS)} "
        f"({finding.rule}{': ' + reason if reason else ''})"
        for finding, reason in zip(inspection.findings, inspection.reasons, strict=True)
    )


def _excerpt(code: str) -> str:
    """Return the code to show the person, without characters that could make it look like something else."""
    left_out = len(code) - MOST_CODE_CHARS
    more = f"\n… and {left_out:,} more characters" if left_out > 0 else ""
    return f"{visible(code[:MOST_CODE_CHARS], MOST_CODE_CHARS)}{more}"
