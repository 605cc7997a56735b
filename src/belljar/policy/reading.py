"""A cell as IPython reads it: Python, with magics and shell lines turned into the calls that they stand for.

It knows IPython's notation, not which of it is allowed. It reads on the safe side: what cannot be read as Python in the
end is an error of the reader, so nothing passes unread.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

MOST_ESCAPES = 5_000
SHELL = "!"
# Whose bodies are Python.
_PYTHON_CELL_MAGICS = frozenset({"time", "timeit", "capture", "prun", "debug", "code_wrap"})
_PYTHON_LINE_MAGICS = frozenset({"time", "timeit", "prun", "debug", "mprun", "memit", "lprun"})
# Whose bodies are text that nothing runs in the session.
_TEXT_CELL_MAGICS = frozenset(
    {"writefile", "file", "html", "HTML", "markdown", "latex", "svg", "SVG", "javascript", "js"}
)
_SHELL_MAGICS = frozenset(
    {"sx", "system", "bash", "sh", "script", "perl", "ruby", "python", "python2", "python3", "pypy", "cmd", "!"}
    | {"cat", "cp", "ldir", "less", "lf", "lk", "ll", "ls", "lx", "man", "mkdir", "more", "mv", "rep", "rm", "rmdir"}
)

_PROMPT = re.compile(r"^\s*(?:>>>[ \t]?|\.\.\.+:?[ \t]?|(?:(?:\[nav\]|\[ins\])? )?In \[\d+\]: )")
# Line ends to IPython, and none to Python: what one of them takes for text could be a command to the other.
_ODD_LINE_ENDS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_ESCAPED = re.compile(r"^(\s*)(%%|%|!!|!|\?\?|\?|,|;|/)(.*)$", re.DOTALL)
_ASSIGNED = re.compile(r"^(\s*[^=!<>#]*?=\s*)(%|!)(?!=)(.*)$", re.DOTALL)
_HELP = re.compile(r"^(\s*)([\w.*]+(?:\[[^\]]*\])*)\?{1,2}\s*$")
# A cell of one line that begins with the name of a magic is that magic, unless the name is a variable's.
_AUTOMAGIC = re.compile(r"^\s*([A-Za-z_]\w*)(?!\w)\s*(?![=,])")
_OPTIONS = re.compile(r"^(?:\s*-\w+(?:\s+\d+)?(?=\s|$))*\s*")


class Unreadable(Exception):
    """It is not Python as this server's interpreter knows it."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Escape:
    """A magic, or a shell command, whose name is `!`."""

    line: int
    name: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What stands in a cell. The lines of `tree` are the cell's own."""

    tree: ast.Module
    escapes: list[Escape] = field(default_factory=list[Escape])
    bodies: list["Reading"] = field(default_factory=list["Reading"])
    """Python inside of magics."""
    first_word: str = ""
    """Of a cell of one line: a magic, unless a variable is called so."""


def read_cell(code: str, first_line: int = 1) -> Reading:
    """Read a cell, or raise `Unreadable`."""
    if "\r" in code:
        code = _with_plain_ends(code, first_line)
    # IPython begins a cell with the first line that says something.
    blank = code.rfind("\n", 0, len(code) - len(code.lstrip())) + 1
    first_line, code = first_line + code.count("\n", 0, blank), code[blank:]
    if odd := _ODD_LINE_ENDS.search(code):
        number = first_line + code.count("\n", 0, odd.start())
        raise Unreadable(number, f"the line separator {odd[0]!a} stands in the code; write it as an escape")
    lines = _unindented(code.splitlines(keepends=True))
    if not any(_PROMPT.match(line) for line in lines):
        return _read(lines, first_line)
    # Whether IPython takes prompts away depends on its version and on where they stand: read both ways.
    bare = _unindented([_PROMPT.sub("", line, count=1) for line in lines])
    try:
        reading = _read(lines, first_line)
    except Unreadable:
        return _read(bare, first_line)
    with suppress(Unreadable):
        reading.bodies.append(_read(bare, first_line))
    return reading


def _with_plain_ends(code: str, first_line: int) -> str:
    """Lines end at a carriage return too, but where one follows a backslash, no command goes on after it."""
    plain = code.replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(_PROMPT.sub("", line) for line in plain.split("\n")):
        if line.endswith("\\") and (_ESCAPED.match(line) or _ASSIGNED.match(line)):
            raise Unreadable(first_line + number, "a command goes on after a carriage return; end lines with \\n alone")
    return plain


def _read(lines: list[str], first_line: int) -> Reading:
    if lines and lines[0].startswith("%%"):
        return _cell_magic(lines, first_line)
    text = "".join(lines)
    try:
        tree = _parsed(text, first_line)
        word = _AUTOMAGIC.match(text) if "\n" not in text.strip() else None
        return Reading(tree, first_word=word[1] if word else "")
    except Unreadable:
        if not any(_ESCAPED.match(line) or _ASSIGNED.match(line) or _HELP.match(line) for line in lines):
            raise
    return _with_escapes(text, first_line)


