"""Checks code against the policy's rules before it runs. It searches the syntax tree, never the text.

This is a guardrail against honest mistakes and careless models, not a sandbox: code can hide from it on purpose.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from typing import Literal

from belljar.policy.cell_syntax import SHELL, Escape, Reading, Unreadable, is_shell, is_shell_method, read_cell
from belljar.policy.code_names import ANY, IPYTHON, CodeNames
from belljar.policy.rules import CodeRule, Template

MAX_FINDINGS = 20
MAX_NESTED = 8
MAX_CHARS = 80
UNREADABLE = "code"
_RUNNERS = frozenset({"eval", "exec", "compile"})

Decision = Literal["allow", "warn", "ask", "deny"]
_RANK: tuple[Decision, ...] = ("deny", "ask", "warn", "allow")


@dataclass(frozen=True, slots=True)
class CodeFinding:
    """A place in code that the policy does not allow."""

    line: int
    column: int
    what: str
    rule: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """The first findings in a cell, and the strictest decision of their rules."""

    decision: Decision = "allow"
    findings: tuple[CodeFinding, ...] = ()
    reasons: tuple[str, ...] = ()
    """The reason that each finding's rule gives, in the order of the findings."""
    in_console: bool = False
    """Whether one of the rules wants its question answered outside the client."""
    syntax_error: SyntaxError | None = None
    """Why the cell cannot be read, where that is an error of syntax: then no rule has found anything."""


@dataclass(frozen=True, slots=True)
class _CodeChecks:
    """One rule, compiled."""

    name: str
    rule: CodeRule
    imports: re.Pattern[str] | None
    only_imports: re.Pattern[str] | None
    calls: re.Pattern[str] | None
    magics: re.Pattern[str] | None
    templates: tuple[Template, ...]


