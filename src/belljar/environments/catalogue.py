"""Lists the environments that the settings name, in their current state, and folders of managed ones no longer used."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from belljar.environments.base import Interpreter
from belljar.environments.conda.installs import WORK
from belljar.environments.installed_check import describe_interpreter
from belljar.environments.managed import DEFAULT, SHARED, environments_folder, interpreter_path, is_ready, recipe_folder
from belljar.environments.selection import find_installed, inspect_recent, kind_of, look_at, recipe_of
from belljar.errors import BelljarError, InvalidArgument
from belljar.settings import Settings

State = Literal["ready", "not made", "broken"]


@dataclass(frozen=True, slots=True)
class ListedEnvironment:
    """One environment: its state, its interpreter, its packages, or what is wrong with it."""

    name: str
    kind: str
    state: State
    is_default: bool = False
    python: str = ""
    """The path of its interpreter."""
    version: str = ""
    packages: dict[str, str] = field(default_factory=dict[str, str])
    size_bytes: int = 0
    problem: str = ""
    hint: str = ""


def examine(settings: Settings, name: str) -> ListedEnvironment:
    """Return the state of the environment of that name. Makes and fetches nothing."""
    kind = settings.environments[name].kind if name in settings.environments else "managed"
    is_default = name == settings.environment
    try:
        interpreter = _find(settings, name)
        if interpreter is None:
            return ListedEnvironment(name, kind, "not made", is_default, hint=f"Run: belljar env create {name}")
        if name not in settings.environments and name != DEFAULT.name:
            kind = kind_of(interpreter)
        description = describe_interpreter(interpreter)
    except BelljarError as error:
        return ListedEnvironment(name, kind, "broken", is_default, problem=error.message, hint=error.hint)
    return ListedEnvironment(
        name,
        kind,
        "ready",
        is_default,
        str(interpreter.executable),
        description.version,
        description.packages,
        description.size_bytes,
    )


def managed_folder(settings: Settings, name: str) -> Path:
    """Return the folder of a managed environment, made or not; InvalidArgument for one that belljar does not make."""
    if name == DEFAULT.name:
        return recipe_folder(settings)
    entry = settings.environments.get(name)
    if entry is None or not entry.is_ours:
        kind = f"of kind {entry.kind}" if entry else "not one of environments"
        raise InvalidArgument(
            f"environment {name[:200]} is {kind}: it is not belljar's to make or remove",
            hint=f"Managed ones are {', '.join(managed_names(settings))}",
        )
    return recipe_folder(settings, recipe_of(name, entry))


def managed_names(settings: Settings) -> list[str]:
    """Return the names of the environments that belljar makes."""
    return [DEFAULT.name, *(name for name, entry in settings.environments.items() if entry.is_ours)]


def unused_folders(settings: Settings) -> list[Path]:
    """Return folders of finished or half-made environments that no current setting or version uses."""
    used = {managed_folder(settings, name) for name in managed_names(settings)}
    try:
        found = sorted(environments_folder(settings).iterdir())
    except OSError:
        return []
    marks = tuple(f"{start}{name}-" for start in ("", WORK) for name in (SHARED, DEFAULT.name))
    folders = [each for each in found if each.is_dir() and each.name.startswith(marks)]
    return [each for each in folders if each.with_name(each.name.removeprefix(WORK)) not in used]


def _find(settings: Settings, name: str) -> Interpreter | None:
    if name in settings.environments:
        return look_at(settings, name, settings.environments[name])
    if name != DEFAULT.name:
        return find_installed(name)
    root = recipe_folder(settings)
    return inspect_recent(interpreter_path(root)) if is_ready(root) else None
