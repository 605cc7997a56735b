"""Reads a cell as IPython does: Python, with magics and shell lines turned into the calls that they stand for.

IPython's own transformer turns them, and the calls are read from the syntax tree, so that no second parser can
disagree with the one that runs the cell. The session's IPython may have another version than the server's: where
versions differ (prompts, indentation), the cell is read in each way, and what is found in any of them counts. Code that
cannot be read as Python raises, so nothing passes unread. This module knows IPython's notation, not what is allowed.
"""

import ast
import functools
import re
import string
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

MAX_ESCAPES = 5_000
SHELL = "!"
# IPython gives up on a cell with more transformations.
_MAX_TRANSFORMS = 500
# What takes time is reading tokens: Python's parser keeps the lock for 0.3 s for so many, 500 kB of usual code.
_MAX_TOKENS = 100_000
# IPython reads the rest of a cell again for each command, 200,000 tokens a second.
_MAX_TOKENS_READ = 300_000
_SHORT_CHARS = 4_000
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")
_MAX_NESTED = 20
# Magics whose body or argument is Python.
_PYTHON_CELL_MAGICS = frozenset({"time", "timeit", "capture", "prun", "debug", "code_wrap"})
_PYTHON_LINE_MAGICS = frozenset({"time", "timeit", "prun", "debug", "mprun", "memit", "lprun"})
# Magics whose body is text that nothing runs in the session.
_TEXT_CELL_MAGICS = frozenset(
    {"writefile", "file", "html", "HTML", "markdown", "latex", "svg", "SVG", "javascript", "js"}
)
_SHELL_MAGICS = frozenset(
    {"sx", "system", "bash", "sh", "script", "perl", "ruby", "python", "python2", "python3", "pypy", "cmd", "!"}
    | {"cat", "cp", "ldir", "less", "lf", "lk", "ll", "ls", "lx", "man", "mkdir", "more", "mv", "rep", "rm", "rmdir"}
)
# Magics that IPython hands to the shell with their body, in which it evaluates expressions in braces first.
_EXPANDED_CELL_MAGICS = frozenset({"sx", "system", "!"})
# IPython turns `x?` into `%pinfo x`. It runs nothing, so a policy counts it as a magic only if it is written as one.
_HELP_MAGICS = frozenset({"pinfo", "pinfo2", "psearch"})
_SHELL_METHODS = frozenset({"system", "system_raw", "system_piped", "getoutput", "run_command"})
# The runner's own method, which evaluates nothing in the command.
_PLAIN_SHELL_METHODS = frozenset({"run_command"})
_MAGIC_METHODS = frozenset({"run_line_magic", "run_cell_magic", "magic"})
_CODE_METHODS = frozenset({"run_cell", "run_cell_async", "ex", "ev"})
# No other class has methods with these names, so they count whatever their object is called.
_UNMISTAKABLE_METHODS = frozenset({"run_line_magic", "run_cell_magic", "system_raw", "system_piped"})

_PROMPT = re.compile(r"^[^\S\n]*(?:>>>[ \t]?|\.\.\.+:?[ \t]?|(?:(?:\[nav\]|\[ins\])? )?In \[\d+\]: )", re.MULTILINE)
# A cell without any of these has no commands, and IPython leaves it unchanged. A cell with one of them may have some.
_MARKS = re.compile(r"^[ \t]*[!%,;/]|=[\s\\]*[!%]|[?\r]", re.MULTILINE)
_MARKED_LINE = re.compile(r"^[ \t]*[!%?,;/]", re.MULTILINE)
# IPython takes these for line ends and Python does not, so what one reads as text could be a command to the other.
_ODD_LINE_ENDS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# Whether the line continues after this depends on the version of Python's tokenizer.
_ODD_CONTINUATION = re.compile(r"\\\r(?!\n)")
# A one-line cell that begins with the name of a magic runs that magic, unless a variable has that name.
_AUTOMAGIC = re.compile(r"^\s*([A-Za-z_]\w*)(?!\w)\s*(?![=,])")
_OPTIONS = re.compile(r"^(?:\s*-\w+(?:\s+\d+)?(?=\s|$))*\s*")
# What IPython's transformer raises on hostile text, some of it through bugs. The session's own transformer raises as
# well, and then runs nothing.
_TRANSFORMER_ERRORS = (SyntaxError, ValueError, IndexError, AssertionError, tokenize.TokenError)


