"""What a file of a session may be called, and how names that callers or code chose are shown. Opens nothing."""

import os

from belljar.errors import InvalidPath

SANDBOX_ROOT = "/mnt/data"
"""Where code inside a sandbox sees the folder; callers may say it."""

MAX_DEPTH = 64
MAX_COMPONENT_BYTES = 255

UNFINISHED = ".belljar-unfinished-"
"""How names start that we give to files until they are finished."""

_RELATIVE_HINT = "Use a path relative to the session folder, such as 'data/table.csv'"
_SHOWN_CHARACTERS = 120


def split(path: str, host_root: str) -> tuple[str, ...]:
    """The components of a caller's path in the folder that the host has at `host_root`, or `InvalidPath`."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise bad_name(path, "is not valid Unicode") from error
    if b"\0" in encoded:
        raise bad_name(path, "contains a NUL character")
    parts = tuple(part for part in _relative(path, host_root).split("/") if part not in ("", "."))
    if ".." in parts:
        raise bad_name(path, "contains '..'")
    if len(parts) > MAX_DEPTH:
        raise bad_name(path, f"is {len(parts)} levels deep, and the limit is {MAX_DEPTH}")
    if any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts):
        raise bad_name(path, f"has a component longer than {MAX_COMPONENT_BYTES} bytes")
    return parts


def _relative(path: str, host_root: str) -> str:
    if not path.startswith("/"):
        return path
    # Where nothing is mounted over it, code sees the folder under its host path and reports that.
    for prefix in (SANDBOX_ROOT, host_root):
        if path == prefix or path.startswith(prefix + "/"):
            return path[len(prefix) :]
    raise bad_name(path, "is an absolute path outside the session folder")


def display_name(raw: str) -> str:
    """A path as callers may see it: valid Unicode, bytes that are none replaced."""
    return raw if raw.isascii() else os.fsencode(raw).decode(errors="replace")


def shown(name: str) -> str:
    """A caller's value in an error message, at a length that can be read."""
    return repr(name) if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]!r}…"


def bad_name(name: str, reason: str) -> InvalidPath:
    """The refusal of a path that can name nothing in the folder."""
    return InvalidPath(f"the path {shown(name)} {reason}", hint=_RELATIVE_HINT)
