"""JSON as editors write it: with comments and with commas after the last item. Knows nothing of what it says."""

import json
import re
from typing import Any, Final

# Texts come first, so that what looks like a comment inside one stays.
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|/\*.*?\*/)*[}\]])', re.DOTALL)


def loads(text: str) -> Any:
    """The value; raises ValueError where it is none even so."""
    return json.loads(_TOKEN.sub(_kept, text.removeprefix("\ufeff")))


def _kept(token: re.Match[str]) -> str:
    found = token[0]
    # As long as what it replaces, so that an error further down is told at its line and column.
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)
