"""Programs from the npm registry, run with a Node that is new enough; a test that cannot have one is skipped."""

from functools import cache
from pathlib import Path

import pytest

from registry_packages import Unreachable, node, node_variables, run


def npx(package: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a package, to be followed by its arguments, and its environment; skips where none can."""
    try:
        program, npm = node()
        # npx lies beside npm, and is called like it.
        *interpreter, script = npm
        beside = Path(script)
        command = [*interpreter, str(beside.with_name(beside.name.replace("npm", "npx")))]
        variables = {**node_variables(program), "NO_COLOR": "1"}
        _fetch(package, tuple(command), tuple(variables.items()))
    except Unreachable as error:
        pytest.skip(f"{package}: {error}")
    return [*command, "--yes", package], variables


@cache
def _fetch(package: str, command: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> None:
    """Fetch the package before a test's own clock runs."""
    run([*command, "--yes", "--package", package, "node", "--version"], dict(variables))
