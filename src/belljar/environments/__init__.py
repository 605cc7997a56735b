"""Environments: the interpreter and packages that the code of sessions runs with.

They are the sessions' own and apart from the server's packages: nothing of them is imported here, only run or read.
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
