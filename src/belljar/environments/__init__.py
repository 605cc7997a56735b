"""Environments: the interpreter and packages that the code of sessions runs with.

They are the sessions' own and apart from the server's packages: nothing of them is imported here, only run or read.
"""

from belljar.environments.base import Environment, Interpreter, inspect_interpreter
from belljar.environments.managed import prepare
from belljar.environments.selection import check_environments, open_environment

__all__ = [
    "Environment",
    "Interpreter",
    "check_environments",
    "inspect_interpreter",
    "open_environment",
    "prepare",
]
