"""Rules for code: what they find in the syntax tree, and what they leave alone."""

from typing import Any

import pytest

from belljar.policy.code_inspection import CodeFinding, Inspector
from belljar.policy.code_names import CodeNames
from belljar.policy.rules import CodeRule

RULE = CodeRule.model_validate(
    {
        "imports": ["subprocess", "ctypes", "socket"],
        "calls": ["eval", "exec", "os.system", "shutil.*"],
        "patterns": ['open(_, "w*")', 'open(_, mode="w*")', "requests.get(..., verify=False)", "_.to_sql(...)"],
        "magics": ["run", "load*"],
        "shell": True,
    }
)


def found(code: str, *before: str, strict: bool = False) -> list[tuple[int, str]]:
    """The findings in a cell, after others that ran."""
    inspector = Inspector([RULE], is_strict=strict)
    names = CodeNames()
    for cell in before:
        assert inspector.inspect(cell, names).findings == ()
    return [(finding.line, finding.what) for finding in inspector.inspect(code, names).findings]


@pytest.mark.parametrize(
    "code",
    [
        "df.eval('a + b')",
        "model.eval()",
        "import pandas as pd\npd.eval('1')",
        "import ast\nast.literal_eval('[1]')",
        "open(x, 'r').read()",
        "open(x)",
        "'eval(1)'  # exec",
        "f(eval=True)",
        "import re\nre.compile('x')",
        "from socketserver import TCPServer",
        "requests.get(url, verify=True)",
        "import os\nos.path.join('a', 'b')",
        "x.system()",
        "def evaluate(): ...\nevaluate()",
    ],
)
def test_harmless_code_that_a_substring_would_have_blocked_passes(code: str) -> None:
    assert found(code) == []
    assert found(code, strict=True) == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("eval('1')", "eval"),
        ("map(eval, texts)", "eval"),
        ("import builtins as b\nb.eval('1')", "eval"),
        ("__builtins__['eval']", "eval"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os as o\no.system('ls')", "os.system"),
        ("from os import system as s\ns('ls')", "os.system"),
        ("from os import *\nsystem('ls')", "os.system"),
        ("import os\nx = os\nx.system('ls')", "os.system"),
        ("import os\na, b = 1, os\nb.system('ls')", "os.system"),
        ("import os\nif (m := os): m.system('ls')", "os.system"),
        ("import os\ngetattr(os, 'system')('ls')", "os.system"),
        ("import os\nvars(os)['system']('ls')", "os.system"),
        ("import os\nos.__dict__['system']('ls')", "os.system"),
        ("import sys\nsys.modules['os'].system('ls')", "os.system"),
        ("__import__('os').system('ls')", "os.system"),
        ("import shutil\nshutil.rmtree('x')", "shutil.rmtree"),
        ("import subprocess", "import of subprocess"),
        ("from subprocess import run", "import of subprocess.run"),
        ("import socket.extras", "import of socket.extras"),
        ("__import__('subprocess')", "import of subprocess"),
        ("import importlib as i\ni.import_module('ctypes')", "import of ctypes"),
        ("!ls", "a shell command"),
        ("%run other.py", "the magic %run"),
        ("%time eval('1')", "eval"),
        (">>> import subprocess", "import of subprocess"),
    ],
)
def test_blocked_code_is_found_under_whatever_name(code: str, what: str) -> None:
    assert (code.count("\n") + 1, what) in found(code)


@pytest.mark.parametrize(
    "code",
    [
        "open('f', 'wb')",
        "open('f', mode='w')",
        "o = open\no('f', 'w')",
        "import requests as r\nr.get(url, timeout=3, verify=False)",
        "frame.query('x').to_sql('t', connection)",
    ],
)
def test_patterns_are_found(code: str) -> None:
    assert len(found(code)) == 1


def test_code_in_text_that_is_run_is_looked_into() -> None:
    inspector = Inspector([CodeRule(imports=["subprocess"])])
    inspection = inspector.inspect("x = 1\nexec('import subprocess')", CodeNames())
    assert inspection.findings == (CodeFinding(2, 0, "import of subprocess, in text that is run", "code.1"),)


def test_names_that_earlier_cells_bound_are_known() -> None:
    assert found("o.system('ls')", "import os as o") == [(1, "os.system")]
    assert found("p.system('ls')", "import os", "p = os") == [(1, "os.system")]


