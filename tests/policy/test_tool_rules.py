"""Rules for tools: who may call what, how often, and with which arguments."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from belljar.hooks import ToolCallFacts, Verdict
from belljar.policy.decision_log import DecisionLog
from belljar.policy.guard import CompiledPolicy, Guard, GuardState, compile_policy
from belljar.policy.guardrails import parse_policy


def book(text: str) -> CompiledPolicy:
    return compile_policy(parse_policy(text, "policy.toml").policy)


def guard(text: str) -> Guard:
    return Guard(book(text), "session", "someone")


def call(server: str, tool: str, arguments: dict[str, Any] | None = None, **claims: bool) -> ToolCallFacts:
    return ToolCallFacts("session", "someone", server, tool, arguments or {}, **claims)


def judged(
    guard: Guard,
    name: str,
    arguments: dict[str, Any] | None = None,
    *,
    read_only: bool = False,
    destructive: bool = True,
) -> Verdict:
    server, _, tool = name.partition(".")
    return asyncio.run(guard.judge(call(server, tool, arguments, read_only=read_only, destructive=destructive)))


def decision(text: str, name: str, arguments: dict[str, Any] | None = None, **claims: bool) -> tuple[str, str]:
    verdict = judged(guard(text), name, arguments, **claims)
    return verdict.decision, verdict.rule


def test_without_rules_everything_is_allowed() -> None:
    assert decision("", "any.thing") == ("allow", "")


FIRST_WINS = """
default = "deny"
[[tools]]
match = "git.get_*"
decision = "allow"
[[tools]]
match = ["git.*", "mail.send"]
decision = "ask"
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("git.get_log", ("allow", "tools.1")),
        ("git.push", ("ask", "tools.2")),
        ("mail.send", ("ask", "tools.2")),
        ("mail.sender", ("deny", "default")),
        ("other.get_log", ("deny", "default")),
        ("git.GET_LOG", ("ask", "tools.2")),
    ],
)
def test_the_first_rule_that_decides_wins(name: str, expected: tuple[str, str]) -> None:
    assert decision(FIRST_WINS, name) == expected


def test_a_dot_in_a_tools_name_does_not_make_it_another_servers() -> None:
    verdict = asyncio.run(guard(FIRST_WINS).judge(call("git.get_x", "y")))
    assert verdict.decision == "deny"


def test_a_server_with_a_dot_in_its_name_is_not_passed_by() -> None:
    rules = guard('[[tools]]\nmatch = "acme.crm.delete_*"\ndecision = "deny"')
    verdict = asyncio.run(rules.judge(call("acme.crm", "delete_all")))
    assert verdict.decision == "deny"


def test_strict_denies_what_no_rule_decides_on() -> None:
    assert decision("strict = true", "any.thing") == ("deny", "strict")
    assert decision('strict = true\ndefault = "ask"', "any.thing") == ("ask", "default")


def test_read_only_lets_through_what_says_so_and_what_a_rule_allows() -> None:
    text = 'read_only = true\n[[tools]]\nmatch = "git.commit"\ndecision = "allow"'
    assert decision(text, "git.log", read_only=True)[0] == "allow"
    assert decision(text, "git.push") == ("deny", "read_only")
    assert decision(text, "git.commit")[0] == "allow"
    assert decision('[[tools]]\nmatch = "git.*"\nread_only = true', "git.push") == ("deny", "tools.1")


def test_tools_that_may_destroy_are_asked_about_where_the_policy_says_so() -> None:
    assert decision('destructive = "ask"', "git.push") == ("ask", "destructive")
    assert decision('destructive = "ask"', "git.log", read_only=True)[0] == "allow"
    assert decision('destructive = "ask"', "git.add", destructive=False)[0] == "allow"


