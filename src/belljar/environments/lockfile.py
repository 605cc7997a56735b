"""The lock of a session's environment: the version of every package, the session's own before the environment's.

A session may have written anything into its layer, so only well-formed names and versions are copied from it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from belljar.environments.base import Environment, Interpreter, inspect_interpreter
from belljar.environments.conda.channels import channel_urls, recorded_channels
from belljar.environments.conda.prefix import files_of, own_packages, own_prefix, records_of
from belljar.environments.installed_packages import Distribution, PackageFolder

_DIRECT_LIMIT = 64_000
_RECORD = re.compile(r"([a-z0-9_][a-z0-9_.-]*)-([A-Za-z0-9_.!+]+)-([A-Za-z0-9_.+]+)\.json")
_METADATA = re.compile(r".+\.(?:dist|egg)-info")


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


@dataclass(frozen=True, slots=True)
class _Content:
    """What a prefix contains: packages of conda as NAME=VERSION=BUILD by name, and wheels not installed by conda."""

    pins: dict[str, str]
    wheels: dict[str, Distribution]


def conda_lock(interpreter: Interpreter, name: str, channels: Sequence[str], layer: Path | None = None) -> str:
    """Return an environment.yml that reproduces the packages, for conda's tools or for belljar; blocks.

    `channels` are the ones from the settings. Channels that only a session's own records name are left out.
    """
    prefix = interpreter.prefix.resolve()
    folders = (path.resolve() for path in interpreter.paths)
    base = _content(prefix, [PackageFolder(path) for path in folders if path.is_relative_to(prefix)])
    own, wheels = _Content({}, {}), dict[str, Distribution]()
    if layer is not None:
        own = _content(own_prefix(layer), [PackageFolder(own_packages(layer, interpreter.version), is_trusted=False)])
        wheels = {**own.wheels, **PackageFolder(layer, is_trusted=False).distributions}
    pins = {**base.pins, **own.pins}
    pip = {each: pin_of(found, is_own=each in wheels) for each, found in {**base.wheels, **wheels}.items()}
    alone = sorted({*own.pins, *wheels})
    places = channel_urls([*channels, *recorded_channels(prefix)])
    wheel_lines = [f"      {'' if pip[each].startswith('#') else '- '}{pip[each]}" for each in sorted(pip)]
    lines = [
        f"# {len(pins)} packages of conda, {len(pip)} wheels",
        *([f"# of this session alone: {', '.join(alone)}"] if alone else []),
        f"name: {name}",
        *("channels:", *(f"  - {url}" for url in places)),
        *("dependencies:", *(f"  - {pins[each]}" for each in sorted(pins))),
        *(["  - pip:", *wheel_lines] if wheel_lines else []),
    ]
    return "\n".join(lines) + "\n"


def _content(prefix: Path, folders: Iterable[PackageFolder]) -> _Content:
    pins: dict[str, str] = {}
    owned: set[str] = set()
    for file, content in records_of(prefix):
        if match := _RECORD.fullmatch(file):
            pins[match[1]] = "=".join(match.groups())
            owned.update(found[0] for path in files_of(content) if (found := _METADATA.match(path)))
    wheels = {
        name: distribution
        for folder in folders
        for name, distribution in folder.distributions.items()
        if distribution.metadata.relative_to(prefix).as_posix() not in owned
    }
    return _Content(pins, wheels)
