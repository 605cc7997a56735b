"""Removes the working directory from the paths from which our own commands import modules and start programs.

`python -m` puts it in front of everything, and an empty entry in PYTHONPATH or PATH means it too. A folder that
somebody else filled would then decide what `import typer` is. What Python itself imports before it runs our code is
kept from there only by `python -P -m belljar`; the `belljar` script does not need that.
"""

import itertools
import os
import sys


def leave_working_directory() -> None:
    """Remove the working directory from the paths if this process is one of our commands.

    A program that imports us keeps its paths.
    """
    # While Python looks for the module of -m, argv has only "-m" in place of the module's path.
    is_module = sys.argv[:1] == ["-m"] and _is_module_argument("belljar")
    if not is_module and not (sys.argv and os.path.basename(sys.argv[0]).startswith("belljar")):  # noqa: PTH119
        return
    if is_module and not sys.flags.safe_path:
        del sys.path[0]
    if not sys.flags.ignore_environment:
        chosen = os.environ.get("PYTHONPATH", "")
        here = _relative(chosen)
        sys.path[:] = [entry for entry in sys.path if entry not in ("", ".", *here)]
    path = os.environ.get("PATH", "")
    if _relative(path):
        os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep)))


def _is_module_argument(name: str) -> bool:
    arguments = sys.orig_argv
    return f"-m{name}" in arguments or any(
        argument.startswith("-") and argument.endswith("m") and following == name
        for argument, following in itertools.pairwise(arguments)
    )


def _relative(path: str) -> set[str]:
    """Return the folders that a search path names only relative to the working directory, not by their whole path."""
    entries = path.split(os.pathsep) if path else []
    whole = {entry for entry in entries if os.path.isabs(entry)}  # noqa: PTH117
    return {os.path.abspath(entry) for entry in entries if entry not in whole} - whole  # noqa: PTH100
