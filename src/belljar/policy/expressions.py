"""The operator's expressions: rules in CEL (Common Expression Language) and regular expressions in RE2's syntax.

Neither can loop forever, and CEL cannot reach anything outside the values it is given. This module knows names and
values, not what a rule is for. The CEL library is loaded with the first expression, so that a policy without
expressions does not pay for it.
"""

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Protocol, cast

import re2 as _re2  # pyright: ignore[reportMissingTypeStubs]

VARIABLES = ("arguments", "server", "tool", "read_only", "destructive", "calls")
MAX_CHARS = 10_000
# A macro inside a macro takes as many steps as the square of the number of values, and hostile code chooses the
# values. A million steps take half a second.
MAX_STEPS = 1_000_000
# The names that macros bind, as in `arguments.rows.all(row, row.amount < 10)`.
_BOUND = re.compile(r"(?:\.(?:all|exists|exists_one|map|filter)|\bcel\.bind)\s*\(\s*([A-Za-z_]\w*)\s*,")


class ExpressionFailed(Exception):
    """An expression has no value for a call, for example because it compares an argument that is missing."""


class Expression:
    """One compiled CEL expression over the variables `names`."""

    def __init__(self, text: str, names: Collection[str] = VARIABLES) -> None:
        import cel

        if len(text) > MAX_CHARS:
            raise ValueError(f"the expression has {len(text):,} characters, the limit is {MAX_CHARS:,}")
        self.text = text
        try:
            self._program = cel.compile(text)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{text!r} is no CEL expression: {_first_line(error)}") from None
        bound = _BOUND.findall(text)
        self._macros = len(bound)
        self.names = frozenset(self._program.variables()) - {*bound}
        """The names that need a value."""
        unknown = self.names - {*names}
        if unknown:
            raise ValueError(f"{text!r} names {min(unknown)!r}; there are {', '.join(names) or 'none'}")

    def is_true(self, values: Mapping[str, Any]) -> bool:
        """Return whether the expression is true of these values; raise `ExpressionFailed` if it is no boolean."""
        outcome = self.value(values)
        if not isinstance(outcome, bool):
            raise ExpressionFailed(f"it is {type(outcome).__name__}, neither true nor false")
        return outcome

    def value(self, values: Mapping[str, Any], *, literals: int = 0) -> Any:
        """Return the value of the expression; `literals` is how many values a hostile author may have written into it.

        Raises `ExpressionFailed` if there is none.
        """
        if self._macros > 1 and (_size(values) + literals) ** self._macros > MAX_STEPS:
            raise ExpressionFailed("there are too many values to go through")
        try:
            return self._program.execute(dict(values))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ExpressionFailed(_first_line(error)) from None


def _size(value: object) -> int:
    """Return how many values a value contains, itself included."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_size, cast("Mapping[str, object]", value).values()))
    return 1 + sum(map(_size, cast("list[object]", value))) if isinstance(value, list) else 1


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    text = f"no value under {lines[0]}" if isinstance(error, KeyError) else lines[0]
    return text.partition(": ERROR: ")[2] or text


# Regular expressions. RE2 takes linear time: the operator writes the patterns, but the searched text may be hostile.

re2: Any = _re2  # it has no types


class Regex(Protocol):
    """The methods of a compiled regular expression that belljar uses."""

    def search(self, text: str, /) -> object | None:
        """Return the first match, or None."""
        ...

    def sub(self, repl: Any, text: str, /) -> str:
        """Return the text with every match replaced."""
        ...


@lru_cache(maxsize=1_000)
def compiled(pattern: str, *, may_be_empty: bool = False) -> Regex:
    """Compile a pattern; raise ValueError with what is wrong, such as a match of the empty text, found everywhere."""
    quiet = re2.Options()
    quiet.log_errors = False
    try:
        regex = cast("Regex", re2.compile(pattern, quiet))
    except re2.error as error:
        reason = str(error.args[0].decode() if isinstance(error.args[0], bytes) else error)
        raise ValueError(f"{pattern!r} is no regular expression that RE2 takes: {reason}") from None
    if not may_be_empty and regex.search("") is not None:
        raise ValueError(f"{pattern!r} matches the empty text, so it would match everywhere")
    return regex
