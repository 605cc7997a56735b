"""The subjects of the policy's questions: a call or code that a person has to allow, as far as they are shown it.

Texts in them come from code, models and servers, so they are bounded here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from belljar.questions.models import MAX_EDITED_CHARS, QuestionSubject, SubjectArgument, SubjectFinding, SubjectLine
from belljar.toolbox.server_text import one_line, shown_arguments, unhidden

MAX_ARGUMENT_CHARS: Final = 8_000
MAX_FINDINGS: Final = 20
_MAX_REASON_CHARS: Final = 400
_NAME_CHARS: Final = 100
# Code of up to so many lines is shown whole; of longer code, the lines around what was found.
_WHOLE_LINES: Final = 60
_MAX_LINES: Final = 200
_MAX_LINE_CHARS: Final = 400
_AROUND: Final = 4
_FIRST: Final = 5


def call_subject(
    server: str,
    tool: str,
    arguments: Mapping[str, Any],
    *,
    rule: str = "",
    reason: str = "",
    holds_for_session: bool = False,
) -> QuestionSubject:
    """Return the subject of the question whether a tool may be called."""
    shown = shown_arguments(arguments, MAX_ARGUMENT_CHARS)
    return QuestionSubject(
        asked_by=_asker([rule]),
        server=one_line(server, _NAME_CHARS),
        tool=one_line(tool, _NAME_CHARS),
        arguments=[SubjectArgument(name=name, value=value) for name, value in shown],
        more_arguments=len(arguments) - len(shown),
        findings=[SubjectFinding(rule=rule, reason=one_line(reason, _MAX_REASON_CHARS))] if rule or reason else [],
        holds_for_session=holds_for_session,
        editable=_editable(json.dumps(arguments, indent=1, ensure_ascii=False)),
    )


def code_subject(code: str, findings: Iterable[SubjectFinding]) -> QuestionSubject:
    """Return the subject of the question whether code may run."""
    found = [
        one.model_copy(
            update={"reason": one_line(one.reason, _MAX_REASON_CHARS), "what": one_line(one.what, _MAX_REASON_CHARS)}
        )
        for one in findings
    ][:MAX_FINDINGS]
    lines = code.split("\n") if code else []
    return QuestionSubject(
        asked_by=_asker([one.rule for one in found]),
        code=_excerpt(lines, {one.line for one in found if one.line is not None}),
        code_lines=len(lines),
        findings=found,
        editable=_editable(code),
    )


def _editable(text: str) -> str:
    return text if len(text) <= MAX_EDITED_CHARS else ""


def _asker(rules: Sequence[str]) -> Literal["policy", "plugin"]:
    return "plugin" if rules and all(rule.startswith("plugin:") for rule in rules) else "policy"


def _excerpt(lines: Sequence[str], marked: set[int]) -> list[SubjectLine]:
    """Return all lines of short code; of long code its beginning and the surroundings of the marked lines."""
    wanted = set(range(1, min(len(lines), _WHOLE_LINES if len(lines) <= _WHOLE_LINES else _FIRST) + 1))
    for number in sorted(marked):
        wanted.update(range(max(1, number - _AROUND), min(len(lines), number + _AROUND) + 1))
    return [
        SubjectLine(number=number, text=_cut(lines[number - 1]), is_marked=number in marked)
        for number in sorted(wanted)[:_MAX_LINES]
    ]


def _cut(line: str) -> str:
    left_out = len(line) - _MAX_LINE_CHARS
    shown = unhidden(line[:_MAX_LINE_CHARS].rstrip("\r"))
    return f"{shown}… and {left_out:,} more characters" if left_out > 0 else shown
