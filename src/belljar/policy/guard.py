"""A session's guard: judges its tool calls and its code, filters its output and logs the decisions.

The guard only decides. Asking the person, making the call and running the code are done by its callers. What it
counts is in files beside the session's folder, where cells cannot reach them: names in code, rules and numbers, never
values.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from belljar.facts import ToolCallFacts, Verdict
from belljar.files.private import replace_file
from belljar.logs import pseudonym
from belljar.outputs.recorder import OutputScreen
from belljar.policy.cell_syntax import is_quick
from belljar.policy.code_inspection import CodeFinding, Inspection, Inspector
from belljar.policy.code_names import CodeNames
from belljar.policy.decision_log import DecisionLog
from belljar.policy.expressions import Expression, ExpressionFailed
from belljar.policy.output_filter import FilterScreen
from belljar.policy.rates import Rates
from belljar.policy.rules import Policy, ToolRule, parse_rate
from belljar.policy.schemas import ArgumentSchema, unfit
from belljar.settings.environments import KERNEL_PREFIX

READS_ONLY = "only tools that say they only read may be called"
WITHOUT = "Do without it: only the operator can change that"
OTHER_ARGUMENTS = "Call it with arguments that satisfy this"
FILE = "guard.json"
NAMES_FILE = "guard-names.json"
"""A file of its own, because cells decide how many names there are, which must not endanger counts and approvals."""
MAX_BYTES = 32 * 1024 * 1024
MAX_COUNTED = 10_000
Approval = Literal["", "anywhere", "console"]
"""Where the question was put to which a person said yes: what is asked in the console only operators may answer."""

log = logging.getLogger(__name__)


class GuardState:
    """The counts, approvals and names of one session. Without a folder they last as long as the object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder else None
        self._names_path = folder / NAMES_FILE if folder else None
        self.names = CodeNames()
        self._counts: dict[str, int] = {}
        self._approved: set[str] = set()
        self._read()

    def count(self, key: str) -> int:
        """Return how often a key was added."""
        return self._counts.get(key, 0)

    def add(self, *keys: str) -> None:
        """Add one to the count of each key."""
        for key in keys:
            # Keys of rules are always counted, because they are few and carry limits. Keys of tools are bounded,
            # because a server may have any number of tools.
            if key in self._counts or len(self._counts) < MAX_COUNTED or key.startswith("tools."):
                self._counts[key] = self._counts.get(key, 0) + 1
        self._write()

    def is_approved(self, rule: str) -> bool:
        """Return whether the person approved this rule for the rest of the session."""
        return rule in self._approved

    def approve(self, rule: str) -> None:
        """Remember that the person approved this rule for the rest of the session."""
        self._approved.add(rule)
        self._write()

    def learn(self, names: CodeNames) -> None:
        """Replace the names, and write them if they changed."""
        if names != self.names:
            self.names = names
            self._write_names()

    def inherit(self, other: "GuardState") -> None:
        """Copy the state of the session that this one was forked from."""
        has_names = other.names.origins or other.names.starred or other.names.bound
        self.names = other.names.copy() if has_names else CodeNames()
        self._counts, self._approved = dict(other._counts), set(other._approved)
        self._write()
        self._write_names()

    def _write(self) -> None:
        _write_json(self._path, {"counts": self._counts, "approved": sorted(self._approved)})

    def _write_names(self) -> None:
        names = {name: sorted(origins) for name, origins in self.names.origins.items()}
        starred, bound = sorted(self.names.starred), sorted(self.names.bound)
        _write_json(self._names_path, {"names": names, "starred": starred, "bound": bound})

    def _read(self) -> None:
        try:
            if kept := _read_json(self._path):
                self._counts, self._approved = dict(kept["counts"]), set(kept["approved"])
            if kept := _read_json(self._names_path):
                names = {name: set(origins) for name, origins in kept["names"].items()}
                self.names = CodeNames(names, set(kept["starred"]), set(kept["bound"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read and is begun anew: %s", FILE, type(error).__name__)


def _write_json(path: Path | None, values: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        replace_file(path, json.dumps(values))
    except OSError as error:
        log.warning("%s is not kept: %s", path.name, error.strerror)


def _read_json(path: Path | None) -> Mapping[str, Any] | None:
    if path is None or not path.exists() or path.stat().st_size > MAX_BYTES:
        return None
    kept: Any = json.loads(path.read_text("utf-8"))
    return kept


def call_values(call: ToolCallFacts, calls: int) -> dict[str, Any]:
    """Return the variables that expressions may use; `calls` is how often the session called the tool before."""
    return {
        "arguments": dict(call.arguments),
        "server": call.server,
        "tool": call.tool,
        "read_only": call.read_only,
        "destructive": call.destructive,
        "calls": calls,
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

    def matches(self, call: ToolCallFacts) -> bool:
        """Return whether the rule is about this tool."""
        return any(_is_match(pattern, call) for pattern in self.rule.match)

    async def holds(self, call: ToolCallFacts, values: Mapping[str, Any]) -> bool:
        """Return whether the rule's condition is true of the call.

        If the condition has no value, a rule that allows does not hold and every other rule does.
        """
        if self._when is None:
            return True
        try:
            return await self._when.is_true(values)
        except ExpressionFailed:
            return self.rule.decision != "allow"

    def excludes(self, call: ToolCallFacts) -> bool:
        """Return whether the rule allows read-only tools only, and this tool does not declare itself read-only."""
        return self.rule.read_only and not call.read_only

    async def fault(self, call: ToolCallFacts, values: Mapping[str, Any]) -> str:
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


def unfit_verdict(call: ToolCallFacts) -> Verdict | None:
    """Return a refusal if the arguments are too large, too deep or otherwise impossible to check."""
    reason = unfit(dict(call.arguments))
    return refusal(f"the arguments cannot be checked: {reason}", "arguments", OTHER_ARGUMENTS) if reason else None


def refusal(reason: str, rule: str, then: str = "") -> Verdict:
    """Return a denial in words for the code that called, which knows what it called; `then` says what to do now."""
    message = f"the policy does not allow this call: {reason} ({rule})"
    return Verdict("deny", f"{message}. {then}" if then else message, rule)


def _is_match(pattern: str, call: ToolCallFacts) -> bool:
    if pattern == "*":
        return True
    # Match server and tool separately, so that a * does not reach over the dot. Names may contain dots too, so try
    # every dot as the separator: otherwise a call could get past a rule that forbids it.
    return any(
        fnmatchcase(call.server, pattern[:dot]) and fnmatchcase(call.tool, pattern[dot + 1 :])
        for dot, character in enumerate(pattern)
        if character == "."
    )


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """A compiled policy, shared by the guards of all sessions."""

    policy: Policy
    tools: list[CheckedRule]
    inspector: Inspector
    rates: Rates
    log: DecisionLog | None = None
    """None if there is no policy, because then there are no decisions to log."""


def compile_policy(policy: Policy, log: DecisionLog | None = None, rates: Rates | None = None) -> CompiledPolicy:
    """Compile a policy, whose rates are counted alone or together with others."""
    inspector = Inspector(policy.code, is_strict=policy.strict)
    return CompiledPolicy(policy, checked(policy.tools), inspector, rates or Rates(), log)


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

    async def judge(self, call: ToolCallFacts) -> Verdict:
        """Return whether a call may go out. A call that may counts towards the limits: judge each call once."""
        async with self._judging:
            return await self._judge(call)

    async def _judge(self, call: ToolCallFacts) -> Verdict:
        key = _key(call)
        rules = [rule for rule in self._compiled.tools if rule.matches(call)]
        if rules and (verdict := unfit_verdict(call)) is not None:
            return verdict
        values = call_values(call, self._memory.count(key)) if rules else {}
        rules = [rule for rule in rules if await rule.holds(call, values)]
        verdict = self._decision(call, rules)
        if verdict.decision == "deny":
            return verdict
        for rule in rules:
            if (refused := await self._refused(call, values, rule)) is not None:
                return refused
        # From here on nothing else runs, because what is read here is counted below.
        has_rates = any(rule.rate is not None for rule in rules)
        with self._compiled.rates.turn() if has_rates else nullcontext():
            for rule in rules:
                if (limit := self._limited(rule)) is not None:
                    return limit
            self._count(key, rules)
        return verdict

    async def allows(self, call: ToolCallFacts, approved: Approval) -> bool:
        """Return whether a judged call may go out with these arguments instead, without counting it again.

        The session's code passed privacy tokens; the arguments have the values behind them. The answer gives no reason,
        because a reason could tell the code something about the values.
        """
        rules = [rule for rule in self._compiled.tools if rule.matches(call)]
        if not rules:
            return True
        if unfit_verdict(call) is not None:
            return False
        values = call_values(call, self._memory.count(_key(call)) - 1)
        rules = [rule for rule in rules if await rule.holds(call, values)]
        verdict = self._decision(call, rules)
        # Who said yes to other arguments may be nobody who may allow these.
        is_approved = approved == "console" or (approved == "anywhere" and not self.wants_console(verdict))
        if verdict.decision != "allow" and not (verdict.decision == "ask" and is_approved):
            return False
        for rule in rules:
            if rule.excludes(call) or await rule.fault(call, values):
                return False
        return True

    async def allows_changed(self, judged: ToolCallFacts, call: ToolCallFacts, approved: Approval) -> bool:
        """Return whether a judged call may go out with the arguments that a person gave it.

        If so, it counts towards the limits of the rules that hold only now.
        """
        async with self._judging:
            if not await self.allows(call, approved):
                return False
            count = self._memory.count(_key(call)) - 1
            before, after = call_values(judged, count), call_values(call, count)
            added = [
                rule
                for rule in self._compiled.tools
                if rule.matches(call) and await rule.holds(call, after) and not await rule.holds(judged, before)
            ]
            has_rates = any(rule.rate is not None for rule in added)
            with self._compiled.rates.turn() if has_rates else nullcontext():
                if any(self._limited(rule) is not None for rule in added):
                    return False
                self._count_rules(added)
            return True

    def record_decision(
        self, call: ToolCallFacts, verdict: Verdict, outcome: str, by: str = "", *, execution_id: str = ""
    ) -> None:
        """Log what became of a judged call (`allowed`, `denied`, `approved`, `declined`), and remember an approval.

        `by` is the person who answered outside the client, if one did.
        """
        if outcome == "approved" and self.asks_once(verdict):
            self._memory.approve(verdict.rule)
        # The rule's own reason: that of a refusal may have values in it.
        rules = [rule.rule.reason for rule in self._compiled.tools if rule.name == verdict.rule]
        self._note(
            execution=execution_id,
            server=call.server,
            tool=call.tool,
            decision=verdict.decision,
            rule=verdict.rule,
            reason=rules[0] if rules else "",
            outcome=outcome,
            by=by,
        )

    def asks_once(self, verdict: Verdict) -> bool:
        """Return whether a yes to the rule of a verdict holds for the rest of the session."""
        return any(rule.name == verdict.rule and rule.rule.ask_once for rule in self._compiled.tools)

    def wants_console(self, verdict: Verdict) -> bool:
        """Return whether the rule of a verdict wants its question answered outside the client."""
        return any(rule.name == verdict.rule and rule.rule.answered_in == "console" for rule in self._compiled.tools)

    def _decision(self, call: ToolCallFacts, rules: list[CheckedRule]) -> Verdict:
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
    async def _refused(call: ToolCallFacts, values: Mapping[str, Any], rule: CheckedRule) -> Verdict | None:
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
        self._memory.add(key)
        self._count_rules(rules)

    def _count_rules(self, rules: list[CheckedRule]) -> None:
        self._memory.add(*(rule.name for rule in rules if rule.rule.max_calls is not None))
        for rule in rules:
            if rule.rate is not None:
                self._compiled.rates.add((self._principal, rule.name), rule.rate[0])

    # Code

    async def examine(self, code: str, environment: str) -> Inspection:
        """Inspect a cell before it runs; the caller then reports to `record_code_decision` what became of it."""
        if not self.inspects_code:
            return Inspection()
        if environment.startswith(KERNEL_PREFIX) and self._compiled.policy.other_kernels == "deny":
            what = f"the rules read the Python of belljar's own kernel, and this is {environment}"
            return Inspection("deny", (CodeFinding(1, 0, what, "other_kernels"),), ("",))
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
        for place, finding in enumerate(inspection.findings):
            self._note(
                execution=execution_id,
                line=finding.line,
                what=finding.what,
                decision=inspection.decision,
                rule=finding.rule,
                reason=inspection.reasons[place] if place < len(inspection.reasons) else "",
                outcome=outcome,
                by=by,
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


def _key(call: ToolCallFacts) -> str:
    return f"{call.server}\n{call.tool}"
