"""Python imports this when it starts in a session: `python -m pip install` goes to the host, like the command `pip`.

It is neither pip nor in the way of it: `import pip`, and pip in a virtual environment of the session's own, are
theirs. What the environment has under this module's name runs as if this one were not here.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is 10 ms of every start
_PREFIX = "BELLJAR_PREFIX"
"""The environment that the host installs packages for."""
_WITH_VALUE = "WX"


def _words() -> "list[str]":
    """What this Python was started with: `sys.orig_argv` came with Python 3.10."""
    words = getattr(sys, "orig_argv", None)
    if words is not None:
        return words[1:]
    try:
        with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
            return [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    except OSError:
        return []


def _module(words: "list[str]") -> "list[str]":
    """The module of `-m` and its arguments; nothing when Python was given something else to run."""
    left = iter(words)
    for word in left:
        if word == "--check-hash-based-pycs":
            next(left, "")
            continue
        if not word.startswith("-") or word in ("-", "--"):
            return []
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter == "c":
                return []
            if letter == "m":
                return [*filter(None, [word[place:] or next(left, "")]), *left]
            if letter in _WITH_VALUE:
                if not word[place:]:
                    next(left, "")
                break
    return []


def _catch_installation() -> None:
    prefix = os.environ.get(_PREFIX)
    module = _module(_words()) if prefix else []
    if not prefix or not module or module[0] not in ("pip", "uv"):
        return
    if os.path.realpath(sys.prefix) != os.path.realpath(prefix):
        return  # a virtual environment of the session's own
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
        os._exit(status)  # Python takes SystemExit at this point for a fault of its installation
    del sys.modules["install"]


def _step_aside() -> None:
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
_step_aside()
