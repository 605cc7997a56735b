"""The decision log: every decision on record, no value in it, and an end to its growth."""

import asyncio
import json
from pathlib import Path

import pytest

from belljar.facts import ToolCallFacts
from belljar.policy.decision_log import FILE, DecisionLog
from belljar.policy.guard import Guard, compile_policy
from belljar.policy.guardrails import parse_policy

POLICY = '[[tools]]\nmatch = "mail.*"\ndecision = "ask"\n[[code]]\ncalls = "eval"\ndecision = "warn"'


def test_decisions_are_kept_with_ids_and_rule_and_without_values(tmp_path: Path) -> None:
    guard = Guard(
        compile_policy(parse_policy(POLICY, "p").policy, DecisionLog(tmp_path)), "session-1", "someone@example.com"
    )
    call = ToolCallFacts("session-1", "someone@example.com", "mail", "send", {"to": "a-secret"})
    verdict = asyncio.run(guard.judge(call))
    guard.record_decision(call, verdict, "declined")
    (line,) = (tmp_path / FILE).read_text().splitlines()
    told = json.loads(line)
    assert told.pop("at").endswith("Z")
    assert "example.com" not in told.pop("principal")
    assert told == {
        "session": "session-1",
        "server": "mail",
        "tool": "send",
        "decision": "ask",
        "rule": "tools.1",
        "outcome": "declined",
    }
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.anyio
async def test_findings_in_code_are_kept_with_their_line_and_without_the_code(tmp_path: Path) -> None:
    guard = Guard(compile_policy(parse_policy(POLICY, "p").policy, DecisionLog(tmp_path)), "session-1", "me")
    guard.record_code_decision("execution-1", await guard.examine("x = 1\neval('my secret')", ""), "allowed")
    (line,) = (tmp_path / FILE).read_text().splitlines()
    told = json.loads(line)
    assert (told["execution"], told["line"], told["decision"], told["rule"]) == ("execution-1", 2, "warn", "code.1")
    assert "secret" not in line


def test_names_are_cut_and_cannot_forge_a_line(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    log.write(tool='x"}\n{"decision": "allow"' + "y" * 10_000)
    (line,) = (tmp_path / FILE).read_text().splitlines()
    assert len(line) < 400
    assert set(json.loads(line)) == {"at", "tool"}


def test_the_file_is_turned_over_and_never_grows_past_its_limit(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, most_bytes=2_000)
    for number in range(200):
        log.write(tool=f"tool-{number}")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["decisions.1.jsonl", "decisions.jsonl"]
    assert all(file.stat().st_size <= 2_000 for file in files)
    assert "tool-199" in (tmp_path / FILE).read_text()


def test_a_log_that_cannot_be_written_does_not_stop_the_call(tmp_path: Path) -> None:
    DecisionLog(tmp_path / "missing").write(tool="x")
