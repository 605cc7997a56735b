"""`python -m belljar.workflows --workflow FILE`: the same as `belljar workflow run FILE`."""

import sys

from belljar.cli import main


def arguments(given: list[str]) -> list[str]:
    """Return the arguments of `belljar` for those of this command."""
    rest: list[str] = []
    source: list[str] = []
    waiting = iter(given)
    for argument in waiting:
        if argument in ("--workflow", "-w"):
            source = [next(waiting, "")]
        elif argument.startswith("--workflow="):
            source = [argument.partition("=")[2]]
        else:
            rest.append(argument)
    return ["workflow", "run", *source, *rest]


if __name__ == "__main__":
    main(arguments(sys.argv[1:]))
