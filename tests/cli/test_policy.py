import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]

POLICY = """
[[tools]]
match = "git.push"
decision = "ask"
reason = "it is public then"

[[tools]]
match = "pay.*"
require = "arguments.amount < 100"

[[code]]
calls = "os.system"

[privacy]
hide = ["email"]
"""


def policy(text: str = POLICY) -> str:
    Path("policy.toml").write_text(text)
    return "policy.toml"


def test_check_says_that_a_file_is_in_order(belljar: Run) -> None:
    outcome = belljar("policy", "check", policy())
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "policy.toml is in order: rules: 2 for tools, 1 for code, 0 for output, and privacy\n"
    assert json.loads(belljar("policy", "check", policy(), "--json").out) == {"tools": 2, "code": 1, "output": 0}


def test_check_tells_line_and_reason_of_every_table(belljar: Run) -> None:
    outcome = belljar("policy", "check", policy(POLICY.replace('"ask"', '"aks"')))
    assert (outcome.code, outcome.out) == (2, "")
    assert "line 4: tools.1.decision: it should be 'allow', 'ask' or 'deny'" in outcome.err
    assert "hint:" not in outcome.err
    assert belljar("policy", "check", policy(POLICY.replace("hide", "hied"))).err.startswith(
        "error: policy policy.toml, line 15: privacy.hied: no such key"
    )


def test_test_tells_what_becomes_of_a_call(belljar: Run) -> None:
    allowed = belljar("policy", "test", policy(), "--call", "pay.out", '{"amount": 5}')
    assert (allowed.code, allowed.out) == (0, "allow\n")
    denied = belljar("policy", "test", policy(), "--call", "pay.out", '{"amount": 500}')
    assert denied.code == 1
    assert denied.out.startswith("deny: the policy does not allow this call: it must hold that arguments.amount")
    asked = belljar("policy", "test", policy(), "--call", "git.push", "{}", "--json")
    assert asked.code == 1
    assert json.loads(asked.out) == {"decision": "ask", "rule": "tools.1", "reason": "it is public then"}
    assert belljar("policy", "test", policy(), "--strict", "--call", "other.tool", "{}").code == 1


def test_test_tells_what_becomes_of_code(belljar: Run) -> None:
    Path("cell.py").write_text("import os as o\no.system('ls')\n")
    outcome = belljar("policy", "test", policy(), "--code", "cell.py")
    assert (outcome.code, outcome.out) == (1, "deny\n  line 2: os.system (code.1)\n")
    Path("cell.py").write_text("df.system()\n")
    assert belljar("policy", "test", policy(), "--code", "cell.py").out == "allow\n"


def test_what_is_no_call_is_refused(belljar: Run) -> None:
    for arguments in (["--call", "pay.out", "{"], ["--call", "pay", "{}"], ["--call", "pay.out", "[]"], []):
        outcome = belljar("policy", "test", policy(), *arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert "hint: " in outcome.err
