"""The rules for what the `belljar.toml` of an untrusted working directory may do to a setting.

Anybody may have put that file there: the author of a project, an archive, a program that was told to write it. It may
narrow what sessions can do, and nothing else. Each setting of `table.py` has one of these rules; a setting without one
cannot be set by such a file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pydantic.fields import FieldInfo

from belljar.settings.kinds import NONE


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The value in force after the file was applied, and whether that is all that the file asked for."""

    value: Any
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Tightening:
    """One rule; `narrow` gets the value without the file and the file's value."""

    narrow: Callable[[Any, Any], Narrowed]
    description: str
    """What an untrusted file may do, for the reference page."""


def rule_of(field: FieldInfo) -> Tightening | None:
    """Return the rule that a setting declares."""
    return next((mark for mark in field.metadata if isinstance(mark, Tightening)), None)


def narrowed(field: FieldInfo, current: Any, proposed: Any) -> Narrowed:
    """Return what an untrusted file makes of a setting."""
    return (rule_of(field) or NEVER).narrow(current, proposed)


def towards(*order: Any) -> Tightening:
    """Make the rule of a setting with few values, loosest first; values in one tuple are equally strict."""
    steps = [cast("tuple[Any, ...]", step) if isinstance(step, tuple) else (step,) for step in order]
    ranks = {value: rank for rank, step in enumerate(steps) for value in step}

    def narrow(current: Any, proposed: Any) -> Narrowed:
        is_fine = proposed == current or ranks.get(proposed, -1) > ranks.get(current, len(order))
        return Narrowed(proposed if is_fine else current, is_fine)

    ends = " or ".join(str(value).lower() if isinstance(value, bool) else f'"{value}"' for value in steps[-1])
    return Tightening(narrow, f"may change it towards {ends}")


def _keep(current: Any, proposed: Any) -> Narrowed:
    return Narrowed(current, proposed == current)


def _lower(current: Any, proposed: Any) -> Narrowed:
    # Written as a comparison that is false for NaN, so that NaN is refused.
    is_fine = _number(proposed) <= _number(current)
    return Narrowed(proposed if is_fine else current, is_fine)


def _raise(current: Any, proposed: Any) -> Narrowed:
    is_fine = _number(proposed) >= _number(current)
    return Narrowed(proposed if is_fine else current, is_fine)


def _number(value: Any) -> float:
    """Return a limit as a number; no limit is infinity."""
    return math.inf if value is None or value == NONE else float(value)


def _shorten(current: Any, proposed: Any) -> Narrowed:
    kept = [entry for entry in proposed if entry in current]
    return Narrowed(kept, len(kept) == len(proposed))


def _extend(current: Any, proposed: Any) -> Narrowed:
    return Narrowed([*current, *(entry for entry in proposed if entry not in current)], is_whole=True)


NEVER = Tightening(_keep, "may not set it")
LOWER = Tightening(_lower, "may lower it")
HIGHER = Tightening(_raise, "may raise it")
FEWER = Tightening(_shorten, "may take entries away")
MORE = Tightening(_extend, "may add entries")
OFF = towards(True, False)
ON = towards(False, True)
