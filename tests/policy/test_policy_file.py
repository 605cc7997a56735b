"""Policy files: what is wrong with one is told with the line it stands in."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from belljar.errors import PolicyError
from belljar.policy.guardrails import load_policy, parse_policy

GOOD = '''
# a comment with [[tools]] in it
strict = false

[limits]
max_execution_time = 30

[[tools]]
match = "a.*"
reason = """
decision = "none of your business"
[[tools]]
"""

[[tools]]
match = ["b.c", "d.?"]
decision = "ask"
require = ["arguments.x < 3"]

[[code]]
imports = "subprocess"

[[output]]
text = "hunter2"
'''


def fault(text: str) -> str:
    with pytest.raises(PolicyError) as raised:
        parse_policy(text, "policy.toml")
    assert raised.value.code == "invalid-policy"
    return raised.value.message


def with_line(number: int, text: str) -> str:
    lines = GOOD.splitlines()
    lines[number - 1] = text
    return "\n".join(lines)


def test_a_file_in_order_is_read() -> None:
    policy = parse_policy(GOOD, "policy.toml").policy
    assert [rule.match for rule in policy.tools] == [["a.*"], ["b.c", "d.?"]]
    assert policy.limits.max_execution_time == 30


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        (3, "strikt = false", "line 3: strikt: no such key"),
        (3, 'strict = "very"', "line 3: strict: it should be a valid boolean"),
        (6, "max_execution_time = 0", "line 6: limits.max_execution_time: it should be greater than 0"),
        (
            6,
            'allowed_networks = ["http://x/y"]',
            "line 6: limits.allowed_networks.1: 'http://x/y:443' is not HOST:PORT",
        ),
        (9, 'match = "everything"', "line 9: tools.1.match.1: 'everything' names no tool"),
        (16, 'match = ["b.c", "d"]', "line 16: tools.2.match.2: 'd' names no tool"),
        (17, 'decision = "perhaps"', "line 17: tools.2.decision: it should be 'allow', 'ask' or 'deny'"),
        (17, 'rate = "10/fortnight"', "line 17: tools.2.rate: '10/fortnight' is no rate"),
        (
            18,
            'require = ["arguments.x <"]',
            "line 18: tools.2.require.1.expression: 'arguments.x <' is no CEL expression",
        ),
        (18, 'require = ["argument.x < 1"]', "'argument.x < 1' names 'argument'; there are arguments, server"),
        (18, "arguments = {type = 'text'}", "line 18: tools.2.arguments: type is no JSON Schema"),
        (18, "arguments = {'$ref' = 'https://example.com/s'}", "leads out of the file"),
        (18, "arguments = {properties = {a = {pattern = '(?=a)'}}}", "'(?=a)' is no regular expression that RE2 takes"),
        (21, 'patterns = "open("', "line 21: code.1.patterns.1: 'open(' is no expression of Python"),
        (21, 'patterns = "_"', "line 21: code.1.patterns.1: '_' matches everything"),
        (21, 'imports = "a b"', "line 21: code.1.imports.1: 'a b' is no dotted name"),
        (21, "", "line 20: code.1: the rule blocks nothing"),
        (24, 'pattern = "(a"', "line 24: output.1.pattern: '(a' is no regular expression that RE2 takes: missing )"),
        (24, 'pattern = "a*"', "line 24: output.1.pattern: 'a*' matches the empty text"),
        (24, 'text = "a"\npattern = "b"', "line 23: output.1: give either text or pattern"),
    ],
)
def test_each_fault_is_told_with_its_line_and_reason(line: int, text: str, said: str) -> None:
    assert said in fault(with_line(line, text))


def test_all_faults_are_told_at_once() -> None:
    said = fault(with_line(3, "strikt = 1").replace('decision = "ask"', 'decision = "no"'))
    assert "line 3:" in said
    assert "line 17:" in said


def test_what_is_not_toml_is_told_with_its_line() -> None:
    assert "is not TOML: " in fault("strict = \n")
    assert "line 1" in fault("strict = \n")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read: No such file"):
        load_policy(tmp_path / "missing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"strict = \xff")
    with pytest.raises(PolicyError, match="is not UTF-8 at byte 9"):
        load_policy(binary)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid")

    level: int


def test_faults_of_every_table_are_told_in_the_order_of_their_lines() -> None:
    text = '[other]\nlevel = "high"\n[[tools]]\nmatch = "a.b"\ndecision = "aks"\n[[code]]\nimport = "os"\n'
    with pytest.raises(PolicyError) as raised:
        parse_policy(text, "policy.toml", {"other": Section})
    assert re.findall(r"line (\d+): (\S+):", raised.value.message) == [
        ("2", "other.level"),
        ("5", "tools.1.decision"),
        ("7", "code.1.import"),
    ]


def test_tables_of_other_rooms_are_validated_by_their_models_with_the_same_lines() -> None:
    loaded = parse_policy(f"{GOOD}\n[privacy]\nlevel = 3\n", "p", {"privacy": Section})
    assert loaded.sections == {"privacy": Section(level=3)}
    assert parse_policy(GOOD, "p", {"privacy": Section}).sections == {}
    with pytest.raises(PolicyError, match=r"line 27: privacy\.level: it should be a valid integer"):
        parse_policy(f'{GOOD}\n[privacy]\nlevel = "high"\n', "p", {"privacy": Section})
