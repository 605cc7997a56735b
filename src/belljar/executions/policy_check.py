"""The policy check of a cell before it runs: the guard's decision, and the question to a person where it is `ask`."""

from collections.abc import Awaitable, Callable

from belljar.errors import CodeRejected
from belljar.policy.code_inspection import Inspection
from belljar.policy.guard import Guard
from belljar.toolbox.base import Question, QuestionReply
from belljar.toolbox.texts import one_line, visible

MOST_CODE_CHARS = 2_000
MOST_WORDS_CHARS = 200
HINT = "Write it another way: the policy of this server does not allow that"


async def check_policy(
    guard: Guard,
    code: str,
    *,
    environment: str,
    execution_id: str,
    ask: Callable[[Question], Awaitable[QuestionReply | None]],
) -> list[str]:
    """Return the warnings for code that may run, or raise `CodeRejected`."""
    inspection = await guard.examine(code, environment)
    match inspection.decision:
        case "deny":
            guard.vetted(execution_id, inspection, "denied")
            raise CodeRejected(f"the code did not run: {in_words(inspection)}", hint=HINT)
        case "ask":
            reply = await ask(Question(f"May this code run? {in_words(inspection)}\n\n{_excerpt(code)}", is_ours=True))
            is_approved = reply is not None and reply.action == "accept"
            guard.vetted(execution_id, inspection, "approved" if is_approved else "declined")
            if not is_approved:
                said = "nobody could be asked" if reply is None else "the person did not agree"
                raise CodeRejected(f"the code did not run, {said}: {in_words(inspection)}", hint=HINT)
        case "warn":
            guard.vetted(execution_id, inspection, "allowed")
            return [f"the policy warns: {in_words(inspection)}"]
        case "allow":
            pass
    return []


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
