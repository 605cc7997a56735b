"""`python -m belljar.workflows --workflow FILE`: the same as `belljar workflow run FILE`."""

import runpy
import sys


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
    sys.argv[1:] = arguments(sys.argv[1:])
    runpy.run_module("belljar", run_name="__main__", alter_sys=True)
