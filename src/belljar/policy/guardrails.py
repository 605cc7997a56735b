"""The guardrails of a runtime: reads the policy file, adds the settings' rules to it and applies its limits to them.

Every fault of the file is reported with its line, and a file with a fault is not used at all. Tables that belong to
other packages are validated by the models that the caller passes.
"""

import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from belljar.errors import PolicyError
from belljar.policy.decision_log import DecisionLog
from belljar.policy.guard import CompiledPolicy, Guard, compile_policy
from belljar.policy.rates import SharedRates
from belljar.policy.rules import CodeRule, Policy, PolicyLimits
from belljar.servers import machine_of
from belljar.settings import Settings

MAX_BYTES = 1024 * 1024
MAX_FAULTS = 10
HINT = "`belljar policy check FILE` checks a file without starting a server"
_HEADER = re.compile(r"^\s*(\[\[?)([^\]]+)\]")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=(.*)$""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")

Place = tuple[int | str, ...]
Model = TypeVar("Model", bound=BaseModel)
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_EMPTY = Policy.model_construct()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guardrails:
    """The policy and the settings that hold for every session of a runtime."""

    settings: Settings
    """The settings after the policy's limits were applied."""
    compiled: CompiledPolicy
    sections: Mapping[str, BaseModel] = field(default_factory=dict[str, BaseModel])
    """The file's tables that belong to other packages."""

    def trial(self) -> Guard:
        """Return a guard to learn what the policy would decide; it counts and logs nothing."""
        return Guard(compile_policy(self.compiled.policy))

    def guard(self, session_id: str, principal: str, folder: Path) -> Guard:
        """Return a session's guard, which keeps its state in `folder`."""
        return Guard(self.compiled, session_id, principal, folder)


def read_guardrails(
    settings: Settings, sections: Mapping[str, type[BaseModel]] = {}, *, is_logged: bool = False
) -> Guardrails:
    """Read the policy that the settings name. A faulty file raises, so that the server does not start.

    `is_logged` wants decisions in the log even if there is no policy, because plugins decide too.
    """
    is_wanted = bool(settings.policy or settings.blocked_patterns or settings.guardrails_strict)
    if not settings.guardrails:
        if is_wanted:
            log.warning("guardrails are switched off: the policy is not obeyed")
        decisions = DecisionLog(settings.data_directory) if is_logged else None
        return Guardrails(limited(settings, None), compile_policy(_EMPTY, decisions))
    loaded = load_policy(Path(settings.policy), sections) if settings.policy else None
    policy = loaded.policy if loaded else _EMPTY
    blocked = [blocking(settings.blocked_patterns)] if settings.blocked_patterns else []
    is_strict = policy.strict or settings.guardrails_strict
    policy = policy.model_copy(update={"code": [*policy.code, *blocked], "strict": is_strict})
    decisions = DecisionLog(settings.data_directory) if is_wanted or is_logged else None
    machine = machine_of(settings.data_directory)
    rates = SharedRates(machine / "rates.sqlite") if machine is not None else None
    return Guardrails(
        limited(settings, policy.limits), compile_policy(policy, decisions, rates), loaded.sections if loaded else {}
    )


def blocking(patterns: list[str]) -> CodeRule:
    """Return the rule of the setting `blocked_patterns`: a dotted name blocks its import and use, else a pattern."""
    names = [name for entry in patterns if _NAME.fullmatch(name := entry.strip().removesuffix("("))]
    others = [entry for entry in patterns if not _NAME.fullmatch(entry.strip().removesuffix("("))]
    reason = "it is one of blocked_patterns"
    try:
        return CodeRule.model_validate({"reason": reason, "imports": names, "calls": names, "patterns": others})
    except ValueError as error:
        raise PolicyError(
            f"blocked_patterns: {error}", hint="Write names like os.system, or patterns like open(_, 'w*')"
        ) from None


def limited(settings: Settings, limits: PolicyLimits | None) -> Settings:
    """Return the settings, made stricter where the policy says so."""
    changes: dict[str, object] = {}
    if not settings.allow_network_access or (limits and limits.allow_network_access is False):
        changes["egress"] = []
    elif limits and limits.allowed_networks is not None:
        changes["egress"] = limits.allowed_networks
    if limits and limits.max_execution_time is not None:
        changes["execution_timeout_s"] = min(settings.execution_timeout_s, limits.max_execution_time)
    if limits and limits.max_memory_mb is not None:
        changes["memory_mb"] = min(settings.memory_mb or limits.max_memory_mb, limits.max_memory_mb)
    if limits and limits.max_gpus is not None:
        changes["max_gpus"] = limits.max_gpus if settings.max_gpus is None else min(settings.max_gpus, limits.max_gpus)
    return settings.model_copy(update=changes) if changes else settings


# The policy file


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
