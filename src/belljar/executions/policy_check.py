"""The policy check of a cell before it runs: the guard's decision, and the question to a person where it is `ask`."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from belljar.errors import CodeRejected
from belljar.facts import CellFacts, Verdict
from belljar.outputs.events import Raised
from belljar.plugins import Plugins
from belljar.policy.code_inspection import Inspection
from belljar.policy.guard import Guard
from belljar.questions.models import Question, QuestionReply, SubjectFinding
from belljar.settings.environments import KERNEL_PREFIX
from belljar.toolbox.question_subjects import code_subject
from belljar.toolbox.server_text import one_line, visible

MAX_CODE_CHARS = 2_000
MAX_FINDING_CHARS = 200
HINT = "Write it another way: the policy of this server does not allow that"
DECLINED_HINT = "Do not try it another way: ask the person what to do instead"


class SyntaxFault(CodeRejected):
    """A cell that the policy cannot read, because it is not Python as the server's interpreter knows it.

    It does not run, whatever the session's Python would say. Where that is of the same version or an older one, the
    fault is the cell's, and the result is Python's own error; `deny` makes it a decision of the policy elsewhere.
    """

    def __init__(self, message: str, error: SyntaxError, line: int, deny: Callable[[], None]) -> None:
        super().__init__(message, hint=f"Write it in the syntax of Python {'.'.join(map(str, sys.version_info[:2]))}")
        self.raised = _raised(error, line)
        self.deny = deny

    @staticmethod
    def is_of(version: str) -> bool:
        """Return whether code that this server's Python cannot read is none for that version of Python either."""
        return tuple(map(int, version.split(".")[:2])) <= sys.version_info[:2]


def _raised(error: SyntaxError, line: int) -> Raised:
    """Return the error as a kernel tells it that could not compile a cell."""
    message, source = error.msg or "invalid syntax", (error.text or "").rstrip("\n")
    shown = source.lstrip()
    column = max(0, (error.offset or 1) - 1 - (len(source) - len(shown)))
    place = [f"    {shown}", f"    {' ' * column}^"] if shown else []
    name = type(error).__name__
    return Raised(name, f"{message} (line {line})", [f"  Cell, line {line}", *place, f"{name}: {message}"])


async def ask_nobody(_: Question) -> None:
    """Return no answer, where nobody can be asked: of code that is only saved, and of programs."""


@dataclass(frozen=True, slots=True)
class AllowedCode:
    """Code that may run."""

    warnings: list[str]
    code: str
    """What a person put in place of the cell's code before they allowed it, else that."""


async def check_policy(
    plugins: Plugins,
    guard: Guard,
    cell: CellFacts,
    ask: Callable[[Question], Awaitable[QuestionReply | None]],
    changed_by: str = "",
    *,
    by_operator: bool = False,
) -> AllowedCode:
    """Return the code that may run, or raise `CodeRejected`. Plugins judge it before the policy does.

    With `changed_by`, the code is what this person allows in place of the cell's: it is judged, and nobody asked again,
    except an operator about what only operators may allow, unless the person is one.
    """
    verdicts = await plugins.judge_code(cell) if "judge_code" in plugins.used_hooks else []
    if any(verdict.decision == "deny" for verdict in verdicts):
        inspection = Inspection()
    else:
        inspection = await guard.examine(cell.code, cell.environment)
    decisions = {inspection.decision, *(verdict.decision for verdict in verdicts)}

    def record(outcome: str, by: str = "") -> None:
        guard.record_code_decision(cell.execution_id, inspection, outcome, by or changed_by)
        for verdict in verdicts:
            if verdict.decision != "allow":
                guard.record_plugin_decision(cell.execution_id, verdict, outcome)

    if "deny" in decisions:
        if inspection.syntax_error is not None and not cell.environment.startswith(KERNEL_PREFIX):
            reasons = _reasons("deny", inspection, verdicts)
            line, deny = inspection.findings[0].line, partial(record, "denied")
            raise SyntaxFault(f"the code did not run: {reasons}", inspection.syntax_error, line, deny)
        record("denied")
        whose = f"the code that {changed_by} put in its place" if changed_by else "the code"
        raise CodeRejected(f"{whose} did not run: {_reasons('deny', inspection, verdicts)}", hint=HINT)
    if "ask" in decisions and changed_by and (by_operator or not inspection.in_console):
        record("approved")
    elif "ask" in decisions:
        reasons = _reasons("ask", inspection, verdicts)
        text = f"May this code run? {reasons}\n\n{_excerpt(cell.code)}"
        about = code_subject(cell.code, _asked_about(inspection, verdicts))
        reply = await ask(Question(text, is_ours=True, in_console=inspection.in_console, about=about))
        is_approved = reply is not None and reply.action == "accept"
        if reply is not None and is_approved and reply.edited:
            changed, by_operator = replace(cell, code=reply.edited), inspection.in_console
            return await check_policy(plugins, guard, changed, ask, reply.by or "a person", by_operator=by_operator)
        record("approved" if is_approved else "declined", reply.by if reply is not None else "")
        if not is_approved:
            has_declined = reply is not None and reply.action == "decline"
            said = "the person declined" if has_declined else "the person did not agree"
            said = "nobody could be asked" if reply is None else said
            if reply is None and inspection.in_console:
                said = f"{said}, because it has to be allowed at the server's inbox and nobody looks at that"
            words = reply.words if reply is not None else ""
            hint = DECLINED_HINT if has_declined else HINT
            raise CodeRejected(f"the code did not run, {said}: {reasons}{words}", hint=hint)
    elif "warn" in decisions:
        record("allowed")
    own = [f"the policy warns: {inspection_text(inspection)}"] if inspection.decision == "warn" else []
    warnings = [*own, *(verdict.reason for verdict in verdicts if verdict.decision == "warn")]
    return AllowedCode(warnings, cell.code)


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
