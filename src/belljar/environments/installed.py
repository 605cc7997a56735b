"""Environments that are there already: a virtual environment, conda's, an interpreter, the system's Python.

They are found, checked and used as they stand, never changed.
"""

import shutil
from pathlib import Path

from belljar.environments.base import Interpreter, inspect_interpreter
from belljar.environments.conda import find_conda
from belljar.errors import EnvironmentBroken
from belljar.settings import EnvironmentEntry

OLDEST_PYTHON = (3, 9)
# Before the user's own: what a version manager puts on the PATH is not the system's.
_SYSTEM_FOLDERS = "/usr/bin:/usr/local/bin:/bin"


def find_installed(path: str) -> Interpreter:
    """The interpreter at the path of an environment or of itself, once it has answered; blocks while it runs."""
    return inspect_recent(_locate(path))


def find_entry(entry: EnvironmentEntry) -> Interpreter:
    """The interpreter that an entry of the settings leads to; blocks while it runs."""
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
    """What an interpreter says of itself, if it can run sessions."""
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
