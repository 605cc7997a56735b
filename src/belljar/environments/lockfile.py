"""The lock of a session's environment: the version of every package, the session's own before the environment's.

A session may have written anything into its layer, so only well-formed names and versions are copied from it.
"""

import json
from pathlib import Path
from typing import Any, cast

from belljar.environments.base import Environment, inspect_interpreter
from belljar.environments.installed_packages import Distribution, PackageFolder

_DIRECT_LIMIT = 64_000


def lock_of(environment: Environment, layer: Path | None = None) -> str:
    """Return requirements that reproduce the packages with pip, uv or a managed environment; blocks."""
    interpreter = inspect_interpreter(environment.python)
    folders = map(PackageFolder, interpreter.paths)
    found: dict[str, Distribution] = {}
    for packages in folders:
        for name, distribution in packages.distributions.items():
            found.setdefault(name, distribution)
    own = PackageFolder(layer, is_trusted=False).distributions if layer is not None else {}
    pinned = {**found, **own}
    head = f"# Python {interpreter.version}, environment {environment.name}: {len(pinned)} packages"
    more = [f"# of this session alone: {', '.join(sorted(own))}"] if own else []
    lines = [pin_of(pinned[name], is_own=name in own) for name in sorted(pinned)]
    return "\n".join([head, *more, *lines]) + "\n"


def pin_of(distribution: Distribution, *, is_own: bool) -> str:
    """Return a requirement for this version, or a comment if it is not from the index.

    The recorded origin of a session's own package is not read, because the session could have written it.
    """
    pin = f"{distribution.name}=={distribution.version}"
    origin = "" if is_own else _origin(distribution.metadata / "direct_url.json")
    return f"# {pin} comes from {origin}" if origin else pin


def _origin(file: Path) -> str:
    """Return the origin of a package that is not from the index: an editable folder or a repository; else empty."""
    try:
        with file.open("rb") as content:
            parsed: Any = json.loads(content.read(_DIRECT_LIMIT))
    except (OSError, ValueError):
        return ""
    if not isinstance(parsed, dict):
        return ""
    table = cast("dict[str, Any]", parsed)
    folder: Any = table.get("dir_info")
    # Packages of conda name the folder that they were built in, which is of no use here.
    is_editable = isinstance(folder, dict) and bool(cast("dict[str, Any]", folder).get("editable"))
    return str(table.get("url", "elsewhere")) if is_editable or "vcs_info" in table else ""