class Unreadable(Exception):
    """The code is not Python as this server's interpreter knows it."""

    def __init__(self, line: int, reason: str, error: SyntaxError | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason
        self.error = error
        """Python's own error, where it is one of syntax."""


@dataclass(frozen=True, slots=True)
class Escape:
    """A magic, or a shell command, whose name is `!`."""

    line: int
    name: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a cell. Line numbers in `tree` are those of the cell."""

    tree: ast.Module
    escapes: list[Escape] = field(default_factory=list[Escape])
    bodies: list["Reading"] = field(default_factory=list["Reading"])
    """The Python inside magics, and the cell as other versions of IPython read it."""
    first_word: str = ""
    """The first word of a one-line cell, which is a magic unless a variable has that name."""


def read_cell(code: str) -> Reading:
    """Read a cell, or raise `Unreadable`."""
    return _Reader().read(code, 1, 0)


def is_quick(code: str) -> bool:
    """Return whether the code is short and has nothing for IPython; what is not quick is to be read in a thread.

    IPython takes 0.4 s to load and 4 ms for 1,000 characters.
    """
    return len(code) <= _SHORT_CHARS and not (_MARKS.search(code) or _PROMPT.search(code))


def is_shell(magic: str) -> bool:
    """Return whether a magic runs a command of the shell."""
    return magic in _SHELL_MAGICS


def is_shell_method(method: str) -> bool:
    """Return whether a method of IPython's shell runs a command."""
    return method in _SHELL_METHODS


class _Transformer(Protocol):
    """The part of IPython's `TransformerManager`, which has no types, that this module uses."""

    cleanup_transforms: Sequence[Callable[[list[str]], list[str]]]
    line_transforms: Sequence[Callable[[list[str]], list[str]]]

    def do_one_token_transform(self, lines: list[str]) -> tuple[bool, list[str]]: ...


@functools.cache
def _transformer() -> _Transformer:
    from IPython.core.inputtransformer2 import TransformerManager

    return cast("_Transformer", TransformerManager())


class _Reader:
    """Reads one cell and all code nested in it, up to a total number of tokens."""

    def __init__(self) -> None:
        self._tokens_left = _MAX_TOKENS_READ

    def read(self, code: str, first_line: int, depth: int) -> Reading:
        """Read a cell, or the body of a magic."""
        if depth > _MAX_NESTED:
            raise Unreadable(first_line, "magics in magics without end")
        # IPython skips blank lines at the start of a cell.
        blank = code.rfind("\n", 0, len(code) - len(code.lstrip())) + 1
        first_line, code = first_line + code.count("\n", 0, blank), code[blank:]
        if odd := _ODD_LINE_ENDS.search(code) or _ODD_CONTINUATION.search(code):
            number = first_line + code.count("\n", 0, odd.start())
            raise Unreadable(number, f"the line separator {odd[0][-1]!a} stands in the code; write it as an escape")
        readings: list[Reading] = []
        errors: list[Unreadable] = []
        for text in _versions(code):
            try:
                readings.append(self._read(text, first_line, depth))
            except Unreadable as error:
                errors.append(error)
        if not readings:
            raise errors[0]
        readings[0].bodies.extend(readings[1:])
        return readings[0]

    def _read(self, text: str, first_line: int, depth: int) -> Reading:
        self._spend(text, first_line)
        text = text if text.endswith("\n") else f"{text}\n"
        plain = None
        with suppress(Unreadable):
            plain = _parsed(text, first_line)
        if plain is None and len(_MARKED_LINE.findall(text)) > MAX_ESCAPES:
            raise Unreadable(first_line, f"more than {MAX_ESCAPES:,} magics")
        transformed = self._transformed(text, first_line) if _MARKS.search(text) else text
        if plain is not None and transformed == text:
            word = _AUTOMAGIC.match(text) if "\n" not in text.strip() else None
            return self._with_calls(Reading(plain, first_word=word[1] if word else ""), text, depth)
        reading = self._with_calls(Reading(_parsed(transformed, first_line)), text, depth)
        if plain is not None:
            # Another version of IPython may find nothing to turn into a call.
            reading.bodies.append(Reading(plain))
        return reading

    def _spend(self, text: str, first_line: int) -> None:
        tokens = len(_TOKEN.findall(text))
        if tokens > _MAX_TOKENS:
            raise Unreadable(
                first_line, f"{tokens:,} words and signs take too long to read, the limit is {_MAX_TOKENS:,}"
            )
        self._tokens_left -= tokens
        if self._tokens_left < 0:
            raise Unreadable(first_line, "so many magics in so long a cell take too long to read")

    def _transformed(self, text: str, first_line: int) -> str:
        """Return the text with calls in place of commands, each on the line on which its command began."""
        transformer = _transformer()
        lines = text.splitlines(keepends=True)
        for transform in transformer.line_transforms:
            lines = transform(lines)
        done: list[str] = []
        for _ in range(_MAX_TRANSFORMS):
            self._spend("".join(lines), first_line)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    has_changed, changed = transformer.do_one_token_transform(lines)
            except _TRANSFORMER_ERRORS as error:
                raise Unreadable(first_line, f"IPython cannot read it: {error}") from None
            if not has_changed:
                return "".join((*done, *lines))
            place = next(at for at, line in enumerate(changed) if at >= len(lines) or line != lines[at])
            # Keep the number of lines, so that later lines keep their numbers.
            lines = [*changed[: place + 1], *["\n"] * (len(lines) - len(changed)), *changed[place + 1 :]]
            if not lines[place].startswith((" ", "\t")):
                # After a command that is not indented no block is open, so IPython need not reread the lines before.
                done += lines[: place + 1]
                lines = lines[place + 1 :]
        raise Unreadable(first_line, f"IPython reads no more than {_MAX_TRANSFORMS} magics in a cell")

    def _with_calls(self, reading: Reading, text: str, depth: int) -> Reading:
        """Read the calls that magics and commands were turned into, and those that were written as calls."""
        for node in ast.walk(reading.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method = node.func.attr
                if method in _UNMISTAKABLE_METHODS or _is_shell_object(node.func.value):
                    self._take(node, method, text, reading, depth)
        reading.escapes.sort(key=lambda escape: escape.line)
        return reading

    def _take(self, node: ast.Call, method: str, text: str, reading: Reading, depth: int) -> None:
        """Add to `reading` what one call of IPython's shell does."""
        texts = [_text(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]
        if method in _SHELL_METHODS:
            reading.escapes.append(Escape(node.lineno, SHELL))
            if method not in _PLAIN_SHELL_METHODS:
                self._take_fields(texts[0] if texts else "", node.lineno, reading, depth)
        elif method in _CODE_METHODS and texts and texts[0]:
            reading.bodies.append(self.read(texts[0], node.lineno, depth + 1))
        elif method in _MAGIC_METHODS and texts:
            body = (texts[2] or "") if method == "run_cell_magic" and len(texts) > 2 else None
            name, argument = _magic(texts[:2])
            if name in _HELP_MAGICS and name not in text:
                return
            reading.escapes.append(Escape(node.lineno, name))
            self._take_fields(argument, node.lineno, reading, depth)
            if name in _EXPANDED_CELL_MAGICS:
                self._take_fields(body, node.lineno + 1, reading, depth)
            if name in _SHELL_MAGICS:
                reading.escapes.append(Escape(node.lineno, SHELL))
            else:
                reading.bodies.extend(self._code_of(name, argument, body, node.lineno, depth))

    def _take_fields(self, text: str | None, line: int, reading: Reading, depth: int) -> None:
        """Read the expressions in braces that IPython evaluates in a command or in the line of a magic."""
        for expression in _fields(text or ""):
            self._spend(expression, line)
            with suppress(Unreadable):  # IPython cannot evaluate it either, and leaves the text as it is
                tree = _parsed(f"({expression}\n)\n", line)
                reading.bodies.append(self._with_calls(Reading(tree), expression, depth + 1))

    def _code_of(self, name: str, argument: str, body: str | None, line: int, depth: int) -> Iterator[Reading]:
        """Read the Python in a magic: its body, and what follows the options in its own line."""
        if body is not None and name not in _TEXT_CELL_MAGICS:
            yield self.read(body, line + 1, depth + 1)
        if name in _PYTHON_LINE_MAGICS if body is None else name in _PYTHON_CELL_MAGICS and name != "capture":
            options = _OPTIONS.match(argument)
            yield self.read(argument[options.end() if options else 0 :], line, depth + 1)


def _fields(text: str) -> Iterator[str]:
    """Yield the expressions that IPython's formatter evaluates, found by the parser that it uses (`str.format`)."""
    with suppress(ValueError):  # raised after the fields before the fault were evaluated
        for _, name, spec, _ in string.Formatter().parse(text):
            if name is not None:
                yield f"{name}:{spec}" if spec else name


def _versions(code: str) -> Iterator[str]:
    """Yield the cell as versions of IPython begin to read it: with its prompts or without."""
    lines = _unindented(code.splitlines(keepends=True))
    plain = "".join(lines)
    if not any(map(_PROMPT.match, lines)):
        yield plain
        return
    cleaned = lines
    for transform in _transformer().cleanup_transforms:
        cleaned = transform(cleaned)
    stripped = _unindented([_PROMPT.sub("", line, count=1) for line in lines])
    yield from dict.fromkeys(("".join(cleaned), plain, "".join(stripped)))


def _unindented(lines: list[str]) -> list[str]:
    """Return the lines without the first one's indentation, as IPython 8 does; later versions refuse what differs."""
    if not lines or not lines[0].strip():
        return lines
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip(" \t"))]
    return [line.removeprefix(indent) for line in lines] if indent else lines


def _parsed(text: str, first_line: int) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(first_line - 1 + (error.lineno or 1), error.msg or "invalid syntax", error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(first_line, str(error) or "nested too deeply") from None
    return ast.increment_lineno(tree, first_line - 1) if first_line > 1 else tree


def _magic(texts: list[str | None]) -> tuple[str, str]:
    """Return the name of a magic and its argument; the name is empty if it is not a literal."""
    if texts[0] is None:
        return "", ""
    # IPython finds no magic in `% run x`; a policy treats it as `%run x`.
    name, *rest = " ".join(text or "" for text in texts).split(maxsplit=1) or [""]
    return name.lstrip("%"), "".join(rest)


def _is_shell_object(node: ast.expr) -> bool:
    """Return whether an expression is a call of `get_ipython`, wherever that was imported from."""
    called = node.func if isinstance(node, ast.Call) else None
    return "get_ipython" in (getattr(called, "id", ""), getattr(called, "attr", ""))


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
