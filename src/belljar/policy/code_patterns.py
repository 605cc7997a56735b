"""Patterns of code as the operator writes them: `open(_, "w*")`, `requests.get(..., verify=False)`, `_.to_sql(...)`.

A pattern is a Python expression. `_` stands for any expression, `...` among arguments for any further arguments, and
`*` and `?` in a string for characters. Names are compared by what they stand for, not by what the code calls them.
"""

import ast
from fnmatch import fnmatchcase
from typing import cast

from belljar.policy.code_names import ANY, CodeNames

MAX_TEXT_CHARS = 10_000


class Template:
    """One pattern, parsed."""

    def __init__(self, text: str) -> None:
        try:
            parsed = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"{text!r} is no expression of Python: {reason}") from None
        if _is_any(parsed) or _is_rest(parsed):
            raise ValueError(f"{text!r} matches everything")
        self.text = text
        self._expression = parsed

    @property
    def kind(self) -> type[ast.expr]:
        """Return the type of the syntax nodes that can match."""
        return type(self._expression)

    def matches(self, node: ast.AST, names: CodeNames) -> bool:
        """Return whether a node of a syntax tree matches the pattern."""
        return type(node) is type(self._expression) and _same(self._expression, node, names)


def _same(wanted: object, found: object, names: CodeNames) -> bool:
    if isinstance(wanted, ast.AST) and _is_any(wanted):
        return isinstance(found, ast.expr)
    if isinstance(wanted, ast.Name | ast.Attribute) and isinstance(found, ast.AST):
        return _same_name(wanted, found, names)
    if isinstance(wanted, ast.Constant):
        return isinstance(found, ast.Constant) and _same_value(wanted.value, found.value)
    if isinstance(wanted, ast.Call):
        return isinstance(found, ast.Call) and _same_call(wanted, found, names)
    if isinstance(wanted, ast.AST):
        return type(found) is type(wanted) and all(
            _same(getattr(wanted, name), getattr(found, name), names) for name in wanted._fields if name != "ctx"
        )
    if isinstance(wanted, list):
        left, right = cast("list[object]", wanted), cast("list[object]", found)
        return (
            isinstance(found, list)
            and len(left) == len(right)
            and all(_same(one, other, names) for one, other in zip(left, right, strict=True))
        )
    return wanted == found


def _same_name(wanted: ast.Name | ast.Attribute, found: ast.AST, names: CodeNames) -> bool:
    written = _dotted(wanted)
    if written is not None and written in names.of(found):
        return True
    return (
        isinstance(wanted, ast.Attribute)
        and isinstance(found, ast.Attribute)
        and wanted.attr == found.attr
        and _same(wanted.value, found.value, names)
    )


def _same_value(wanted: object, found: object) -> bool:
    if isinstance(wanted, str) and isinstance(found, str):
        return fnmatchcase(found[:MAX_TEXT_CHARS], wanted)
    return type(wanted) is type(found) and wanted == found


def _same_call(wanted: ast.Call, found: ast.Call, names: CodeNames) -> bool:
    if not _same(wanted.func, found.func, names):
        return False
    is_open = any(_is_rest(argument) for argument in wanted.args)
    positional = [argument for argument in wanted.args if not _is_rest(argument)]
    if len(found.args) < len(positional) or (len(found.args) > len(positional) and not is_open):
        return False
    if not all(_same(one, other, names) for one, other in zip(positional, found.args, strict=False)):
        return False
    given = {keyword.arg: keyword.value for keyword in found.keywords}
    asked = {keyword.arg: keyword.value for keyword in wanted.keywords}
    if not is_open and given.keys() != asked.keys():
        return False
    return all(name in given and _same(value, given[name], names) for name, value in asked.items())


def _dotted(node: ast.expr) -> str | None:
    match node:
        case ast.Name():
            return None if node.id == ANY else node.id
        case ast.Attribute():
            base = _dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        case _:
            return None


def _is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == ANY


def _is_rest(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis
