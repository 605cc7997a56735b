"""The fork hooks of this process: which module has registered which, and a fork that runs only those that matter.

`os.fork` runs what modules have registered with `os.register_at_fork`. In a process with one thread, those of Python's
own modules restore what is in order already: locks that another thread might hold, lists of threads. A kernel that is
forked from a zygote would copy 240 pages for that before its first line, so it goes without them.
"""

import ctypes
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

Hook = Callable[[], Any]

# Their work after a fork is for the other threads' sake. `random` seeds its generator, as `fork.reseed` does, and ours
# is for children that a session forks.
_NEEDLESS = frozenset(
    {"threading", "logging", "random", "concurrent.futures.thread", "asyncio.events", f"{__package__}.runner"}
)
# What may be loaded before us besides Python's own modules. It registers no hooks.
_HARMLESS = ("__main__", "__editable__", "_distutils_hack", "_virtualenv", "belljar_")

# Not CDLL, which would release the interpreter's lock.
_fork_in_c: Any = ctypes.PyDLL(None, use_errno=True).fork


class _Hooks(NamedTuple):
    module: str
    before: "Hook | None"
    after_in_parent: "Hook | None"
    after_in_child: "Hook | None"


_registered: "list[_Hooks]" = []
_are_all_known = all(
    name.partition(".")[0] in getattr(sys, "stdlib_module_names", ()) or name.startswith(_HARMLESS)
    for name in sys.modules
)
"""Whether only Python's own modules can have registered hooks before `watch`: a fork leaves those out."""
_ours = 0
"""How many were registered before the session could register any."""


def watch() -> None:
    """Learn of the hooks that are registered from now on, because nothing else tells."""
    register: Any = os.register_at_fork

    @functools.wraps(register)
    def register_at_fork(
        *, before: "Hook | None" = None, after_in_parent: "Hook | None" = None, after_in_child: "Hook | None" = None
    ) -> None:
        given = {"before": before, "after_in_parent": after_in_parent, "after_in_child": after_in_child}
        register(**{name: hook for name, hook in given.items() if hook is not None})
        module = str(sys._getframe(1).f_globals.get("__name__"))  # pyright: ignore[reportPrivateUsage]
        _registered.append(_Hooks(module, before, after_in_parent, after_in_child))

    os.register_at_fork = register_at_fork


def begin_session() -> None:
    """Count what is registered from now on as the session's."""
    global _ours  # of this process
    _ours = len(_registered)


def has_session_hooks() -> bool:
    """Return whether the session has registered hooks of its own."""
    return len(_registered) > _ours


def can_leave_out() -> bool:
    """Return whether it is known what `fork` leaves out."""
    return _are_all_known


def fork() -> int:
    """Fork a process that has one thread, without the hooks that only matter to others."""
    before, in_parent, in_child = _needed()
    for hook in before:
        _call(hook)
    child: int = _fork_in_c()
    error = ctypes.get_errno() if child < 0 else 0
    for hook in in_parent if child else in_child:
        _call(hook)
    if error:
        raise OSError(error, os.strerror(error))
    return child


@functools.cache
def _needed() -> "tuple[list[Hook], list[Hook], list[Hook]]":
    """Return the hooks to run, found once: whatever a zygote writes to between two forks is in memory twice."""
    hooks = [hooks for hooks in _registered if hooks.module not in _NEEDLESS]
    before = [one.before for one in reversed(hooks) if one.before is not None]
    in_parent = [one.after_in_parent for one in hooks if one.after_in_parent is not None]
    return before, in_parent, [one.after_in_child for one in hooks if one.after_in_child is not None]


def _call(hook: Hook) -> None:
    """Call a hook; what it raises is printed, as after `os.fork`, and stops nothing."""
    try:
        hook()
    except Exception:
        traceback.print_exc()
