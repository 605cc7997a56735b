"""An engine in this process, for programs that run sessions themselves.

`open_session` is the short way to one session; `open_engine` holds several.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from belljar.http.server_socket import open_reachable_runtime
from belljar.python.session_handle import SessionHandle, SessionOpener
from belljar.settings import Settings, given_flags, load_settings


@asynccontextmanager
async def open_session(
    environment: str = "", settings: Settings | None = None, **flags: object
) -> AsyncGenerator[SessionHandle]:
    """Open one session in an engine of its own; `flags` are settings, such as `sandbox="process"`."""
    chosen = {"environment": environment} if environment else {}
    async with open_engine(settings, **flags, **chosen) as engine, engine.open_session() as session:
        yield session


@asynccontextmanager
async def open_engine(settings: Settings | None = None, **flags: object) -> AsyncGenerator["Engine"]:
    """Open an engine for several sessions, which end with it; other settings are found as the command finds them."""
    given = given_flags(flags)
    if settings is None or given:
        settings = load_settings({**(dict(settings) if settings else {}), **given})
    # Sessions are not kept alive, because no later engine would know of them.
    async with open_reachable_runtime(settings.model_copy(update={"keep_alive": False})) as runtime:
        yield Engine(runtime.late_engine.get())


class Engine(SessionOpener):
    """A running engine; made by `open_engine`."""
