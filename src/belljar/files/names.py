"""Checks the names of a session's files, and formats names for callers and error messages. Opens nothing."""

import os

from belljar.errors import InvalidPath

SANDBOX_ROOT = "/mnt/data"
"""Where code inside a sandbox sees the session folder; callers may use this path too."""

MAX_DEPTH = 64
MAX_COMPONENT_BYTES = 255

UNFINISHED = ".belljar-unfinished-"
"""Prefix of the temporary names of files that we have not finished writing."""

_RELATIVE_HINT = "Use a path relative to the session folder, such as 'data/table.csv'"
_SHOWN_CHARACTERS = 120


def split(path: str, host_root: str) -> tuple[str, ...]:
    """Return the components of a caller's path within the folder at `host_root`, or raise `InvalidPath`."""
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
    # In a sandbox that mounts nothing at SANDBOX_ROOT, code sees the folder at its host path and reports that.
    for prefix in (SANDBOX_ROOT, host_root):
        if path == prefix or path.startswith(prefix + "/"):
            return path[len(prefix) :]
    raise bad_name(path, "is an absolute path outside the session folder")


def display_name(raw: str) -> str:
    """Return a path as callers see it, with bytes that are not valid Unicode replaced."""
    return raw if raw.isascii() else os.fsencode(raw).decode(errors="replace")


def shown(name: str) -> str:
    """Return a caller's value for an error message, shortened if it is long."""
    return repr(name) if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]!r}…"


def bad_name(name: str, reason: str) -> InvalidPath:
    """Return the error for a path that cannot name anything in the folder."""
    return InvalidPath(f"the path {shown(name)} {reason}", hint=_RELATIVE_HINT)
