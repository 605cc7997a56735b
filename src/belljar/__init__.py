"""belljar runs the Python that AI agents write: stateful, sealed off, in plain view.

    with belljar.session() as session:
        result = session.execute("1 + 1")

`session` is for programs without `async`. For others `open_session` and `open_engine` run the engine in this process,
and `connect` uses a running server, with the same sessions. Names are imported when they are first used, so that
`import belljar` costs next to nothing.
"""

from belljar.import_path import leave_working_directory

leave_working_directory()  # before anything else is imported

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from belljar.environments.installs import InstallOutcome
    from belljar.errors import (
        BelljarError,
        Busy,
        CodeRejected,
        EngineError,
        ExecutionNotFound,
        FileMissing,
        InvalidArgument,
        KernelDied,
        LimitError,
        NoCheckpoint,
        SessionNotFound,
        TooLarge,
        Unauthorized,
        UsageError,
    )
    from belljar.models import (
        Display,
        ExecutionResult,
        FileReference,
        MappedResult,
        OutputEvent,
        Rewinding,
        SessionFork,
        SessionInfo,
    )
    from belljar.python.execution_handle import ExecutionHandle, OutputStream, SyncExecution, SyncStream
    from belljar.python.local import Engine, open_engine, open_session
    from belljar.python.remote import RemoteServer, connect
    from belljar.python.session_handle import SessionHandle, SyncSession
    from belljar.python.sync import map, session  # noqa: A004
    from belljar.settings import Settings

__all__ = [
    "BelljarError",
    "Busy",
    "CodeRejected",
    "Display",
    "Engine",
    "EngineError",
    "ExecutionHandle",
    "ExecutionNotFound",
    "ExecutionResult",
    "FileMissing",
    "FileReference",
    "InstallOutcome",
    "InvalidArgument",
    "KernelDied",
    "LimitError",
    "MappedResult",
    "NoCheckpoint",
    "OutputEvent",
    "OutputStream",
    "RemoteServer",
    "Rewinding",
    "SessionFork",
    "SessionHandle",
    "SessionInfo",
    "SessionNotFound",
    "Settings",
    "SyncExecution",
    "SyncSession",
    "SyncStream",
    "TooLarge",
    "Unauthorized",
    "UsageError",
    "connect",
    "map",
    "open_engine",
    "open_session",
    "session",
]

_MODULES = {
    "belljar.python.local": ("Engine", "open_engine", "open_session"),
    "belljar.python.remote": ("RemoteServer", "connect"),
    "belljar.environments.installs": ("InstallOutcome",),
    "belljar.errors": (
        "BelljarError",
        "Busy",
        "CodeRejected",
        "EngineError",
        "ExecutionNotFound",
        "FileMissing",
        "InvalidArgument",
        "KernelDied",
        "LimitError",
        "NoCheckpoint",
        "SessionNotFound",
        "TooLarge",
        "Unauthorized",
        "UsageError",
    ),
    "belljar.python.execution_handle": ("ExecutionHandle", "OutputStream", "SyncExecution", "SyncStream"),
    "belljar.python.session_handle": ("SessionHandle", "SyncSession"),
    "belljar.models": (
        "Display",
        "ExecutionResult",
        "FileReference",
        "MappedResult",
        "OutputEvent",
        "Rewinding",
        "SessionFork",
        "SessionInfo",
    ),
    "belljar.settings": ("Settings",),
    "belljar.python.sync": ("map", "session"),
}


def __getattr__(name: str) -> object:
    module_name = next((module for module, names in _MODULES.items() if name in names), None)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module_name), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
