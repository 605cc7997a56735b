"""Opens the environment that a name or an entry of the settings means, and checks whether this host has it.

Existing environments (virtual environments, conda's, an interpreter, the system's Python) are used as they are. Only
the operator's settings may name a path, because its interpreter runs outside the sandbox when it is checked: a path
from a client, or one that a session can write, would be a way out of the sandbox.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import to_thread

from belljar.environments.base import Environment, Interpreter, describe, inspect_interpreter
from belljar.environments.conda.channels import channels_of
from belljar.environments.conda.places import find_conda, is_conda
from belljar.environments.ipython_support import check_support, has_ipython, provide, support_folder
from belljar.environments.managed import DEFAULT, Recipe, interpreter_path, is_ready, prepare, recipe_folder
from belljar.environments.requirements import read_requirements
from belljar.environments.uv import check_rattler, find_uv
from belljar.errors import BelljarError, EnvironmentBroken, InvalidArgument
from belljar.sandboxes.base import HostCheck
from belljar.settings import EnvironmentEntry, Settings
from belljar.settings.azure import AZURE, pool_endpoint
from belljar.settings.environments import KERNEL_PREFIX

Tell = Callable[[str], None]


async def open_environment(settings: Settings, name: str = "", *, on_progress: Tell | None = None) -> Environment:
    """Return the environment of that name, made first if belljar makes it; an empty name means the configured one."""
    chosen = name or settings.environment
    check_name(settings, chosen)
    if chosen == DEFAULT.name:
        python = await prepare(settings, on_progress=on_progress)
        interpreter = await to_thread.run_sync(inspect_recent, python, abandon_on_cancel=True)
        return describe(chosen, interpreter, kind="managed")
    if chosen in settings.environments:
        return await open_entry(settings, chosen, settings.environments[chosen], on_progress=on_progress)
    interpreter = await to_thread.run_sync(find_installed, chosen, abandon_on_cancel=True)
    return await _require_supported(settings, chosen, interpreter, kind_of(interpreter), on_progress)


async def open_entry(
    settings: Settings, name: str, entry: EnvironmentEntry, *, on_progress: Tell | None = None
) -> Environment:
    """Return the environment that an entry of the operator describes, made first if belljar makes it."""
    if entry.is_ours:
        recipe = await to_thread.run_sync(recipe_of, name, entry)
        python = await prepare(settings, recipe, on_progress=on_progress)
        interpreter = await to_thread.run_sync(inspect_recent, python, abandon_on_cancel=True)
    else:
        interpreter = await to_thread.run_sync(find_entry, entry, abandon_on_cancel=True)
    return await _require_supported(settings, name, interpreter, entry.kind, on_progress)


async def _require_supported(
    settings: Settings, name: str, interpreter: Interpreter, kind: str, on_progress: Tell | None
) -> Environment:
    support = await provide(settings, interpreter, on_progress=on_progress)
    channels: tuple[str, ...] = ()
    if kind == "conda":
        channels = await to_thread.run_sync(channels_of, settings.conda_channels, interpreter.prefix)
    return describe(name, interpreter, kind=kind, support=support, channels=channels)


def recipe_of(name: str, entry: EnvironmentEntry) -> Recipe:
    """Return the recipe of a managed environment of the settings; blocks while its files are read."""
    return Recipe(name, requirements=read_requirements(entry))


def known_names(settings: Settings) -> list[str]:
    """Return the environments that a session can ask for, without Jupyter's kernels."""
    pool = [AZURE] if pool_endpoint(settings) else []
    return list(dict.fromkeys([DEFAULT.name, settings.environment, *settings.environments, *pool]))


def check_name(settings: Settings, name: str) -> None:
    """Refuse a name that the settings do not have."""
    if name not in known_names(settings):
        known = [known for known in known_names(settings) if not known.startswith(KERNEL_PREFIX)]
        raise InvalidArgument(
            f"unknown environment: {name[:200]}", hint=f"Use {' or '.join(known)}, or kernel:NAME for a Jupyter kernel"
        )


async def check_configured(settings: Settings) -> None:
    """Refuse settings that name an environment which does not exist and cannot be made."""

    async def check(name: str, entry: EnvironmentEntry) -> None:
        try:
            await to_thread.run_sync(look_at, settings, name, entry, abandon_on_cancel=True)
        except EnvironmentBroken as error:
            broken[name] = error

    broken: dict[str, EnvironmentBroken] = {}
    async with anyio.create_task_group() as tasks:
        for name, entry in settings.environments.items():
            tasks.start_soon(check, name, entry)
    if broken:
        name, error = min(broken.items(), key=lambda item: item[0])
        raise EnvironmentBroken(f"environment {name}: {error.message}", hint=error.hint) from error


def look_at(settings: Settings, name: str, entry: EnvironmentEntry) -> Interpreter | None:
    """Check an entry and return its interpreter; None if belljar makes it and has not yet. Changes nothing."""
    if not entry.is_ours:
        interpreter = find_entry(entry)
    else:
        recipe = recipe_of(name, entry)
        root = recipe_folder(settings, recipe)
        if not is_ready(root):
            if recipe.requirements.specs:
                check_rattler()
            return None
        interpreter = inspect_recent(interpreter_path(root))
    if not has_ipython(interpreter) and (support := support_folder(settings, interpreter)).is_dir():
        check_support(interpreter, support)
    return interpreter


