"""Checks tool calls against the policy's rules for tools: which rules apply, what they refuse. It keeps no counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from belljar.facts import Verdict
from belljar.policy.expressions import Expression, ExpressionFailed
from belljar.policy.rules import ToolRule, parse_rate
from belljar.policy.schemas import ArgumentSchema, unfit

WITHOUT = "Do without it: only the operator can change that"
OTHER_ARGUMENTS = "Call it with arguments that satisfy this"


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """A tool call that a session asks for, with the arguments as its code gave them."""

    server: str
    tool: str
    arguments: Mapping[str, Any]
    read_only: bool
    destructive: bool
    calls: int = 0
    """How often the session called this tool before."""

    def values(self) -> dict[str, Any]:
        """Return the variables that expressions may use."""
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
        """Return whether the rule is about this tool."""
        return any(_is_match(pattern, call) for pattern in self.rule.match)

    async def holds(self, call: JudgedCall, values: Mapping[str, Any]) -> bool:
        """Return whether the rule's condition is true of the call.

        If the condition has no value, a rule that allows does not hold and every other rule does.
        """
        if self._when is None:
            return True
        try:
            return await self._when.is_true(values)
        except ExpressionFailed:
            return self.rule.decision != "allow"

    def excludes(self, call: JudgedCall) -> bool:
        """Return whether the rule allows read-only tools only, and this tool does not declare itself read-only."""
        return self.rule.read_only and not call.read_only

    async def fault(self, call: JudgedCall, values: Mapping[str, Any]) -> str:
        """Return what the call does not satisfy, or an empty text."""
        if self._schema is not None and (fault := self._schema.fault(call.arguments)):
            return fault
        for expression, reason in self._requirements:
            try:
                if not await expression.is_true(values):
                    return reason or f"it must hold that {expression.text}"
            except ExpressionFailed as error:
                return f"it must hold that {reason or expression.text}, which cannot be told: {error}"
        return ""


def checked(rules: Iterable[ToolRule]) -> list[CheckedRule]:
    """Compile the rules of a policy, numbered from 1 in their order."""
    return [CheckedRule(number, rule) for number, rule in enumerate(rules, 1)]


def unfit_verdict(call: JudgedCall) -> Verdict | None:
    """Return a refusal if the arguments are too large, too deep or otherwise impossible to check."""
    reason = unfit(dict(call.arguments))
    return refusal(f"the arguments cannot be checked: {reason}", "arguments", OTHER_ARGUMENTS) if reason else None


def refusal(reason: str, rule: str, then: str = "") -> Verdict:
    """Return a denial in words for the code that called, which knows what it called; `then` says what to do now."""
    message = f"the policy does not allow this call: {reason} ({rule})"
    return Verdict("deny", f"{message}. {then}" if then else message, rule)


def _is_match(pattern: str, call: JudgedCall) -> bool:
    if pattern == "*":
        return True
    # Match server and tool separately, so that a * does not reach over the dot. Names may contain dots too, so try
    # every dot as the separator: otherwise a call could get past a rule that forbids it.
    return any(
        fnmatchcase(call.server, pattern[:dot]) and fnmatchcase(call.tool, pattern[dot + 1 :])
        for dot, character in enumerate(pattern)
        if character == "."
    )
