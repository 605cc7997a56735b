"""Send `python -m pip install` to the host, like the command `pip`. Python imports this whenever it starts.

It does not replace pip: `import pip`, and pip in a virtual environment that the session made, work as usual. If the
environment has a `sitecustomize` of its own, that one is run too.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is 10 ms of every start
_PREFIX = "BELLJAR_PREFIX"
"""The environment that the host installs packages for."""
_WITH_VALUE = "WX"


def _command_line() -> "list[str]":
    """Return the arguments that this Python was started with; Python 3.9 has no `sys.orig_argv`."""
    arguments = getattr(sys, "orig_argv", None)
    if arguments is not None:
        return arguments[1:]
    try:
        with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
            return [os.fsdecode(argument) for argument in file.read().split(b"\0")[1:-1]]
    except OSError:
        return []


def _module_arguments(arguments: "list[str]") -> "list[str]":
    """Return the module of `-m` and its arguments; nothing when Python was given something else to run."""
    left = iter(arguments)
    for argument in left:
        if argument == "--check-hash-based-pycs":
            next(left, "")
            continue
        if not argument.startswith("-") or argument in ("-", "--"):
            return []
        if argument.startswith("--"):
            continue
        for end, letter in enumerate(argument[1:], 2):
            if letter == "c":
                return []
            if letter == "m":
                return [*filter(None, [argument[end:] or next(left, "")]), *left]
            if letter in _WITH_VALUE:
                if not argument[end:]:
                    next(left, "")
                break
    return []


def _catch_installation() -> None:
    prefix = os.environ.get(_PREFIX)
    module = _module_arguments(_command_line()) if prefix else []
    if not prefix or not module or module[0] not in ("pip", "uv"):
        return
    if os.path.realpath(sys.prefix) != os.path.realpath(prefix):
        return  # in a virtual environment that the session made
    sys.path.insert(0, os.path.dirname(_HERE))  # noqa: PTH120
    from importlib import import_module
    from typing import Any

    install: Any = import_module("install")
    del sys.path[0]
    if install.is_for_host(module[0], module[1:]):
        try:
            status = install.main(module[0], module[1:])
            sys.stdout.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
            status = 1
        os._exit(status)  # not SystemExit, because Python would report it as an error in sitecustomize
    del sys.modules["install"]


def _run_environments_own() -> None:
    """Run the environment's own module of this name, if it has one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    others = [path for path in sys.path if os.path.abspath(path) != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec(__name__, others)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    sys.modules[__name__] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


_catch_installation()
_run_environments_own()