class Inspector:
    """Checks cells against one policy's rules for code."""

    def __init__(self, rules: Iterable[CodeRule], *, is_strict: bool = False) -> None:
        self._checks = [_prepared(number, rule) for number, rule in enumerate(rules, 1)]
        self._kinds = {template.kind for checks in self._checks for template in checks.templates}
        self._is_strict = is_strict
        self.has_rules = bool(self._checks)
        """Whether the policy has rules for code."""

    def inspect(self, code: str, names: CodeNames) -> Inspection:
        """Check a cell. `names` learns what the cell binds, so pass a copy of the session's names."""
        try:
            reading = read_cell(code)
        except Unreadable as error:
            what = f"cannot be read as Python: {error.reason}"
            finding = CodeFinding(error.line, 0, what, UNREADABLE)
            return Inspection("deny", (finding,), ("",), syntax_error=error.error)
        found = dict.fromkeys(self._findings(reading, names, 0))
        rules = {checks.name: checks.rule for checks in self._checks}
        decided: list[tuple[Decision, CodeFinding]] = [(self._decision(rules, finding), finding) for finding in found]
        decided.sort(key=lambda pair: (_RANK.index(pair[0]), pair[1].line))
        worst = decided[0][0] if decided else _RANK[-1]
        shown = [finding for _, finding in decided[:MAX_FINDINGS]]
        reasons = [rules[finding.rule].reason if finding.rule in rules else "" for finding in shown]
        in_console = any(
            decision == "ask" and rules[finding.rule].answered_in == "console"
            for decision, finding in decided
            if finding.rule in rules
        )
        return Inspection(worst, tuple(shown), tuple(reasons), in_console)

    def _decision(self, rules: dict[str, CodeRule], finding: CodeFinding) -> Decision:
        decision = rules[finding.rule].decision if finding.rule in rules else "deny"
        return "deny" if decision == "warn" and self._is_strict else decision

    def _findings(self, reading: Reading, names: CodeNames, depth: int) -> Iterator[CodeFinding]:
        names.learn(reading.tree)
        for escape in (*reading.escapes, *_automagic(reading, names)):
            yield from self._in_escape(escape)
        for node in ast.walk(reading.tree):
            yield from self._in_node(node, names)
            if isinstance(node, ast.Call):
                if _runs_command(node, names):
                    yield from self._in_escape(Escape(node.lineno, SHELL))
                yield from self._in_text(node, names, depth)
        for body in reading.bodies:
            yield from self._findings(body, names, depth)

    def _in_escape(self, escape: Escape) -> Iterator[CodeFinding]:
        for checks in self._checks:
            if escape.name == SHELL:
                if checks.rule.shell:
                    yield CodeFinding(escape.line, 0, "a shell command", checks.name)
            elif not escape.name:
                if self._is_strict and (checks.magics or checks.rule.shell):
                    yield CodeFinding(escape.line, 0, "a magic by a name that is not written there", checks.name)
            elif checks.magics and checks.magics.fullmatch(escape.name):
                yield CodeFinding(escape.line, 0, f"the magic %{escape.name}", checks.name)

    def _in_node(self, node: ast.AST, names: CodeNames) -> Iterator[CodeFinding]:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from self._in_import(node, [*_modules(node)])
                return
            case ast.Call():
                is_import, module = names.imported_by_call(node)
                yield from self._in_import(node, [module] if is_import else [])
            case ast.Name() | ast.Attribute() | ast.Subscript():
                pass
            case _:
                yield from self._like(node, names)
                return
        dotted = names.of(node)
        for checks in self._checks if dotted != [ANY] else ():
            if checks.calls is not None:
                yield from (_at(node, name, checks.name) for name in dotted if checks.calls.fullmatch(name))
        yield from self._like(node, names)

    def _in_import(self, node: ast.AST, modules: list[str | None]) -> Iterator[CodeFinding]:
        for checks in self._checks:
            for module in modules:
                if module is not None and _is_blocked_module(checks, module):
                    yield _at(node, f"import of {module}", checks.name)
                elif module is None and self._is_strict and (checks.imports or checks.only_imports):
                    yield _at(node, "an import by a name that is not written there", checks.name)

    def _like(self, node: ast.AST, names: CodeNames) -> Iterator[CodeFinding]:
        if type(node) not in self._kinds:
            return
        for checks in self._checks:
            for template in checks.templates:
                if template.matches(node, names):
                    yield _at(node, f"{ast.unparse(node)[:MAX_CHARS]} is like {template.text}", checks.name)

    def _in_text(self, node: ast.Call, names: CodeNames, depth: int) -> Iterator[CodeFinding]:
        """Check code that is written as a string and run, as in `exec("import os")`."""
        if not _RUNNERS & {*names.of(node.func)}:
            return
        text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if not isinstance(text, str):
            if self._is_strict:
                yield _at(node, "code that is put together while it runs", UNREADABLE)
            return
        if depth >= MAX_NESTED:
            yield _at(node, "code in text in text without end", UNREADABLE)
            return
        try:
            inner = read_cell(text)
        except Unreadable:
            return  # the string raises a SyntaxError when it runs
        for finding in self._findings(inner, names, depth + 1):
            yield _at(node, f"{finding.what}, in text that is run", finding.rule)


def _automagic(reading: Reading, names: CodeNames) -> list[Escape]:
    word = reading.first_word
    if not word or word in names.bound or word in names.origins:
        return []
    return [Escape(1, word), *([Escape(1, SHELL)] if is_shell(word) else [])]


def _runs_command(node: ast.Call, names: CodeNames) -> bool:
    """Return whether a call is `get_ipython().system(...)` or a similar one, under any name."""
    methods = (name.rpartition(".") for name in names.of(node.func))
    return any(owner == IPYTHON and is_shell_method(method) for owner, _, method in methods)


def _prepared(number: int, rule: CodeRule) -> _CodeChecks:
    return _CodeChecks(
        f"code.{number}",
        rule,
        _globs(rule.imports),
        _globs(rule.only_imports),
        _globs(rule.calls),
        _globs(rule.magics),
        tuple(map(Template, rule.patterns)),
    )


def _globs(names: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(translate, names))) if names else None


def _modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif not node.level:
        # A name that is imported from a package may be one of its modules.
        for alias in node.names:
            yield node.module or "" if alias.name == "*" else f"{node.module}.{alias.name}"


def _is_blocked_module(checks: _CodeChecks, module: str) -> bool:
    parts = module.split(".")
    above = [".".join(parts[: length + 1]) for length in range(len(parts))]
    if checks.imports is not None and any(checks.imports.fullmatch(name) for name in above):
        return True
    return checks.only_imports is not None and not any(checks.only_imports.fullmatch(name) for name in above)


def _at(node: ast.AST, what: str, rule: str) -> CodeFinding:
    return CodeFinding(getattr(node, "lineno", 1), getattr(node, "col_offset", 0), what, rule)
