"""Every regular expression of the package on texts made to be slow for it: twice the text takes at most thrice as long.

Patterns are found, not listed: those of modules by importing them, those within functions by reading the source. How
each is used (searched for, or matched at one place) is read from the source, too. The texts are made from the pattern
itself: what each of its repetitions repeats, behind what stands before it.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import belljar
from growth import TIMES, growth

sre: Any = importlib.import_module("re._parser")

SOURCE = Path(belljar.__file__).parent
METHODS = ("match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split")
AT_ONE_PLACE = {"match", "fullmatch"}
USE = re.compile(rf"\b(\w+)\.({'|'.join(METHODS)})\(")
# What runs in a session alone, where a slow pattern costs that session.
OF_SESSIONS = ("inside/modules", "inside/runner", "inside/toolbox", "inside/skills", "inside/commands")
PIECES = (*" \n\t\r\"'\\<>{}[]()a0.-_,:;=@/#`!%*|", "\x1b[", '\\"', "''", '\\"\\', "<a ", "a.", "0-", "a b")
CANDIDATES = " \na0A.-_\t\"'\\/<>=:;,@#+%!~()[]{}*&$^|`?\x1b\x00\x07"
END = "\n\x00"


@dataclass(frozen=True)
class Found:
    """A pattern, where it was found, and the methods by which it is used."""

    place: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]

    def works(self) -> Iterator[Callable[[str], Any]]:
        """Yield the ways in which the package uses it."""
        is_bytes = isinstance(self.pattern.pattern, bytes)

        def given(text: str) -> Any:
            return text.encode() if is_bytes else text

        if "fullmatch" in self.methods:
            yield lambda text: self.pattern.fullmatch(given(text))
        if "match" in self.methods:
            yield lambda text: self.pattern.match(given(text))
        if self.methods - AT_ONE_PLACE:
            yield lambda text: sum(1 for _ in self.pattern.finditer(given(text)))

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield what stands before, and what is repeated; nothing for a pattern without long repetitions."""
        source, flags = self.pattern.pattern, self.pattern.flags
        if isinstance(source, bytes):
            source = source.decode("latin-1")
        found = dict.fromkeys(pumps(sre.parse(source, flags & ~re.UNICODE)))
        if found:
            yield from (each for each in dict.fromkeys((*found, *(("", piece) for piece in PIECES))) if each[1])


# Where patterns are


