"""The lock of a session's environment: every package at its version, the session's own before the environment's.

A session may have written anything into its layer: only names and versions that are such are repeated.
"""

import json
from pathlib import Path
from typing import Any, cast

from belljar.environments.base import Environment, inspect_interpreter
from belljar.environments.installed_packages import Distribution, PackageFolder

_DIRECT_LIMIT = 64_000


def lock_of(environment: Environment, layer: Path | None = None) -> str:
    """Requirements that make the same packages again, for pip, uv or a managed environment; blocks."""
    interpreter = inspect_interpreter(environment.python)
    shelves = map(PackageFolder, interpreter.paths)
    found: dict[str, Distribution] = {}
    for shelf in shelves:
        for name, distribution in shelf.distributions.items():
            found.setdefault(name, distribution)
    own = PackageFolder(layer, is_trusted=False).distributions if layer is not None else {}
    pinned = {**found, **own}
    head = f"# Python {interpreter.version}, environment {environment.name}: {len(pinned)} packages"
    more = [f"# of this session alone: {', '.join(sorted(own))}"] if own else []
    lines = [pin_of(pinned[name], is_own=name in own) for name in sorted(pinned)]
    return "\n".join([head, *more, *lines]) + "\n"


def pin_of(distribution: Distribution, *, is_own: bool) -> str:
    """A requirement for this version; a comment for what the index does not have. A session's word is not asked."""
    pin = f"{distribution.name}=={distribution.version}"
    origin = "" if is_own else _origin(distribution.metadata / "direct_url.json")
    return f"# {pin} comes from {origin}" if origin else pin


def _origin(file: Path) -> str:
    """Where a package is from that the index does not have: a folder under work, or a repository."""
    try:
        with file.open("rb") as content:
            told: Any = json.loads(content.read(_DIRECT_LIMIT))
    except (OSError, ValueError):
        return ""
    if not isinstance(told, dict):
        return ""
    table = cast("dict[str, Any]", told)
    folder: Any = table.get("dir_info")
    # Packages of conda name the folder they were built in, which is nobody's.
    is_editable = isinstance(folder, dict) and bool(cast("dict[str, Any]", folder).get("editable"))
    return str(table.get("url", "elsewhere")) if is_editable or "vcs_info" in table else ""
