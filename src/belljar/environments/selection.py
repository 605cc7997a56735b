"""Which environment a name means, and whether this host has it.

Only the operator's settings may name a path: its interpreter runs outside the sandbox when it is checked, so a path
from a client, or one that a session can write, would be a way out.
"""

from collections.abc import Callable

from anyio import to_thread

from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.environments.installed import find_installed
from belljar.environments.managed import DEFAULT, folder, interpreter_path, is_ready, prepare
from belljar.environments.uv import find_uv
from belljar.errors import BelljarError, InvalidArgument
from belljar.sandboxes.base import Check
from belljar.settings import Settings


async def open_environment(
    settings: Settings, name: str = "", *, on_progress: Callable[[str], None] | None = None
) -> Environment:
    """The environment of that name, made first where it is ours to make; empty means the configured one."""
    chosen = name or settings.environment
    if chosen == DEFAULT.name:
        python = await prepare(settings, on_progress=on_progress)
        interpreter = await to_thread.run_sync(inspect_interpreter, python, abandon_on_cancel=True)
        return describe(chosen, interpreter)
    if chosen != settings.environment:
        raise InvalidArgument(f"unknown environment: {chosen}", hint=f"Use {' or '.join(_known(settings))}")
    return await to_thread.run_sync(find_installed, chosen, abandon_on_cancel=True)


def check_environments(settings: Settings) -> list[Check]:
    """What `belljar doctor` says of environments; changes nothing, blocks while an interpreter answers."""
    return [_check_uv(), _check_chosen(settings)]


def _known(settings: Settings) -> list[str]:
    return list(dict.fromkeys([DEFAULT.name, settings.environment]))


def _check_uv() -> Check:
    try:
        return Check("uv", True, find_uv())
    except BelljarError as error:
        return Check("uv", False, error.message, error.hint)


def _check_chosen(settings: Settings) -> Check:
    title = f"environment {settings.environment}"
    if settings.environment.startswith("kernel:"):
        return Check(title, True, "an installed Jupyter kernel, looked for when a session starts")
    root = folder(settings)
    try:
        if settings.environment != DEFAULT.name:
            return Check(title, True, str(find_installed(settings.environment).python))
        if is_ready(root):
            interpreter = inspect_interpreter(interpreter_path(root))
            return Check(title, True, f"Python {interpreter.version} in {root}")
    except BelljarError as error:
        return Check(title, False, error.message, error.hint)
    return Check(
        title,
        True,
        "not prepared yet",
        "The first start makes it: about a minute, 750 MB, and the package index must be reachable",
    )
