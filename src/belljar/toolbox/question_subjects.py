"""What a question to a person is about, in fields of its own: who asks, about which call or code, and under which rule.

The host fills them in, so code cannot claim to be the policy. Their texts come from code, models and servers all the
same: they are bounded here, and whoever records them replaces personal data and makes controls visible.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import Field

from belljar.models import Model
from belljar.toolbox.texts import one_line, shown_arguments, unhidden

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


class SubjectArgument(Model):
    """An argument of a tool call."""

    name: str
    value: str = Field(description="The start of its value as JSON, with codes for characters that cannot be seen.")


class SubjectLine(Model):
    """A line of the code that wants to run."""

    number: int
    text: str
    is_marked: bool = Field(default=False, description="Whether a finding is in this line.")


class SubjectFinding(Model):
    """Why a person is asked: the rule, its reason, and in code what was found where."""

    rule: str = Field(default="", description="The place of the rule in the policy, like `code.1`, or `plugin:NAME`.")
    reason: str = ""
    line: int | None = None
    what: str = ""


class QuestionSubject(Model):
    """What a question is about, as far as the server itself knows."""

    asked_by: Literal["code", "policy", "plugin", "server", "workflow"] = Field(
        description="Whose question it is: `code` is a cell's own (`input()`, a form), `server` an MCP server's."
    )
    server: str = Field(default="", description="The MCP server that asks, or that would be called.")
    tool: str = ""
    arguments: list[SubjectArgument] = Field(default_factory=list[SubjectArgument])
    more_arguments: int = Field(default=0, description="How many arguments are not listed.")
    code: list[SubjectLine] = Field(
        default_factory=list[SubjectLine],
        description="The code that wants to run; where it is long, the lines around what was found.",
    )
    code_lines: int = Field(default=0, description="How many lines the code has in all.")
    findings: list[SubjectFinding] = Field(default_factory=list[SubjectFinding])
    holds_for_session: bool = Field(
        default=False, description="Whether a yes holds for the rest of the session (`ask_once`)."
    )

    def with_texts(self, change: Callable[[str], str]) -> "QuestionSubject":
        """Return it with all texts of others changed, to hide personal data for example.

        Code is changed as one text, because what is to be hidden may go over several lines. Where that joins lines,
        the code is left out: its numbers and marks would be wrong, and the question's message has it.
        """
        code = change("\n".join(line.text for line in self.code)).split("\n") if self.code else []
        lines = [line.model_copy(update={"text": text}) for line, text in zip(self.code, code, strict=False)]
        return self.model_copy(
            update={
                "server": change(self.server),
                "tool": change(self.tool),
                "arguments": [
                    SubjectArgument(name=change(one.name), value=change(one.value)) for one in self.arguments
                ],
                "code": lines if len(code) == len(self.code) else [],
                "findings": [
                    one.model_copy(update={"reason": change(one.reason), "what": change(one.what)})
                    for one in self.findings
                ],
            }
        )


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
    )


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
