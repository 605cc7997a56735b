"""The policy file: read, validated, and its faults told with the line they stand in. It is used whole or not at all.

Tables that belong to other rooms are validated by the models that come with the call.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from belljar.errors import PolicyError
from belljar.policy.rules import Policy

MOST_BYTES = 1024 * 1024
MOST_FAULTS = 10
HINT = "`belljar policy check FILE` checks a file without starting a server"
_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=(.*)$""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")

Place = tuple[int | str, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Where a policy came from, for whoever has a fault to tell."""

    path: str
    lines: dict[Place, int]
    """Of each table and key, its line from 1 on."""

    def line_of(self, place: Place) -> int:
        """The line of a place in the file, or of the nearest thing around it that has one."""
        return next((self.lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in self.lines), 1)

    def faults(self, error: ValidationError, *within: str) -> list[tuple[int, str]]:
        """Lines and what is wrong there; `within` names the table that was validated by itself."""
        return [self._fault((*within, *fault["loc"]), fault["msg"]) for fault in error.errors(include_url=False)]

    def explain(self, faults: list[tuple[int, str]]) -> PolicyError:
        """All of them, in the order of their lines."""
        said = [f"line {line}: {what}" for line, what in sorted(faults)]
        more = [f"and {len(said) - MOST_FAULTS} more"] if len(said) > MOST_FAULTS else []
        separator = "\n  "
        return PolicyError(f"policy {self.path}, {separator.join([*said[:MOST_FAULTS], *more])}", hint=HINT)

    def _fault(self, place: Place, said: str) -> tuple[int, str]:
        reason = said.removeprefix("Value error, ").replace("Input should", "it should", 1)
        reason = "no such key" if reason == "Extra inputs are not permitted" else reason
        return self.line_of(place), f"{_in_words(place)}: {reason}"


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy that is in order, and its source."""

    policy: Policy
    source: PolicySource
    sections: Mapping[str, BaseModel] = field(default_factory=dict[str, BaseModel])
    """Tables of other rooms, those that are in the file."""


def load_policy(path: Path, sections: Mapping[str, type[BaseModel]] = {}) -> LoadedPolicy:
    """Read a policy file, or say what is wrong with it and where."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise PolicyError(
            f"policy {path} cannot be read: {error.strerror}", hint="Set policy to a TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"policy {path} is not UTF-8 at byte {error.start:,}", hint=HINT) from error
    if len(content) > MOST_BYTES:
        raise PolicyError(f"policy {path} has more than {MOST_BYTES:,} bytes", hint=HINT)
    return parse_policy(text, str(path), sections)


def parse_policy(text: str, path: str, sections: Mapping[str, type[BaseModel]] = {}) -> LoadedPolicy:
    """A policy from its text."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"policy {path} is not TOML: {error}", hint=HINT) from error
    source = PolicySource(path, _lines(text))
    faults: list[tuple[int, str]] = []

    def validated(model: type[Model], values: Any, *within: str) -> Model | None:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            faults.extend(source.faults(error, *within))
            return None

    # Each by itself and all of them before any fault is told: who mends one should not meet the next one then.
    others = {name: validated(model, values[name], name) for name, model in sections.items() if name in values}
    policy = validated(Policy, {name: value for name, value in values.items() if name not in others})
    if policy is None or faults:
        raise source.explain(faults)
    return LoadedPolicy(policy, source, {name: section for name, section in others.items() if section is not None})


def _in_words(place: Place) -> str:
    """As TOML's readers count: the first of the tables is number 1. pydantic's own steps are left out."""
    steps = [str(step + 1) if isinstance(step, int) else step for step in place]
    return ".".join(step for step in steps if not step.startswith(("function-", "function_"))) or "the file"


def _lines(text: str) -> dict[Place, int]:
    """The line of every table header and key. Keys inside of inline tables have the line of the key they are under."""
    found: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()
    closing = ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if header := _HEADER.match(line):
            table = _entered(_parts(header[2]), counts, is_array=header[1] == "[[")
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key[1])), number)
            closing = _open_text(key[2])
    return found


def _entered(name: tuple[str, ...], counts: dict[Place, int], *, is_array: bool) -> Place:
    """A header's place: each array that it passes through stands at its latest table."""
    place: Place = ()
    for index, part in enumerate(name):
        place = (*place, part)
        if index == len(name) - 1 and is_array:
            counts[place] = counts.get(place, -1) + 1
        if place in counts:
            place = (*place, counts[place])
    return place


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple("".join(part) for part in _PART.findall(dotted))


def _open_text(value: str) -> str:
    """The quotes that a text of several lines waits for, if the line leaves one open."""
    return next((quotes for quotes in ('"""', "'''") if value.count(quotes) % 2), "")