def is_prepared(settings: Settings, name: str) -> bool:
    """Tell whether a session of that environment could start without making or fetching anything; blocks."""
    if name == DEFAULT.name:
        return is_ready(recipe_folder(settings))
    entry = settings.environments.get(name)
    interpreter = look_at(settings, name, entry) if entry else find_installed(name)
    return interpreter is not None and (has_ipython(interpreter) or support_folder(settings, interpreter).is_dir())


def check_environments(settings: Settings) -> list[HostCheck]:
    """Return the checks of environments for `belljar doctor`; changes nothing, blocks while interpreters run."""
    return [_check_uv(), _check_chosen(settings), *(_check_named(settings, name) for name in settings.environments)]


def kind_of(interpreter: Interpreter) -> str:
    """Return the kind of environment that an interpreter given by its path belongs to."""
    if interpreter.is_virtual:
        return "venv"
    return "conda" if is_conda(interpreter.prefix) else "system"


def _check_uv() -> HostCheck:
    try:
        return HostCheck("uv", True, find_uv())
    except BelljarError as error:
        return HostCheck("uv", False, error.message, error.hint)


def _check_named(settings: Settings, name: str) -> HostCheck:
    title, entry = f"environment {name}", settings.environments[name]
    try:
        interpreter = look_at(settings, name, entry)
    except BelljarError as error:
        return HostCheck(title, False, error.message, error.hint)
    if interpreter is None:
        return HostCheck(title, True, f"{entry.kind}, not made yet", f"Run: belljar env create {name}")
    return HostCheck(title, True, f"{entry.kind}, {_summary(interpreter)}")


def _summary(interpreter: Interpreter) -> str:
    lacks = "" if has_ipython(interpreter) else "; IPython is brought along"
    return f"Python {interpreter.version} in {interpreter.executable}{lacks}"


def _check_chosen(settings: Settings) -> HostCheck:
    is_path = os.sep in settings.environment  # which the finding says anyway, and which is too wide for a title
    title = "environment" if is_path else f"environment {settings.environment}"
    if settings.environment == AZURE:
        return HostCheck(title, True, "sessions live in a pool of Azure, which is checked below")
    if settings.environment.startswith(KERNEL_PREFIX):
        return HostCheck(title, True, "an installed Jupyter kernel, looked for when the server starts")
    if settings.environment in settings.environments:
        return HostCheck(title, True, "the one that sessions have by themselves, named in environments")
    root = recipe_folder(settings)
    try:
        if settings.environment != DEFAULT.name:
            return HostCheck(title, True, _summary(find_installed(settings.environment)))
        if is_ready(root):
            interpreter = inspect_recent(interpreter_path(root))
            return HostCheck(title, True, f"Python {interpreter.version} in {root}")
    except BelljarError as error:
        return HostCheck(title, False, error.message, error.hint)
    return HostCheck(
        title,
        True,
        "not prepared yet",
        "The first start makes it: about a minute, 750 MB, and the package index must be reachable",
    )


# Existing environments: found, checked and used as they are, never changed.

OLDEST_PYTHON = (3, 9)
# Searched before the user's PATH, because what a version manager puts there is not the system's Python.
_SYSTEM_FOLDERS = "/usr/bin:/usr/local/bin:/bin"


def find_installed(path: str) -> Interpreter:
    """Return the interpreter at the path of an environment or of the interpreter itself; blocks while it runs."""
    return inspect_recent(_locate(path))


def find_entry(entry: EnvironmentEntry) -> Interpreter:
    """Return the interpreter of an existing environment that an entry names; blocks while it runs."""
    if entry.kind == "conda":
        return inspect_recent(find_conda(entry.path) / "bin" / "python")
    if entry.kind == "system":
        return find_installed(entry.path) if entry.path else inspect_recent(_system_python())
    interpreter = find_installed(entry.path)
    if not interpreter.is_virtual:
        raise EnvironmentBroken(
            f"{entry.path} is not a virtual environment: {interpreter.executable} stands by itself",
            hint='Use kind = "system" for an interpreter, or kind = "conda" for an environment of conda',
        )
    return interpreter


def inspect_recent(python: Path) -> Interpreter:
    """Inspect an interpreter, and refuse one that is too old to run sessions."""
    interpreter = inspect_interpreter(python)
    if interpreter.release < OLDEST_PYTHON:
        raise EnvironmentBroken(
            f"{interpreter.executable} is Python {interpreter.version}",
            hint=f"Sessions need Python {'.'.join(map(str, OLDEST_PYTHON))} or newer",
        )
    return interpreter


def _locate(name: str) -> Path:
    path = Path(name).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.exists():
        raise EnvironmentBroken(
            f"no such environment: {name}" if python == path else f"{name} is not a virtual environment: no {python}",
            hint="Give the folder of a virtual environment or an interpreter; in `environment`, also default or a name",
        )
    return python


def _system_python() -> Path:
    python = shutil.which("python3", path=_SYSTEM_FOLDERS) or shutil.which("python3")
    if python is None:
        raise EnvironmentBroken("this host has no python3", hint="Install it, or give the path of an interpreter")
    return Path(python)
