"""Environments that are there already: the path of a virtual environment or of an interpreter.

They are checked and used as they stand, never changed.
"""

import shlex
from pathlib import Path

from belljar.environments.base import Environment, Interpreter, describe, inspect_interpreter
from belljar.environments.inventory import Shelf
from belljar.errors import EnvironmentBroken

_OLDEST_PYTHON = (3, 11)


def find_installed(name: str) -> Environment:
    """The environment at a path, once it has shown that it can run sessions; blocks while its interpreter runs."""
    interpreter = inspect_interpreter(_locate(name))
    if interpreter.release < _OLDEST_PYTHON:
        raise EnvironmentBroken(
            f"{interpreter.executable} is Python {interpreter.version}",
            hint=f"Sessions need Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer",
        )
    if not any(Shelf(path).find("ipython") for path in interpreter.paths):
        raise EnvironmentBroken(f"{interpreter.executable} has no IPython", hint=_remedy(interpreter))
    return describe(name, interpreter)


def _locate(name: str) -> Path:
    path = Path(name).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.exists():
        raise EnvironmentBroken(
            f"no such environment: {name}" if python == path else f"{name} is not a virtual environment: no {python}",
            hint="Set environment to default, or to the path of a virtual environment or interpreter",
        )
    return python


def _remedy(interpreter: Interpreter) -> str:
    python = shlex.quote(str(interpreter.executable))
    has_pip = any(Shelf(path).find("pip") for path in interpreter.paths)
    command = f"{python} -m pip install ipython" if has_pip else f"uv pip install --python {python} ipython"
    return f"Run: {command}"
