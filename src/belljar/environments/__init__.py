"""Environments: the interpreter and packages that the code of sessions runs with.

They are separate from the packages of the server: belljar runs their interpreters and reads their files, and imports
nothing from them.
"""

from belljar.environments.base import Environment
from belljar.environments.conda.places import list_conda
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
    "Environment",
    "check_configured",
    "check_environments",
    "check_name",
    "known_names",
    "list_conda",
    "open_entry",
    "open_environment",
    "prepare",
]
