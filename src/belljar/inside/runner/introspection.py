"""Completion, inspection and completeness of code, for a person who types. Knows IPython, not the protocol."""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import itertools
from typing import Any

from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

from . import rich_output

MAX_MATCHES = 1_000
LONGEST_MATCH = 1_000
LONGEST_FORM = 200_000
NOTHING_FOUND: dict[str, Any] = {"type": "inspection", "data": {}}


def no_completion(cursor: int) -> dict[str, Any]:
    """Return the answer for when nothing fits."""
    return {"type": "completion", "matches": [], "start": cursor, "end": cursor}


def complete(shell: Any, code: str, cursor: int) -> dict[str, Any]:
    """Return the names that fit at the cursor; all of them replace the same span."""
    try:
        with provisionalcompleter():
            found = rectify_completions(code, shell.Completer.completions(code, cursor))
            matches = list(itertools.islice(found, MAX_MATCHES))
    except Exception:
        return no_completion(cursor)  # a property or a completer of the session raised
    if not matches:
        return no_completion(cursor)
    texts = [match.text for match in matches if len(match.text) <= LONGEST_MATCH]
    return {"type": "completion", "matches": texts, "start": matches[0].start, "end": matches[0].end}


def inspect(shell: Any, code: str, cursor: int, detail: int) -> dict[str, Any]:
    """Return what the name at the cursor is."""
    try:
        name = token_at_cursor(code, cursor)
        data = rich_output.prepared(shell.object_inspect_mime(name, detail_level=detail)) if name else {}
    except Exception:
        return NOTHING_FOUND  # a KeyError for an unknown name, or whatever an object of the session raises
    forms = {mime: form[:LONGEST_FORM] for mime, form in data.items() if isinstance(form, str)}
    return {"type": "inspection", "data": forms}


def check(shell: Any, code: str) -> dict[str, Any]:
    """Return whether code is complete, incomplete or invalid, and the indentation of the next line."""
    status, indent = shell.input_transformer_manager.check_complete(code)
    return {"type": "checked", "status": status, "indent": " " * min(indent or 0, LONGEST_MATCH)}