def modules() -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages([str(SOURCE)], "belljar."):
        # What runs inside sandboxes is read, not imported: there importing is running.
        if not info.name.startswith("belljar.inside") and not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def patterns_in(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth < 3 and isinstance(value, dict):
        yield from (each for one in (*value, *value.values()) for each in patterns_in(one, depth + 1))
    elif depth < 3 and isinstance(value, list | tuple | set | frozenset):
        yield from (each for one in value for each in patterns_in(one, depth + 1))
    elif depth < 1 and isinstance(value, type) and value.__module__.startswith("belljar"):
        yield from (each for one in vars(value).values() for each in patterns_in(one, depth + 1))


def calls_of_re(tree: ast.AST) -> Iterator[tuple[ast.Call, str, re.Pattern[Any]]]:
    """Yield the calls of functions of `re` with a pattern that is a text, and the pattern."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("re"), method), [ast.Constant(str() | bytes() as pattern), *_]):
                flags = re.NOFLAG
                for each in ast.walk(node):
                    if isinstance(each, ast.Attribute) and each.attr in re.RegexFlag.__members__:
                        flags |= re.RegexFlag[each.attr]
                if method != "escape":
                    yield node, method, re.compile(pattern, flags)
            case _:
                pass


def sources() -> Iterator[tuple[str, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name, text = str(file.relative_to(SOURCE)), file.read_text("utf-8")
        if re.search(r"\bre\.\w+\(", text) and not name.startswith(OF_SESSIONS):
            yield name, text


@pytest.fixture(scope="module")
def patterns() -> list[Found]:
    texts = dict(sources())
    everywhere: dict[str, set[str]] = {}
    own: dict[str, dict[str, set[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        for name, method in USE.findall(path.read_text("utf-8")):
            everywhere.setdefault(name, set()).add(method)
            own.setdefault(str(path), {}).setdefault(name, set()).add(method)
    found: dict[tuple[object, int], Found] = {}
    for module in modules():
        used = own.get(str(module.__file__), {})
        for name, value in list(vars(module).items()):
            for pattern in patterns_in(value):
                # Those in a list or a table are used under another name: by whatever its module calls.
                named = used.get(name) or everywhere.get(name) or {each for every in used.values() for each in every}
                key = (pattern.pattern, pattern.flags)
                before = found[key].methods if key in found else frozenset[str]()
                found[key] = Found(f"{module.__name__}.{name}", pattern, before | (named or {"search"}))
    for file, text in texts.items():
        for node, method, pattern in calls_of_re(ast.parse(text)):
            methods = frozenset({"search" if method == "compile" else method})
            found.setdefault((pattern.pattern, pattern.flags), Found(f"{file}:{node.lineno}", pattern, methods))
    return [*found.values()]


# Texts for them


def pumps(parsed: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield what stands before, and what is repeated: of each long repetition, and all that stands before it, too."""
    for operator, argument in parsed:
        match str(operator):
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                _, most, inner = argument
                if most > 50:
                    body = example(inner) or "a"
                    yield from ((before, body), ("", before), ("", before + body))
                    first, members = inner[0]
                    if str(first) == "IN":
                        yield from ((before, each) for each in CANDIDATES if is_in(members, each))
                yield from pumps(inner, before)
            case "SUBPATTERN":
                yield from pumps(argument[3], before)
            case "ATOMIC_GROUP":
                yield from pumps(argument, before)
            case "BRANCH":
                for branch in argument[1]:
                    yield from pumps(branch, before)
            case _:
                pass
        before += example([(operator, argument)])


def example(parsed: Any) -> str:
    """Return a short text that matches a parsed pattern, as far as that is easy."""
    return "".join(_example(str(operator), argument) for operator, argument in parsed)


def _example(operator: str, argument: Any) -> str:
    match operator:
        case "LITERAL":
            return chr(argument)
        case "NOT_LITERAL" | "ANY":
            return "b" if argument == ord("a") else "a"
        case "IN":
            return next((each for each in "a0 " + CANDIDATES if is_in(argument, each)), "a")
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return example(argument[2]) * max(argument[0], 1)
        case "SUBPATTERN":
            return example(argument[3])
        case "ATOMIC_GROUP":
            return example(argument)
        case "BRANCH":
            return example(argument[1][0])
        case _:
            return ""


def is_in(members: Any, character: str) -> bool:
    """Return whether a class of characters has this one."""
    kinds: dict[str, Callable[[str], bool]] = {
        "DIGIT": str.isdigit,
        "SPACE": str.isspace,
        "WORD": lambda each: each.isalnum() or each == "_",
    }
    has = False
    for operator, value in members:
        match str(operator):
            case "LITERAL":
                has |= chr(value) == character
            case "RANGE":
                has |= value[0] <= ord(character) <= value[1]
            case "CATEGORY":
                *_, negation, kind = ("", *str(value).removeprefix("CATEGORY_").split("_"))
                has |= kinds[kind](character) != (negation == "NOT")
            case _:
                pass
    return has != (str(members[0][0]) == "NEGATE")


# The tests


def test_patterns_are_found_in_modules_in_tables_and_in_functions(patterns: list[Found]) -> None:
    places = {found.place for found in patterns}
    assert len(places) > 130
    assert {"belljar.outputs.tracebacks._FILE", "belljar.skills.front_matter._SCALARS"} <= places
    assert any(place.startswith("http/api.py:") for place in places)


def test_no_pattern_takes_more_than_three_times_as_long_for_twice_the_text(patterns: list[Found]) -> None:
    slow = [
        (found.place, found.pattern.pattern, sorted(found.methods), before, repeated, round(factor, 1))
        for found in patterns
        for work in found.works()
        for before, repeated in found.texts()
        if (factor := growth(work, lambda n, b=before, r=repeated: b + r * n + END)) > TIMES
    ]
    assert not slow


def test_no_pattern_begins_each_line_with_blanks_of_several_lines() -> None:
    """`^\\s*` with MULTILINE reads a run of newlines again at each of them; `^[ \\t]*` says what is meant."""
    lines_of_blanks = re.compile(r"\^(?:\(\?:)?\\s[*+]")
    wrong = [
        (file, node.lineno)
        for file, text in sources()
        for node, _, pattern in calls_of_re(ast.parse(text))
        if pattern.flags & re.MULTILINE and lines_of_blanks.search(str(pattern.pattern))
    ]
    assert not wrong
