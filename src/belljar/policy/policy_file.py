"""Reads and validates the policy file, and reports every fault with its line. A file with a fault is not used at all.

Tables that belong to other packages are validated by the models that the caller passes.
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

MAX_BYTES = 1024 * 1024
MAX_FAULTS = 10
HINT = "`belljar policy check FILE` checks a file without starting a server"
_HEADER = re.compile(r"^\s*(\[\[?)([^\]]+)\]")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=(.*)$""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")

Place = tuple[int | str, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The path of a policy and the lines of its keys, for reporting faults."""

    path: str
    lines: dict[Place, int]
    """The line of each table and key, counted from 1."""

    def line_of(self, place: Place) -> int:
        """Return the line of a place in the file, or of the nearest enclosing table or key that has one."""
        return next((self.lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in self.lines), 1)

    def faults(self, error: ValidationError, *within: str) -> list[tuple[int, str]]:
        """Return the line and the text of each fault; `within` names the table that was validated by itself."""
        return [self._fault((*within, *fault["loc"]), fault["msg"]) for fault in error.errors(include_url=False)]

    def explain(self, faults: list[tuple[int, str]]) -> PolicyError:
        """Return an error that lists the faults in the order of their lines, at most ten of them."""
        messages = [f"line {line}: {what}" for line, what in sorted(faults)]
        more = [f"and {len(messages) - MAX_FAULTS} more"] if len(messages) > MAX_FAULTS else []
        separator = "\n  "
        return PolicyError(f"policy {self.path}, {separator.join([*messages[:MAX_FAULTS], *more])}", hint=HINT)

    def _fault(self, place: Place, message: str) -> tuple[int, str]:
        reason = message.removeprefix("Value error, ").replace("Input should", "it should", 1)
        reason = "no such key" if reason == "Extra inputs are not permitted" else reason
        return self.line_of(place), f"{_dotted_name(place)}: {reason}"


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A valid policy and its source."""

    policy: Policy
    source: PolicySource
    sections: Mapping[str, BaseModel] = field(default_factory=dict[str, BaseModel])
    """Those tables of other packages that are in the file."""


def load_policy(path: Path, sections: Mapping[str, type[BaseModel]] = {}) -> LoadedPolicy:
    """Read a policy file; raise `PolicyError` with what is wrong and where."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise PolicyError(
            f"policy {path} cannot be read: {error.strerror}", hint="Set policy to a TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"policy {path} is not UTF-8 at byte {error.start:,}", hint=HINT) from error
    if len(content) > MAX_BYTES:
        raise PolicyError(f"policy {path} has more than {MAX_BYTES:,} bytes", hint=HINT)
    return parse_policy(text, str(path), sections)


def parse_policy(text: str, path: str, sections: Mapping[str, type[BaseModel]] = {}) -> LoadedPolicy:
    """Return the policy in a text; raise `PolicyError` with what is wrong and where."""
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

    # Validate all tables, each by itself, before raising, so that the operator sees all faults at once.
    others = {name: validated(model, values[name], name) for name, model in sections.items() if name in values}
    policy = validated(Policy, {name: value for name, value in values.items() if name not in others})
    if policy is None or faults:
        raise source.explain(faults)
    return LoadedPolicy(policy, source, {name: section for name, section in others.items() if section is not None})


def _dotted_name(place: Place) -> str:
    """Return a place as a dotted name, with tables counted from 1 and without pydantic's own steps."""
    steps = [str(step + 1) if isinstance(step, int) else step for step in place]
    return ".".join(step for step in steps if not step.startswith(("function-", "function_"))) or "the file"


def _lines(text: str) -> dict[Place, int]:
    """Return the line of every table header and key. Keys inside inline tables count as the key that they are under."""
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
    """Return a header's place; each array of tables on the way stands for its latest table."""
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
    """Return the quotes that close a multi-line string, if the line leaves one open."""
    return next((quotes for quotes in ('"""', "'''") if value.count(quotes) % 2), "")
