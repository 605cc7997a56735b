"""Tool calls against the policy's rules for tools: which rules hold, and what they say. Counts are asked, not kept."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from belljar.policy.base import Verdict
from belljar.policy.expressions import Expression, ExpressionFailed
from belljar.policy.rules import ToolRule, parse_rate
from belljar.policy.schemas import ArgumentSchema, unfit

WITHOUT = "Do without it: only the operator can change that"
OTHER_ARGUMENTS = "Call it with arguments that satisfy this"


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """What a session asks for. The arguments are as the code gave them."""

    server: str
    tool: str
    arguments: Mapping[str, Any]
    read_only: bool
    destructive: bool
    calls: int = 0
    """Of this tool in this session before."""

    def values(self) -> dict[str, Any]:
        """What expressions may name."""
        return {
            "arguments": dict(self.arguments),
            "server": self.server,
            "tool": self.tool,
            "read_only": self.read_only,
            "destructive": self.destructive,
            "calls": self.calls,
        }


class CheckedRule:
    """One rule for tools, compiled."""

    def __init__(self, number: int, rule: ToolRule) -> None:
        self.name = f"tools.{number}"
        self.rule = rule
        self.rate = parse_rate(rule.rate) if rule.rate else None
        self._when = Expression(rule.when) if rule.when != "true" else None
        self._schema = ArgumentSchema(rule.arguments) if rule.arguments else None
        self._requirements = [(Expression(each.expression), each.reason) for each in rule.require]

    def matches(self, call: JudgedCall) -> bool:
        """Whether the tool is one of its."""
        return any(_is_match(pattern, call) for pattern in self.rule.match)

    def holds(self, call: JudgedCall, values: Mapping[str, Any]) -> bool:
        """Whether its condition is true; where that cannot be told, a rule that allows does not hold, others do."""
        if self._when is None:
            return True
        try:
            return self._when.is_true(values)
        except ExpressionFailed:
            return self.rule.decision != "allow"

    def excludes(self, call: JudgedCall) -> bool:
        """Whether it is for tools that only read, and this one does not say so of itself."""
        return self.rule.read_only and not call.read_only

    def fault(self, call: JudgedCall, values: Mapping[str, Any]) -> str:
        """What the call does not satisfy; empty when there is nothing."""
        if self._schema is not None and (fault := self._schema.fault(call.arguments)):
            return fault
        for expression, reason in self._requirements:
            try:
                if not expression.is_true(values):
                    return reason or f"it must hold that {expression.text}"
            except ExpressionFailed as error:
                return f"it must hold that {reason or expression.text}, which cannot be told: {error}"
        return ""


def checked(rules: Iterable[ToolRule]) -> list[CheckedRule]:
    """The rules of a policy, in order, numbered from 1."""
    return [CheckedRule(number, rule) for number, rule in enumerate(rules, 1)]


def unfit_verdict(call: JudgedCall) -> Verdict | None:
    """A refusal of arguments that no rule could look at."""
    reason = unfit(dict(call.arguments))
    return refusal(f"the arguments cannot be checked: {reason}", "arguments", OTHER_ARGUMENTS) if reason else None


def refusal(reason: str, rule: str, then: str = "") -> Verdict:
    """A no, in words for the code that asked, which knows what it called; and what to do now."""
    said = f"the policy does not allow this call: {reason} ({rule})"
    return Verdict("deny", f"{said}. {then}" if then else said, rule)


def _is_match(pattern: str, call: JudgedCall) -> bool:
    if pattern == "*":
        return True
    # Apart from each other, so that a * does not reach over the dot. Names may have dots too, so any may part the two:
    # a rule that forbids would else be passed by.
    return any(
        fnmatchcase(call.server, pattern[:dot]) and fnmatchcase(call.tool, pattern[dot + 1 :])
        for dot, character in enumerate(pattern)
        if character == "."
    )
