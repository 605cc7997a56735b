"""Regular expressions that take linear time: the operator writes them, but hostile text is searched with them."""

from functools import lru_cache
from typing import Any, Protocol, cast

import re2 as _re2  # pyright: ignore[reportMissingTypeStubs]

re2: Any = _re2  # it has no types


class Regex(Protocol):
    """What of a compiled expression is used."""

    def search(self, text: str, /) -> object | None:
        """The first match, or None."""
        ...

    def sub(self, repl: Any, text: str, /) -> str:
        """The text with every match replaced."""
        ...


@lru_cache(maxsize=1_000)
def compiled(pattern: str, *, may_be_empty: bool = False) -> Regex:
    """Compile; ValueError says what is wrong. One that matches the empty text would be found everywhere."""
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