def is_shell(magic: str) -> bool:
    """Whether a magic runs a command of the shell."""
    return magic in _SHELL_MAGICS


def _cell_magic(lines: list[str], first_line: int) -> Reading:
    name, _, rest = lines[0][2:].strip().partition(" ")
    body = "".join(lines[1:])
    tree = ast.Module(body=[], type_ignores=[])
    if name in _SHELL_MAGICS:
        return Reading(tree, [Escape(first_line, name), Escape(first_line, SHELL)])
    if name in _TEXT_CELL_MAGICS:
        return Reading(tree, [Escape(first_line, name)])
    bodies = [read_cell(body, first_line + 1)]
    if name in _PYTHON_CELL_MAGICS and name != "capture":
        bodies.append(_statement(rest, first_line))
    return Reading(tree, [Escape(first_line, name)], bodies)


def _with_escapes(text: str, first_line: int) -> Reading:
    escapes: list[Escape] = []
    bodies: list[Reading] = []
    plain: list[str] = []
    for number, line in _logical_lines(text):
        # As many lines as before, so that later ones keep their numbers.
        ending = "\n" * line.count("\n")
        if help_line := _HELP.match(line):
            plain.append(f"{help_line[1]}pass{ending}")
        elif found := _ESCAPED.match(line) or _ASSIGNED.match(line):
            plain.append(f"{found[1]}{'None' if '=' in found[1] else 'pass'}{ending}")
            _take(found[2], found[3].strip(), first_line + number, escapes, bodies)
        else:
            plain.append(line)
        if len(escapes) > MOST_ESCAPES:
            raise Unreadable(first_line + number, f"more than {MOST_ESCAPES:,} magics")
    return Reading(_parsed("".join(plain), first_line), escapes, bodies)


def _take(mark: str, rest: str, line: int, escapes: list[Escape], bodies: list[Reading]) -> None:
    """Note what one escaped line does."""
    match mark:
        case "!" | "!!":
            escapes.append(Escape(line, SHELL))
        case "%" | "%%":
            name, _, argument = rest.partition(" ")
            escapes.append(Escape(line, name))
            if name in _SHELL_MAGICS:
                escapes.append(Escape(line, SHELL))
            if name in _PYTHON_LINE_MAGICS:
                bodies.append(_statement(argument, line))
        case "," | ";" | "/":
            # `/f a b` is f(a, b), `,f a` and `;f a` are f("a").
            name, _, given = rest.partition(" ")
            bodies.append(Reading(_parsed(f"{name}({', '.join(given.split()) if mark == '/' else ''})", line)))
        case _:
            pass


def _statement(text: str, line: int) -> Reading:
    """The Python in a magic's own line, behind its options."""
    return read_cell(text[len(match[0]) if (match := _OPTIONS.match(text)) else 0 :], line)


def _parsed(text: str, first_line: int) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(first_line - 1 + (error.lineno or 1), error.msg or "invalid syntax") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(first_line, str(error) or "nested too deeply") from None
    return ast.increment_lineno(tree, first_line - 1) if first_line > 1 else tree


def _unindented(lines: list[str]) -> list[str]:
    """IPython takes the first line's indentation away from all."""
    if not lines or not lines[0].strip():
        return lines
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip(" \t"))]
    return [line.removeprefix(indent) for line in lines] if indent else lines


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines, with those that continue them in strings, brackets or after a backslash; and their numbers from 0."""
    start = position = number = 0
    depth = 0
    while position < len(text):
        is_escape = (
            depth == 0
            and position == start
            and (_ESCAPED.match(_line_at(text, start)) or _ASSIGNED.match(_line_at(text, start)))
        )
        position, depth = (_end_of_command(text, start), 0) if is_escape else _step(text, position, depth)
        is_end = position >= len(text) or (
            text[position - 1] == "\n" and depth == 0 and not _is_continued(text, position)
        )
        if is_end:
            yield number, text[start:position]
            number += text.count("\n", start, position)
            start = position


def _line_at(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : len(text) if end < 0 else end + 1]


def _end_of_command(text: str, start: int) -> int:
    """A command goes on after a backslash at the end of its line."""
    end = start
    while end < len(text):
        line = _line_at(text, end)
        end += len(line)
        if not line.rstrip("\n").endswith("\\"):
            break
    return end


def _step(text: str, position: int, depth: int) -> tuple[int, int]:
    """Past the next string, comment or character."""
    character = text[position]
    if character == "#":
        end = text.find("\n", position)
        return (len(text) if end < 0 else end), depth
    if character in "'\"":
        return _end_of_string(text, position), depth
    depth += (character in "([{") - (character in ")]}")
    return position + 1, max(depth, 0)


def _end_of_string(text: str, position: int) -> int:
    quote = text[position]
    if text.startswith(quote * 3, position):
        quote *= 3
    position += len(quote)
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text.startswith(quote, position):
            return position + len(quote)
        elif text[position] == "\n" and len(quote) == 1:
            return position
        else:
            position += 1
    return len(text)


def _is_continued(text: str, position: int) -> bool:
    return text[position - 2 : position - 1] == "\\"
