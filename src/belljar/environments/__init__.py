"""Environments: the interpreter and packages that the code of sessions runs with.

They are separate from the packages of the server: belljar runs their interpreters and reads their files, and imports
nothing from them.
"""

from belljar.environments.base import Environment, Interpreter, inspect_interpreter
from belljar.environments.conda.places import CondaPlace, find_conda, list_conda
from belljar.environments.managed import prepare
from belljar.environments.selection import (
    check_configured,
    check_environments,
    check_name,
    known_names,
    open_entry,
    open_environment,
)

__all__ = [
    "CondaPlace",
    "Environment",
    "Interpreter",
    "check_configured",
    "check_environments",
    "check_name",
    "find_conda",
    "inspect_interpreter",
    "known_names",
    "list_conda",
    "open_entry",
    "open_environment",
    "prepare",
]
