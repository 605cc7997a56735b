"""Reads the text of a workflow, YAML or JSON, into plain values, and remembers the line of each.

The text may come from a model, so it is hostile: its size, depth and number of values are bounded, aliases count for
all that they stand for, and nothing but text, numbers, booleans, null, lists and mappings comes out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from belljar.errors import WorkflowInvalid

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_VALUES = 400_000
MAX_DEPTH = 64
MAX_PROBLEMS = 20
_SHOWN_CHARS = 200
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE, _FALSE = frozenset({"true", "True", "TRUE"}), frozenset({"false", "False", "FALSE"})
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")
_COLLECTION_TAGS = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

Path = tuple[str | int, ...]
"""Where a value is: the keys and indexes that lead to it."""


@dataclass(frozen=True, slots=True)
class TextProblem:
    """Something that is wrong with a workflow."""

    message: str
    file: str = ""
    line: int = 0
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.file or 'workflow'}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{self.message}{f'. {self.hint}' if self.hint else ''}"


def invalid(problems: list[TextProblem]) -> WorkflowInvalid:
    """Return the error that tells all problems, as many as a person reads."""
    problems = sorted(problems, key=lambda problem: (problem.file, problem.line))
    lines = [str(problem) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return WorkflowInvalid("\n".join(lines))


@dataclass(frozen=True, slots=True)
class LocatedText:
    """A text that was read: its value, and the lines of the values in it."""

    file: str
    """What the text is called in errors; empty for a text without a name."""
    text: str
    data: Any
    lines: Mapping[Path, int] = field(default_factory=dict[Path, int], repr=False)

    def line(self, path: Path) -> int:
        """Return the line of a value, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def problem(self, path: Path, message: str, hint: str = "") -> TextProblem:
        """Return a problem at the line of a value."""
        return TextProblem(message, self.file, self.line(path), hint)


def read_text(text: str, file: str = "") -> LocatedText:
    """Return the value of a YAML or JSON text; raise `WorkflowInvalid` with the line of what is wrong."""
    size = len(text.encode(errors="replace"))
    if size > MAX_TEXT_BYTES:
        hint = "Put data into files and repeat steps in a loop"
        raise invalid([TextProblem(f"the text has {size:,} bytes, the limit is {MAX_TEXT_BYTES:,}", file, 0, hint)])
    import yaml  # it takes 20 ms to import, and most servers run no workflow

    reader = _YamlReader(file, yaml)
    try:
        data = reader.read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, [error.context, error.problem]))
        raise invalid([TextProblem(f"this is no YAML: {what}", file, mark.line + 1 if mark else 0)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise invalid([TextProblem(f"this is no YAML: {str(error)[:_SHOWN_CHARS]}", file)]) from None
    return LocatedText(file, text, data, reader.lines)


class _YamlReader:
    """Builds values from the events of the YAML parser, which has no recursion that a deep text could exhaust."""

    def __init__(self, file: str, yaml: Any) -> None:
        self.lines: dict[Path, int] = {}
        self._file = file
        self._yaml = yaml
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._open: set[str] = set()
        self._count = 0

    def read(self, text: str) -> Any:
        # libyaml's parser where PyYAML was built with it, which it is in its wheels: 20 times as fast.
        yaml = self._yaml
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        events: Iterator[Any] = yaml.parse(text, Loader=loader)
        data, documents = None, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error(event, "there is a second document", "Keep one workflow in a text")
            elif isinstance(event, yaml.AliasEvent | yaml.NodeEvent):
                data = self._value(event, events, (), 0)
        return data

    def _value(self, event: Any, events: Iterator[Any], path: Path, depth: int) -> Any:
        self.lines[path] = event.start_mark.line + 1
        if isinstance(event, self._yaml.AliasEvent):
            return self._alias(event)
        if depth > MAX_DEPTH:
            raise self._error(event, f"values are nested more than {MAX_DEPTH} deep")
        before = self._count
        self._add(event, 1)
        anchor = event.anchor
        if anchor is not None:
            self._open.add(anchor)
        if isinstance(event, self._yaml.ScalarEvent):
            value = self._scalar(event)
        elif event.tag not in _COLLECTION_TAGS:
            raise self._error(event, f"{event.tag} is not allowed here", "Write plain text, lists and mappings")
        elif isinstance(event, self._yaml.SequenceStartEvent):
            value = self._sequence(events, path, depth)
        else:
            value = self._mapping(events, path, depth)
        if anchor is not None:
            self._open.discard(anchor)
            self._anchors[anchor] = value, self._count - before
        return value

    def _sequence(self, events: Iterator[Any], path: Path, depth: int) -> list[Any]:
        found: list[Any] = []
        for event in events:
            if isinstance(event, self._yaml.SequenceEndEvent):
                break
            found.append(self._value(event, events, (*path, len(found)), depth + 1))
        return found

    def _mapping(self, events: Iterator[Any], path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in events:
            if isinstance(event, self._yaml.MappingEndEvent):
                break
            if not isinstance(event, self._yaml.ScalarEvent):
                raise self._error(event, "a key is no text")
            key = event.value
            if key == "<<":
                raise self._error(event, "merge keys (<<) are not read", "Write the keys out")
            if key in found:
                raise self._error(event, f"the key {key[:_SHOWN_CHARS]!r} is there twice", "Remove one of them")
            found[key] = self._value(next(events), events, (*path, key), depth + 1)
            self.lines[(*path, key)] = event.start_mark.line + 1
        return found

    def _alias(self, event: Any) -> Any:
        if event.anchor in self._open:
            raise self._error(event, f"*{event.anchor} is part of itself")
        if event.anchor not in self._anchors:
            raise self._error(event, f"*{event.anchor} stands for nothing", f"Name it before with &{event.anchor}")
        value, size = self._anchors[event.anchor]
        self._add(event, size)
        return value

    def _add(self, event: Any, count: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise self._error(
                event,
                f"there are more than {MAX_VALUES:,} values, those that aliases stand for included",
                "Repeat steps in a loop, and keep data in files",
            )

    def _scalar(self, event: Any) -> Any:
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            raise self._error(event, f"{event.tag} is not allowed here", "Write the value without a tag")
        text: str = event.value
        is_plain = event.tag is None and event.style in (None, "")
        # YAML 1.2's rules, under which `on` and `no` are texts; a key named `on` is part of the format.
        if not is_plain:
            return text
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        return text

    def _error(self, event: Any, message: str, hint: str = "") -> WorkflowInvalid:
        return invalid([TextProblem(message, self._file, event.start_mark.line + 1, hint)])
