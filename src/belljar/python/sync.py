"""The Python API for programs without `async`: how a session is opened, and a map made.

What they have of a session is in `session_handle.py`.
"""

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from anyio.from_thread import start_blocking_portal

from belljar.models import MappedResult
from belljar.python.execution_handle import iterate
from belljar.python.session_handle import SessionHandle, SessionOpener, SyncSession
from belljar.settings import Settings


@contextmanager
def session(
    environment: str = "",
    settings: Settings | None = None,
    *,
    server: str = "",
    api_key: str | None = None,
    **flags: object,
) -> Generator["SyncSession"]:
    """Open a session, in an engine of its own or on a running server; it and its files are gone when the block ends.

    `server` is the URL of a server's `/mcp`, `api_key` its key. Without it, `flags` are settings, such as
    `memory_mb=512`.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_open_session(environment, settings, server, api_key, flags)) as handle,
    ):
        yield SyncSession(portal, handle)


def map(  # noqa: A001 - people call it as belljar.map
    codes: Iterable[str],
    environment: str = "",
    settings: Settings | None = None,
    *,
    server: str = "",
    api_key: str | None = None,
    keys: Iterable[str] | None = None,
    at_once: int = 16,
    timeout_s: float | None = None,
    in_order: bool = False,
    retry_lost: bool = False,
    **flags: object,
) -> Iterator[MappedResult]:
    """Run each code in a new session of its own, and iterate over the results as they come; see `SessionHandle.map`.

    `server`, `api_key`, `settings` and `flags` are those of `session`.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_open(environment, settings, server, api_key, flags)) as opener,
    ):
        results = opener.map(
            codes,
            environment if server else "",
            keys=keys,
            at_once=at_once,
            timeout_s=timeout_s,
            in_order=in_order,
            retry_lost=retry_lost,
        )
        yield from iterate(portal, results)


@asynccontextmanager
async def _open_session(
    environment: str, settings: Settings | None, server: str, api_key: str | None, flags: dict[str, object]
) -> AsyncGenerator[SessionHandle]:
    async with (
        _open(environment, settings, server, api_key, flags) as opener,
        opener.open_session(environment if server else "") as handle,
    ):
        yield handle


@asynccontextmanager
async def _open(
    environment: str, settings: Settings | None, server: str, api_key: str | None, flags: dict[str, object]
) -> AsyncGenerator[SessionOpener]:
    """Open an engine of its own, whose usual environment is this one, or connect to a server."""
    # Each way imports what the other never needs.
    if server:
        from belljar.python.remote import connect

        if settings is not None or flags:
            raise TypeError("settings are the server's own: pass none of them together with server")
        async with connect(server, api_key=api_key) as remote:
            yield remote
        return
    from belljar.python.local import open_engine

    if api_key is not None:
        raise TypeError("api_key is the key of a server: pass its URL as server")
    chosen = {"environment": environment} if environment else {}
    async with open_engine(settings, **flags, **chosen) as engine:
        yield engine