PAYMENTS = """
[[tools]]
match = "pay.transfer"
reason = "payments"
require = [
  "arguments.amount > 0 && arguments.amount <= 100.0",
  {expression = "arguments.to.endsWith('@example.com')", reason = "only to colleagues"},
]
arguments = {type = "object", required = ["amount"], properties = {note = {type = "string", maxLength = 5}}}
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"amount": 500, "to": "a@example.com"}, "it must hold that arguments.amount"),
        ({"amount": "5", "to": "a@example.com"}, "cannot be told"),
        ({"amount": None, "to": "a@example.com"}, "cannot be told"),
        ({"amount": 5, "to": "a@example.org"}, "only to colleagues"),
        ({"amount": 5}, "no value under 'to'"),
        ({"to": "a@example.com"}, "'amount' is a required property"),
        ({"amount": 5, "to": "a@example.com", "note": "too long"}, "arguments.note does not satisfy maxLength: 5"),
        ({"amount": float("nan"), "to": "a@example.com"}, "amount"),
        ({"amount": 5, "to": "a@example.com\0@example.org"}, "only to colleagues"),
        ({"amount": 5, "to": "\ud800"}, "lone surrogate"),
    ],
)
def test_arguments_outside_of_the_rules_are_refused_with_the_reason(arguments: dict[str, Any], said: str) -> None:
    verdict = judged(guard(PAYMENTS), "pay.transfer", arguments)
    assert verdict.decision == "deny"
    assert said in verdict.reason


def test_arguments_within_the_rules_pass() -> None:
    assert decision(PAYMENTS, "pay.transfer", {"amount": 5, "to": "a@example.com", "note": "hi"})[0] == "allow"
    assert decision(PAYMENTS, "pay.transfer", {"amount": 99.5, "to": "a@example.com"})[0] == "allow"


def test_a_refusal_does_not_repeat_the_value() -> None:
    verdict = judged(guard(PAYMENTS), "pay.transfer", {"amount": 5, "to": "a@example.com", "note": "my-secret"})
    assert "my-secret" not in verdict.reason


def test_a_condition_chooses_the_calls_that_a_rule_holds_for() -> None:
    text = '[[tools]]\nmatch = "*"\nwhen = "arguments.amount > 100"\ndecision = "ask"'
    assert decision(text, "pay.transfer", {"amount": 101})[0] == "ask"
    assert decision(text, "pay.transfer", {"amount": 100})[0] == "allow"


def test_a_condition_that_cannot_be_told_errs_on_the_safe_side() -> None:
    asks = '[[tools]]\nmatch = "*"\nwhen = "arguments.amount > 100"\ndecision = "deny"'
    allows = 'default = "deny"\n[[tools]]\nmatch = "*"\nwhen = "arguments.amount < 100"\ndecision = "allow"'
    assert decision(asks, "pay.transfer")[0] == "deny"
    assert decision(allows, "pay.transfer")[0] == "deny"


def test_values_too_deep_or_too_many_to_be_checked_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "levels deep" in judged(guard(PAYMENTS), "pay.transfer", {"amount": deep}).reason
    assert "more than 100,000" in judged(guard(PAYMENTS), "pay.transfer", {"amount": [0] * 100_001}).reason
    while deep:
        deep = deep.pop()


def test_macros_in_macros_do_not_go_through_values_without_end() -> None:
    nested = guard('[[tools]]\nmatch = "*"\nrequire = "arguments.x.all(a, arguments.x.all(b, a + b >= 0))"')
    assert judged(nested, "a.b", {"x": [1, 2, 3]}).decision == "allow"
    assert "cannot be told: it takes more than 2 s" in judged(nested, "a.b", {"x": [0] * 50_000}).reason
    assert judged(nested, "a.b", {"x": [1, 2, 3]}).decision == "allow"


def test_calls_that_are_judged_at_once_are_counted_one_by_one() -> None:
    counted = guard('[[tools]]\nmatch = "*"\nrequire = "calls < 3 && arguments.x.all(a, a > 0)"')

    async def all_at_once() -> list[Verdict]:
        calls = (counted.judge(call("a", "b", {"x": [1]})) for _ in range(12))
        return await asyncio.gather(*calls)

    assert [verdict.decision for verdict in asyncio.run(all_at_once())].count("allow") == 3


def test_a_pattern_that_would_stall_another_engine_is_answered_at_once() -> None:
    schema = "arguments = {properties = {name = {pattern = '^(a+)+$'}}}"
    verdict = judged(guard(f'[[tools]]\nmatch = "*"\n{schema}'), "a.b", {"name": "a" * 5_000 + "!"})
    assert verdict.decision == "deny"


def test_calls_are_counted_for_the_session_and_only_when_they_may_go_out() -> None:
    both = guard(PAYMENTS + "max_calls = 2\n")
    fine = {"amount": 5, "to": "a@example.com"}
    assert judged(both, "pay.transfer", {**fine, "amount": 500}).decision == "deny"
    assert [judged(both, "pay.transfer", fine).decision for _ in range(3)] == ["allow", "allow", "deny"]
    assert "2 calls in this session are the most" in judged(both, "pay.transfer", fine).reason


def test_expressions_know_how_often_a_tool_was_called() -> None:
    counted = guard('[[tools]]\nmatch = "*"\nwhen = "calls >= 2"\ndecision = "ask"')
    assert [judged(counted, "a.b").decision for _ in range(3)] == ["allow", "allow", "ask"]
    assert judged(counted, "a.c").decision == "allow"


def test_rates_hold_over_all_sessions_of_one_principal_and_not_for_others() -> None:
    shared = book('[[tools]]\nmatch = "*"\nrate = "2/hour"')
    first, second, other = Guard(shared, "1", "me"), Guard(shared, "2", "me"), Guard(shared, "3", "you")
    assert judged(first, "a.b").decision == "allow"
    assert judged(second, "a.b").decision == "allow"
    refused = judged(first, "a.b")
    assert refused.decision == "deny"
    assert "2/hour is the most, try again in" in refused.reason
    assert judged(other, "a.b").decision == "allow"


def test_a_yes_holds_for_the_session_where_the_rule_says_so() -> None:
    asked = guard('[[tools]]\nmatch = "*"\ndecision = "ask"\nask_once = true')
    declined = judged(asked, "a.b")
    asked.record_decision(call("a", "b"), declined, "declined")
    approved = judged(asked, "a.b")
    asked.record_decision(call("a", "b"), approved, "approved")
    assert [declined.decision, approved.decision, judged(asked, "a.b").decision] == ["ask", "ask", "allow"]


def test_counts_yeses_and_names_outlive_the_guard_and_go_to_forks(tmp_path: Path) -> None:
    shared = compile_policy(
        parse_policy('[[tools]]\nmatch = "*"\nmax_calls = 1\n[[code]]\ncalls = "os.system"', "p").policy,
        log=DecisionLog(tmp_path),
    )
    judged(Guard(shared, "1", "me", tmp_path), "a.b")
    woken = Guard(shared, "1", "me", tmp_path)
    assert judged(woken, "a.b").decision == "deny"
    fork = Guard(shared, "2", "me")
    assert judged(Guard(shared, "3", "me"), "a.b").decision == "allow"
    fork.inherit(woken)
    assert judged(fork, "a.b").decision == "deny"


def test_no_number_of_names_makes_a_guard_forget_what_it_counted(tmp_path: Path) -> None:
    shared = compile_policy(
        parse_policy('[[tools]]\nmatch = "*"\nmax_calls = 1', "p").policy, log=DecisionLog(tmp_path)
    )
    memory = GuardState(tmp_path)
    names = memory.names.copy()
    names.origins |= {f"name_{number}": {f"{'x' * 190}{each}" for each in range(16)} for number in range(5_000)}
    memory.learn(names)
    judged(Guard(shared, "1", "me", tmp_path), "a.b")
    woken = Guard(shared, "1", "me", tmp_path)
    assert judged(woken, "a.b").decision == "deny"
    assert len(GuardState(tmp_path).names.origins) == 5_000


UNIQUE = """
[[tools]]
match = "a.b"
[tools.arguments.properties.items]
uniqueItems = true
[tools.arguments.properties.amount]
multipleOf = 0.5
[tools.arguments.properties.shape]
format = "regex"
"""


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ({"items": [{"number": number} for number in range(30_000)]}, True),
        ({"items": [{"number": number} for number in range(30_000)] + [{"number": 5.0}]}, False),
        ({"items": [1, True, "1", [1], {"1": 1}, None]}, True),
        ({"items": [{"x": 1, "y": 2}, {"y": 2, "x": 1}]}, False),
        ({"amount": 10**400}, False),
        ({"shape": "(" * 5_000 + ")" * 5_000}, False),
    ],
    ids=["many", "one twice", "other types", "other order", "a number without end", "a shape without end"],
)
def test_values_that_are_hard_to_check_neither_stall_nor_break_the_guard(
    arguments: dict[str, Any], is_allowed: bool
) -> None:
    assert judged(guard(UNIQUE), "a.b", arguments).decision == ("allow" if is_allowed else "deny")
