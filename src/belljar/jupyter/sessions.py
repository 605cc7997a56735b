"""Opens the session behind a Jupyter kernel: one of its own, one on a running server, or an agent's.

Does not know Jupyter's messages.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from belljar.engine.attachment_messages import AttachedSession
from belljar.engine.contract import Access
from belljar.engine.remote_attachments import open_attachment, open_served
from belljar.errors import EngineError, SessionNotFound
from belljar.http.server_socket import open_reachable_runtime
from belljar.settings import Settings

OpenSession = Callable[[], AbstractAsyncContextManager[AttachedSession]]
PRINCIPAL = "jupyter"
_DAY_S = 24 * 60 * 60.0
# A notebook's cell may run long, and a single session needs nothing that is kept ready for others.
_DEFAULTS = {
    "execution_timeout_s": _DAY_S,
    "fork_start": False,
    "pool_size": 0,
    "checkpoints": 0,
    "hibernate": False,
}


@asynccontextmanager
async def open_own(settings: Settings) -> AsyncGenerator[AttachedSession]:
    """Open a runtime in this process and a session in it; both end with the block."""
    chosen = {name: value for name, value in _DEFAULTS.items() if name not in settings.model_fields_set}
    async with open_reachable_runtime(settings.model_copy(update=chosen)) as runtime:
        engine, owner = runtime.late_engine.get(), Access(PRINCIPAL, via="client")
        attached = await engine.attach(owner)
        try:
            yield attached
        finally:
            await attached.aclose()
            with suppress(SessionNotFound):
                await engine.end(owner, attached.session_id)


@asynccontextmanager
async def open_somewhere(settings: Settings) -> AsyncGenerator[AttachedSession]:
    """Open a session on a running server, which can fork it quickly; without a server, one in this process."""
    environment = settings.environment if "environment" in settings.model_fields_set else ""
    async with AsyncExitStack() as stack:
        try:
            attached = await stack.enter_async_context(open_served(settings.data_directory, environment))
        except EngineError:
            attached = await stack.enter_async_context(open_own(settings))
        yield attached


def agents(data_directory: Path, prefix: str) -> OpenSession:
    """Return a function that attaches to the live session of an agent, which goes on when the kernel ends."""
    return lambda: open_attachment(data_directory, prefix)


class SessionKeeper:
    """Holds one session open in a task of its own, so that a caller that is cancelled does not close it."""

    def __init__(self, open_session: OpenSession) -> None:
        self._open_session = open_session
        self._task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[AttachedSession] | None = None
        self._is_closing = asyncio.Event()

    async def attach(self) -> AttachedSession:
        """Return the session, opened if there is none or the last one has ended; raise what opening it raises."""
        if self._opened is None or (self._opened.done() and self._task is not None and self._task.done()):
            self._is_closing = asyncio.Event()
            self._opened = asyncio.get_running_loop().create_future()
            self._task = asyncio.get_running_loop().create_task(self._hold(self._opened, self._is_closing))
        return await asyncio.shield(self._opened)

    async def _hold(self, opened: "asyncio.Future[AttachedSession]", is_closing: asyncio.Event) -> None:
        try:
            async with self._open_session() as attached:
                opened.set_result(attached)
                await is_closing.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def aclose(self) -> None:
        """Close the session; may be called twice. The next call of `attach` opens another one."""
        self._is_closing.set()
        if self._task is None or self._opened is None:
            return
        if not self._opened.done():  # opening may take minutes, while an environment is made
            self._opened.cancel()
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
