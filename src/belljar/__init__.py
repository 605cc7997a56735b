"""belljar runs the Python that AI agents write: stateful, sealed off, in plain view.

    async with belljar.open_session() as session:
        result = await session.execute("1 + 1")

`open_session` and `open_engine` run it in this process, `connect` on a running server, with the same sessions. Names
are imported when they are first used, so that `import belljar` costs next to nothing.
"""

from belljar.import_path import leave_working_directory

leave_working_directory()  # before anything else is imported

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from belljar.api import Engine, open_engine, open_session
    from belljar.client import RemoteServer, connect
    from belljar.errors import BelljarError
    from belljar.handles import OutputStream, SessionHandle
    from belljar.models import Display, ExecutionResult, FileReference, OutputEvent, Rewinding, SessionFork
    from belljar.settings import Settings

__all__ = [
    "BelljarError",
    "Display",
    "Engine",
    "ExecutionResult",
    "FileReference",
    "OutputEvent",
    "OutputStream",
    "RemoteServer",
    "Rewinding",
    "SessionFork",
    "SessionHandle",
    "Settings",
    "connect",
    "open_engine",
    "open_session",
]

_MODULES = {
    "belljar.api": ("Engine", "open_engine", "open_session"),
    "belljar.client": ("RemoteServer", "connect"),
    "belljar.errors": ("BelljarError",),
    "belljar.handles": ("OutputStream", "SessionHandle"),
    "belljar.models": ("Display", "ExecutionResult", "FileReference", "OutputEvent", "Rewinding", "SessionFork"),
    "belljar.settings": ("Settings",),
}


def __getattr__(name: str) -> object:
    module_name = next((module for module, names in _MODULES.items() if name in names), None)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module_name), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
