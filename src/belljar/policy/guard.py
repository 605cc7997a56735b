"""A session's guard: judges its tool calls and its code, filters its output and logs the decisions.

The guard only decides. Asking the person, making the call and running the code are done by its callers.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belljar.facts import Verdict
from belljar.logs import pseudonym
from belljar.outputs.recorder import OutputScreen
from belljar.policy.cell_syntax import is_quick
from belljar.policy.code_inspection import Finding, Inspection, Inspector
from belljar.policy.decision_log import DecisionLog
from belljar.policy.guard_state import GuardState, Rates
from belljar.policy.output_filter import FilterScreen
from belljar.policy.rules import Policy
from belljar.policy.tool_calls import OTHER_ARGUMENTS, WITHOUT, CheckedRule, JudgedCall, checked, refusal, unfit_verdict

KERNEL_MARK = "kernel:"
READS_ONLY = "only tools that say they only read may be called"


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """A compiled policy, shared by the guards of all sessions."""

    policy: Policy
    tools: list[CheckedRule]
    inspector: Inspector
    rates: Rates
    log: DecisionLog | None = None
    """None if there is no policy, because then there are no decisions to log."""


def compile_policy(policy: Policy, log: DecisionLog | None = None) -> CompiledPolicy:
    """Compile a policy."""
    inspector = Inspector(policy.code, is_strict=policy.strict)
    return CompiledPolicy(policy, checked(policy.tools), inspector, Rates(), log)


class Guard:
    """Applies the policy to one session."""

    def __init__(
        self, compiled: CompiledPolicy, session_id: str = "", principal: str = "", folder: Path | None = None
    ) -> None:
        self._compiled = compiled
        self.inspects_code = compiled.inspector.has_rules
        """Whether the policy has rules for code."""
        self.filters_output = bool(compiled.policy.output)
        """Whether the policy has rules for output."""
        self._session_id = session_id
        self._principal = principal
        self._memory = GuardState(folder if compiled.log is not None else None)
        # Expressions are evaluated elsewhere, and no call may be judged by counts that another one is about to change.
        self._judging = asyncio.Lock()

    # Tool calls

    async def judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        """Return whether a call may go out. A call that may counts towards the limits: judge each call once."""
        async with self._judging:
            return await self._judge(server, tool, arguments, read_only=read_only, destructive=destructive)

    async def _judge(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, read_only: bool, destructive: bool
    ) -> Verdict:
        key = _key(server, tool)
        call = JudgedCall(server, tool, arguments, read_only, destructive, self._memory.count(key))
        rules = [rule for rule in self._compiled.tools if rule.matches(call)]
        if rules and (verdict := unfit_verdict(call)) is not None:
            return verdict
        values = call.values() if rules else {}
        rules = [rule for rule in rules if await rule.holds(call, values)]
        verdict = self._decision(call, rules)
        if verdict.decision == "deny":
            return verdict
        for rule in rules:
            if (refused := await self._refused(call, values, rule)) is not None:
                return refused
        # From here on nothing else runs, because what is read here is counted below.
        for rule in rules:
            if (limit := self._limited(rule)) is not None:
                return limit
        self._count(key, rules)
        return verdict

    async def allows(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        read_only: bool,
        destructive: bool,
        is_approved: bool,
    ) -> bool:
        """Return whether a judged call may go out with these arguments instead, without counting it again.

        The session's code passed privacy tokens; `arguments` has the values behind them. The answer gives no reason,
        because a reason could tell the code something about the values.
        """
        call = JudgedCall(server, tool, arguments, read_only, destructive, self._memory.count(_key(server, tool)) - 1)
        rules = [rule for rule in self._compiled.tools if rule.matches(call)]
        if not rules:
            return True
        if unfit_verdict(call) is not None:
            return False
        values = call.values()
        rules = [rule for rule in rules if await rule.holds(call, values)]
        decision = self._decision(call, rules).decision
        is_decided = decision == "allow" or (decision == "ask" and is_approved)
        if not is_decided:
            return False
        for rule in rules:
            if rule.excludes(call) or await rule.fault(call, values):
                return False
        return True

    def record_decision(self, server: str, tool: str, verdict: Verdict, outcome: str, by: str = "") -> None:
        """Log what became of a judged call (`allowed`, `denied`, `approved`, `declined`), and remember an approval.

        `by` is the person who answered outside the client, if one did.
        """
        if outcome == "approved" and self.asks_once(verdict):
            self._memory.approve(verdict.rule)
        person = {"by": by} if by else {}
        self._note(server=server, tool=tool, decision=verdict.decision, rule=verdict.rule, outcome=outcome, **person)

    def asks_once(self, verdict: Verdict) -> bool:
        """Return whether a yes to the rule of a verdict holds for the rest of the session."""
        return any(rule.name == verdict.rule and rule.rule.ask_once for rule in self._compiled.tools)

    def wants_console(self, verdict: Verdict) -> bool:
        """Return whether the rule of a verdict wants its question answered outside the client."""
        return any(rule.name == verdict.rule and rule.rule.answered_in == "console" for rule in self._compiled.tools)

    def _decision(self, call: JudgedCall, rules: list[CheckedRule]) -> Verdict:
        """Return the verdict of the first rule that decides, or else the policy's default for such tools."""
        policy = self._compiled.policy
        for rule in rules:
            if rule.rule.decision is not None:
                return self._by_rule(rule)
        if policy.read_only and not call.read_only:
            return refusal(READS_ONLY, "read_only", WITHOUT)
        if call.destructive and not call.read_only and policy.destructive != "allow":
            return _decided(policy.destructive, "it may destroy something", "destructive")
        default = policy.default or ("deny" if policy.strict else "allow")
        return _decided(default, "no rule decides on it", "default" if policy.default else "")

    def _by_rule(self, rule: CheckedRule) -> Verdict:
        if rule.rule.decision == "ask" and rule.rule.ask_once and self._memory.is_approved(rule.name):
            return Verdict("allow", "approved before in this session", rule.name)
        return _decided(rule.rule.decision or "allow", rule.rule.reason or "the rule says so", rule.name)

    @staticmethod
    async def _refused(call: JudgedCall, values: Mapping[str, Any], rule: CheckedRule) -> Verdict | None:
        """Return a refusal if the rule does not let through such calls, or such arguments."""
        why = _why(rule)
        if rule.excludes(call):
            return refusal(f"{why}{READS_ONLY}", rule.name, WITHOUT)
        if fault := await rule.fault(call, values):
            return refusal(f"{why}{fault}", rule.name, OTHER_ARGUMENTS)
        return None

    def _limited(self, rule: CheckedRule) -> Verdict | None:
        """Return a refusal if there were too many calls, or too many in too short a time."""
        why = _why(rule)
        most = rule.rule.max_calls
        if most is not None and self._memory.count(rule.name) >= most:
            made = "1 call in this session is" if most == 1 else f"{most} calls in this session are"
            return refusal(f"{why}{made} the most", rule.name, WITHOUT)
        if too_fast := self._too_fast(rule):
            return refusal(f"{why}{too_fast}", rule.name)
        return None

    def _too_fast(self, rule: CheckedRule) -> str:
        if rule.rate is not None:
            number, period_s = rule.rate
            wait_s = self._compiled.rates.wait_s((self._principal, rule.name), number, period_s)
            if wait_s > 0:
                return f"{rule.rule.rate} is the most, try again in {wait_s:.1f} s"
        return ""

    def _count(self, key: str, rules: list[CheckedRule]) -> None:
        if not self._compiled.tools:
            return
        self._memory.add(key, *(rule.name for rule in rules if rule.rule.max_calls is not None))
        for rule in rules:
            if rule.rate is not None:
                self._compiled.rates.add((self._principal, rule.name), rule.rate[0])

    # Code

    async def examine(self, code: str, environment: str) -> Inspection:
        """Inspect a cell before it runs; the caller then reports to `record_code_decision` what became of it."""
        if not self.inspects_code:
            return Inspection()
        if environment.startswith(KERNEL_MARK) and self._compiled.policy.other_kernels == "deny":
            what = f"the rules read the Python of belljar's own kernel, and this is {environment}"
            return Inspection("deny", (Finding(1, 0, what, "other_kernels"),), ("",))
        names = self._memory.names.copy()
        if is_quick(code):
            inspection = self._compiled.inspector.inspect(code, names)
        else:
            inspection = await asyncio.to_thread(self._compiled.inspector.inspect, code, names)
        if inspection.decision != "deny":
            # Also learn from code that the person may still refuse, because extra names only lead to more findings.
            self._memory.learn(names)
        return inspection

    def record_code_decision(self, execution_id: str, inspection: Inspection, outcome: str, by: str = "") -> None:
        """Log what became of code with findings: `allowed`, `denied`, `approved` or `declined`, and by whom."""
        person = {"by": by} if by else {}
        for finding in inspection.findings:
            self._note(
                execution=execution_id,
                line=finding.line,
                decision=inspection.decision,
                rule=finding.rule,
                outcome=outcome,
                **person,
            )

    def record_plugin_decision(self, execution_id: str, verdict: Verdict, outcome: str) -> None:
        """Log what became of code that a plugin judged."""
        self._note(execution=execution_id, decision=verdict.decision, rule=verdict.rule, outcome=outcome)

    # Output, forks, log

    def screens(self) -> list[OutputScreen]:
        """Return new screens, the filters that one execution's output passes through."""
        return [FilterScreen(self._compiled.policy.output)] if self._compiled.policy.output else []

    def inherit(self, origin: "Guard") -> None:
        """Take over the state of the session that this one was forked from: its counts, approvals and names."""
        self._memory.inherit(origin._memory)

    def _note(self, **fields: str | int) -> None:
        if self._compiled.log is not None:
            self._compiled.log.write(session=self._session_id, principal=pseudonym(self._principal), **fields)


def _decided(decision: str, reason: str, rule: str) -> Verdict:
    if decision == "deny":
        return refusal(reason, rule or "strict", WITHOUT)
    return Verdict("ask" if decision == "ask" else "allow", reason if decision == "ask" else "", rule)


def _why(rule: CheckedRule) -> str:
    return f"{rule.rule.reason}: " if rule.rule.reason else ""


def _key(server: str, tool: str) -> str:
    return f"{server}\n{tool}"