@pytest.mark.parametrize("code", ["ls", "sx; ls", "system (ls)", "rm - r", "sx\n"])
def test_a_line_that_begins_with_a_magics_name_is_that_magic(code: str) -> None:
    assert (1, "a shell command") in found(code)
    assert found("run") == [(1, "the magic %run")]


@pytest.mark.parametrize("before", ["shell = get_ipython()", "from IPython import get_ipython as g\nshell = g()"])
def test_commands_through_a_variable_of_ipythons_shell_are_found(before: str) -> None:
    assert found("shell.system('ls')", before) == [(1, "a shell command")]
    assert found("shell.run_line_magic('run', 'x.py')", before) == [(1, "the magic %run")]


def test_strict_refuses_a_magic_whose_name_is_not_written_there() -> None:
    assert found("shell.run_line_magic(name, '')") == []
    assert (1, "a magic by a name that is not written there") in found("shell.run_line_magic(name, '')", strict=True)


def test_a_variable_that_is_called_like_a_magic_is_none() -> None:
    assert found("ls", "ls = [1]") == []
    assert found("rm = 3") == []
    assert found("x = 1\nls") == []


def test_only_named_imports_pass_where_a_rule_names_those() -> None:
    inspector = Inspector([CodeRule(only_imports=["math", "numpy"])])
    assert inspector.inspect("import math, numpy.linalg\nfrom numpy import random", CodeNames()).decision == "allow"
    assert inspector.inspect("import mathutils", CodeNames()).decision == "deny"


def test_strict_refuses_what_cannot_be_seen_through() -> None:
    assert found("__import__(name)") == []
    assert found("__import__(name)", strict=True) == [(1, "an import by a name that is not written there")]
    assert (1, "code that is put together while it runs") in found("compile(text, 'f', 'exec')", strict=True)


@pytest.mark.parametrize(
    ("rules", "strict", "decision"),
    [
        ([{"decision": "warn"}], False, "warn"),
        ([{"decision": "warn"}], True, "deny"),
        ([{"decision": "warn"}, {"decision": "ask"}], False, "ask"),
        ([{"decision": "ask"}, {"decision": "deny"}], False, "deny"),
    ],
)
def test_the_strictest_rule_decides(rules: list[dict[str, Any]], strict: bool, decision: str) -> None:
    inspector = Inspector([CodeRule.model_validate({"calls": "eval", **rule}) for rule in rules], is_strict=strict)
    assert inspector.inspect("eval('1')", CodeNames()).decision == decision


def test_code_that_cannot_be_read_is_refused_with_its_line() -> None:
    inspection = Inspector([RULE]).inspect("x = 1\ny = = 2", CodeNames())
    assert inspection.decision == "deny"
    assert [(finding.line, finding.rule) for finding in inspection.findings] == [(2, "code")]


@pytest.mark.parametrize("code", ["a" + ".b" * 900, "f(" * 80 + ")" * 80, "x = " + "-" * 500 + "1", "a" + "[0]" * 900])
def test_deep_code_neither_breaks_nor_stalls_the_inspection(code: str) -> None:
    assert Inspector([RULE]).inspect(code, CodeNames()).decision in ("allow", "deny")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("!echo {eval('1')}", 1),
        ("x = 1\nfiles = !ls {eval('1')} {unclosed", 2),
        ("%cd {exec('1')}", 1),
        ("%env A={eval('1')!r}", 1),
        ("!echo {rows[eval('1'):2]}", 1),
        ("%%sx\necho\necho {eval('1')}", 2),
        ("get_ipython().system('echo {eval(1)}')", 1),
        ("get_ipython().run_line_magic('cd', '{eval(1)}')", 1),
    ],
)
def test_expressions_that_ipython_evaluates_in_commands_are_code(code: str, line: int) -> None:
    inspector = Inspector([CodeRule.model_validate({"calls": ["eval", "exec"]})])
    findings = inspector.inspect(code, CodeNames()).findings
    assert [finding.line for finding in findings] == [line]
    assert findings[0].what in {"eval", "exec"}


@pytest.mark.parametrize(
    "code", ["!awk '{print $1}' f", "!echo ${HOME} {{eval(1)}}", "%%bash\nf() { eval 1; }\nf", "!echo { eval 1; }"]
)
def test_braces_of_the_shell_are_none(code: str) -> None:
    assert Inspector([CodeRule.model_validate({"calls": ["eval"]})]).inspect(code, CodeNames()).findings == ()
