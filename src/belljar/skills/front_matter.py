"""The YAML front matter of a `SKILL.md` as JSON, with the line of whatever is wrong.

The text may come from a model, so it is bounded, and YAML's anchors, tags and merges, by which a short text stands for
a huge value, are refused. Scalars are those of YAML 1.2: `yes`, `010` and `2026-01-31` are text, as in most clients,
which compare what they read with what they were told.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

MAX_BYTES: Final = 65_536
MAX_DEPTH: Final = 16
MAX_NODES: Final = 2_000
_FENCE: Final = "---"
_DIGITS: Final = 300
"""More digits than any number that JSON readers agree on."""
_SCALARS: Final[tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...]] = (
    (re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda _: None),
    (re.compile(r"(?:true|True|TRUE)\Z"), lambda _: True),
    (re.compile(r"(?:false|False|FALSE)\Z"), lambda _: False),
    (re.compile(rf"[-+]?[0-9]{{1,{_DIGITS}}}\Z"), int),
    (re.compile(r"0x[0-9a-fA-F]{1,64}\Z"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?\Z"), float),
)


class BadFrontMatter(ValueError):
    """What is wrong with a front matter, and in which line of its file."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(f"line {line}: {reason}")
        self.reason = reason
        self.line = line


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """The fields of a front matter, where each stands, and the Markdown below them."""

    fields: dict[str, Any]
    lines: dict[str, int]
    """The line of each field, for errors about its value."""
    body: str


def parse(text: str) -> FrontMatter:
    """Return the front matter of a `SKILL.md`; BadFrontMatter names the line and the reason."""
    lines = text.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].rstrip() != _FENCE:
        raise BadFrontMatter("it does not begin with --- and a YAML front matter")
    end = next((place for place, line in enumerate(lines) if place and line.rstrip() == _FENCE), None)
    if end is None:
        raise BadFrontMatter("the front matter has no closing ---")
    matter = "".join(lines[1:end])
    if len(matter.encode(errors="replace")) > MAX_BYTES:
        raise BadFrontMatter(f"the front matter is over {MAX_BYTES:,} bytes")
    fields, places = _parsed(matter)
    return FrontMatter(fields, places, "".join(lines[end + 1 :]))


def _parsed(matter: str) -> tuple[dict[str, Any], dict[str, int]]:
    import yaml  # only where a SKILL.md is read: it takes 15 ms

    try:
        _check_events(yaml, matter)
        node = cast("Any", yaml).compose(matter, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
        raise BadFrontMatter(f"it is no YAML: {problem}", _line(mark)) from None
    except yaml.YAMLError as error:
        raise BadFrontMatter(f"it is no YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise BadFrontMatter("it is nested too deeply") from None
    if node is None or node.id != "mapping":
        raise BadFrontMatter("the front matter is no mapping of names to values", _line(node and node.start_mark))
    return cast("dict[str, Any]", _value(node)), {str(key.value): _line(key.start_mark) for key, _ in _pairs(node)}


def _check_events(yaml: Any, matter: str) -> None:
    """Refuse what makes a short text a large value, before any value is made."""
    depth = 0
    events: Iterable[Any] = yaml.parse(matter, Loader=yaml.SafeLoader)
    for number, event in enumerate(events):
        line = _line(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise BadFrontMatter("anchors and aliases (& and *) are not allowed", line)
        if tag := getattr(event, "tag", None):
            raise BadFrontMatter(f"the tag {str(tag)[:40]} is not allowed", line)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise BadFrontMatter(f"it is nested more than {MAX_DEPTH} deep", line)
        if number > MAX_NODES:
            raise BadFrontMatter(f"it has more than {MAX_NODES:,} values", line)


def _value(node: Any) -> Any:
    if node.id == "scalar":
        return _scalar(node)
    if node.id == "sequence":
        return [_value(each) for each in cast("list[Any]", node.value)]
    found: dict[str, Any] = {}
    for key, value in _pairs(node):
        line = _line(key.start_mark)
        name = _scalar(key) if key.id == "scalar" else None
        if not isinstance(name, str):
            raise BadFrontMatter(f"the name {str(key.value)[:40]!r} is no text; put it in quotes", line)
        if name in found:
            raise BadFrontMatter(f"{name[:80]!r} is there twice", line)
        found[name] = _value(value)
    return found


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    return node.value


def _scalar(node: Any) -> Any:
    text = str(node.value)
    if node.style is not None:  # quoted, or a block of text
        return text
    for pattern, read in _SCALARS:
        if pattern.match(text):
            value = read(text)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadFrontMatter(f"{text[:40]} is no number that JSON has", _line(node.start_mark))
            return value
    return text


def _line(mark: Any) -> int:
    """Return the line in the file; the front matter begins in its second."""
    return (mark.line if mark is not None else 0) + 2
