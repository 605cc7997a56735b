"""What a fork of a live session must change: paths of folders that are elsewhere for it, and its event loop."""

# The parts of an event loop have no public names; where one is missing, a new loop is made instead.
# pyright: reportPrivateUsage=false

import asyncio
import os
import selectors
import sys
from typing import Any, cast


def move_modules(old: str, new: str) -> None:
    """Replace a package folder by another in paths and loaded modules, so that modules find their files there."""
    sys.path[:] = [_moved(path, old, new) for path in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        for name in ("__file__", "__cached__"):
            place = getattr(module, name, None)
            if isinstance(place, str):
                _set(module, name, _moved(place, old, new))
        for holder, name in ((module, "__path__"), (getattr(module, "__spec__", None), "submodule_search_locations")):
            places: Any = getattr(holder, name, None)
            if isinstance(places, list):
                places[:] = [_moved(str(place), old, new) for place in cast("list[Any]", places)]
    for name in ("PYTHONPATH", "PATH"):
        if name in os.environ:
            parts = os.environ[name].split(os.pathsep)
            os.environ[name] = os.pathsep.join(_moved(part, old, new) for part in parts)


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + os.sep) else path


def _set(module: Any, name: str, value: str) -> None:
    try:
        if getattr(module, name) != value:
            setattr(module, name, value)
    except Exception:
        return  # an object in `sys.modules` may be no module, and may refuse


def own_loop(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Return the loop with its tasks on a new selector, because the old one's registrations are the origin's too."""
    given: Any = loop
    if loop.is_closed():
        return loop
    if not all(hasattr(given, name) for name in ("_selector", "_make_self_pipe", "_ssock", "_csock", "_internal_fds")):
        return asyncio.new_event_loop()
    # Do not unregister from or close the old selector, because that would change the origin's.
    given._selector = selectors.DefaultSelector()
    given._internal_fds = 0
    given._make_self_pipe()
    given._default_executor = None
    return loop


def loop_descriptors(loop: asyncio.AbstractEventLoop) -> "set[int]":
    """Return the event loop's own sockets, which a fork replaces."""
    found: set[int] = set()
    for name in ("_ssock", "_csock"):  # no comprehension, see `fork.names_in`
        if (end := getattr(loop, name, None)) is not None:
            found.add(end.fileno())
    return found
