"""Which environment a name means, and whether this host has it.

Only the operator's settings may name a path: its interpreter runs outside the sandbox when it is checked, so a path
from a client, or one that a session can write, would be a way out.
"""

from collections.abc import Callable

import anyio
from anyio import to_thread

from belljar.environments.base import Environment, Interpreter, describe
from belljar.environments.channels import channels_of
from belljar.environments.ingredients import read_ingredients
from belljar.environments.installed import find_entry, find_installed, inspect_recent
from belljar.environments.managed import DEFAULT, Recipe, folder, interpreter_path, is_ready, prepare
from belljar.environments.support import check_support, has_ipython, provide, support_folder
from belljar.environments.uv import check_rattler, find_uv
from belljar.errors import BelljarError, EnvironmentBroken, InvalidArgument
from belljar.sandboxes.base import Check
from belljar.settings import EnvironmentEntry, Settings

KERNEL_PREFIX = "kernel:"
Tell = Callable[[str], None]


async def open_environment(settings: Settings, name: str = "", *, on_progress: Tell | None = None) -> Environment:
    """The environment of that name, made first where it is ours to make; empty means the configured one."""
    chosen = name or settings.environment
    check_name(settings, chosen)
    if chosen == DEFAULT.name:
        python = await prepare(settings, on_progress=on_progress)
        interpreter = await to_thread.run_sync(inspect_recent, python, abandon_on_cancel=True)
        return describe(chosen, interpreter, kind="managed")
    if chosen in settings.environments:
        return await open_entry(settings, chosen, settings.environments[chosen], on_progress=on_progress)
    interpreter = await to_thread.run_sync(find_installed, chosen, abandon_on_cancel=True)
    return await _supported(settings, chosen, interpreter, kind_of(interpreter), on_progress)


async def open_entry(
    settings: Settings, name: str, entry: EnvironmentEntry, *, on_progress: Tell | None = None
) -> Environment:
    """The environment that an entry describes, made first where it is ours to make; the entry is the operator's."""
    if entry.is_ours:
        recipe = await to_thread.run_sync(recipe_of, name, entry)
        python = await prepare(settings, recipe, on_progress=on_progress)
        interpreter = await to_thread.run_sync(inspect_recent, python, abandon_on_cancel=True)
    else:
        interpreter = await to_thread.run_sync(find_entry, entry, abandon_on_cancel=True)
    return await _supported(settings, name, interpreter, entry.kind, on_progress)


async def _supported(
    settings: Settings, name: str, interpreter: Interpreter, kind: str, on_progress: Tell | None
) -> Environment:
    support = await provide(settings, interpreter, on_progress=on_progress)
    channels: tuple[str, ...] = ()
    if kind == "conda":
        channels = await to_thread.run_sync(channels_of, settings.conda_channels, interpreter.prefix)
    return describe(name, interpreter, kind=kind, support=support, channels=channels)


def recipe_of(name: str, entry: EnvironmentEntry) -> Recipe:
    """What a managed environment of the settings is made of; blocks while its files are read."""
    return Recipe(name, ingredients=read_ingredients(entry))


def known_names(settings: Settings) -> list[str]:
    """The environments that a session can ask for, Jupyter's kernels aside."""
    return list(dict.fromkeys([DEFAULT.name, settings.environment, *settings.environments]))


def check_name(settings: Settings, name: str) -> None:
    """Refuse a name that the settings do not have."""
    if name not in known_names(settings):
        known = [known for known in known_names(settings) if not known.startswith(KERNEL_PREFIX)]
        raise InvalidArgument(
            f"unknown environment: {name[:200]}", hint=f"Use {' or '.join(known)}, or kernel:NAME for a Jupyter kernel"
        )


async def check_configured(settings: Settings) -> None:
    """Refuse settings that name an environment which is not there, or which cannot be made of what it names."""

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
    """The interpreter of an entry, once checked; None where it is ours to make and not made yet. Changes nothing."""
    if not entry.is_ours:
        interpreter = find_entry(entry)
    else:
        recipe = recipe_of(name, entry)
        root = folder(settings, recipe)
        if not is_ready(root):
            if recipe.ingredients.specs:
                check_rattler()
            return None
        interpreter = inspect_recent(interpreter_path(root))
    if not has_ipython(interpreter) and (support := support_folder(settings, interpreter)).is_dir():
        check_support(interpreter, support)
    return interpreter


def is_prepared(settings: Settings, name: str) -> bool:
    """Whether a session of that environment could start without anything being made or fetched; blocks."""
    if name == DEFAULT.name:
        return is_ready(folder(settings))
    entry = settings.environments.get(name)
    interpreter = look_at(settings, name, entry) if entry else find_installed(name)
    return interpreter is not None and (has_ipython(interpreter) or support_folder(settings, interpreter).is_dir())


def check_environments(settings: Settings) -> list[Check]:
    """What `belljar doctor` says of environments; changes nothing, blocks while interpreters answer."""
    return [_check_uv(), _check_chosen(settings), *(_check_named(settings, name) for name in settings.environments)]


def kind_of(interpreter: Interpreter) -> str:
    """What an interpreter that was given by its path belongs to."""
    if interpreter.is_virtual:
        return "venv"
    return "conda" if (interpreter.prefix / "conda-meta").is_dir() else "system"


def _check_uv() -> Check:
    try:
        return Check("uv", True, find_uv())
    except BelljarError as error:
        return Check("uv", False, error.message, error.hint)


def _check_named(settings: Settings, name: str) -> Check:
    title, entry = f"environment {name}", settings.environments[name]
    try:
        interpreter = look_at(settings, name, entry)
    except BelljarError as error:
        return Check(title, False, error.message, error.hint)
    if interpreter is None:
        return Check(title, True, f"{entry.kind}, not made yet", f"Run: belljar env create {name}")
    return Check(title, True, f"{entry.kind}, {_told(interpreter)}")


def _told(interpreter: Interpreter) -> str:
    lacks = "" if has_ipython(interpreter) else "; IPython is brought along"
    return f"Python {interpreter.version} in {interpreter.executable}{lacks}"


def _check_chosen(settings: Settings) -> Check:
    title = f"environment {settings.environment}"
    if settings.environment.startswith(KERNEL_PREFIX):
        return Check(title, True, "an installed Jupyter kernel, looked for when the server starts")
    if settings.environment in settings.environments:
        return Check(title, True, "the one that sessions have by themselves, named in environments")
    root = folder(settings)
    try:
        if settings.environment != DEFAULT.name:
            return Check(title, True, _told(find_installed(settings.environment)))
        if is_ready(root):
            interpreter = inspect_recent(interpreter_path(root))
            return Check(title, True, f"Python {interpreter.version} in {root}")
    except BelljarError as error:
        return Check(title, False, error.message, error.hint)
    return Check(
        title,
        True,
        "not prepared yet",
        "The first start makes it: about a minute, 750 MB, and the package index must be reachable",
    )
