"""The pool of sessions without an owner yet: folder, user and kernel of each are ready for the next caller.

In addition it has a sandbox without a kernel, for a caller who finds the pool empty, because opening a sandbox takes
longer than forking a kernel into it, and an empty sandbox costs next to nothing. The pool is filled in the background,
for the configured environment, as long as the machine has memory to spare.
"""

import asyncio
import logging
from collections import deque
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import BelljarError
from belljar.files.fd_walk import remove_tree
from belljar.journal.session_records import SessionRecords
from belljar.kernels.base import Kernel, RehearsableKernel
from belljar.provisioning.starter import KernelStarter
from belljar.sessions.folders import SessionFolders

# The share of the machine's memory that must be free for the pool to be filled.
LEAST_FREE = 0.1
SPARE_SANDBOXES = 1
CONTEXT_S = 60.0
# The delay before a session that was taken is replaced, because starting the new one would slow the first cell of
# whoever took it.
REFILL_DELAY_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledSession:
    """A session that has no owner yet."""

    folders: SessionFolders
    kernel: Kernel
    has_context: bool = False
    """Whether it holds a context on a GPU already."""


class Pool:
    """Keeps `size` sessions ready. Opened by the registry."""

    def __init__(
        self,
        starter: KernelStarter,
        folder: Path,
        records: SessionRecords,
        *,
        environment: str,
        size: int,
        contexts: int = 0,
    ) -> None:
        self._starter = starter
        self._records = records
        self._folder = folder
        self._environment = environment
        # Without a GPU for sessions that do not ask, there is nothing to make a context on.
        self._contexts = contexts if starter.gpus.default_count(environment) else 0
        self._size = max(size, self._contexts)
        self._ready: deque[PooledSession] = deque()
        self._prepared: deque[SessionFolders] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._discarding: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def is_full(self) -> bool:
        """Return whether all sessions and sandboxes that should be ready are."""
        return len(self._ready) >= self._size and len(self._prepared) >= SPARE_SANDBOXES

    def take(self, environment: str) -> PooledSession | None:
        """Return a session for that environment, if there is one, and start to replace it."""
        taken = None
        if environment == self._environment:
            while self._ready and taken is None:
                candidate = self._ready.popleft()
                if candidate.kernel.is_alive():
                    taken = candidate
                else:
                    task = asyncio.get_running_loop().create_task(self._discard(candidate))
                    self._discarding.add(task)
                    task.add_done_callback(self._discarding.discard)
        self.fill(after_s=REFILL_DELAY_S)
        return taken

    def take_prepared(self, environment: str) -> SessionFolders | None:
        """Return the folders of a session whose sandbox is open already, if there is one for that environment."""
        taken = self._prepared.popleft() if environment == self._environment and self._prepared else None
        self.fill(after_s=REFILL_DELAY_S)
        return taken

    def fill(self, after_s: float = 0.0) -> None:
        """Fill the pool in the background."""
        if not self._is_closed and not self.is_full and (self._filling is None or self._filling.done()):
            # In a context of its own, so that it does not count as work of the request that emptied the pool.
            self._filling = asyncio.get_running_loop().create_task(self._fill(after_s), context=Context())

    async def _fill(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while not self.is_full:
            try:
                if not await self._starter.wait_until_warm(self._environment) or _free_share() < LEAST_FREE:
                    return
                # The sandbox first, because it is opened quickly and the next caller may come before a kernel is ready.
                if len(self._prepared) < SPARE_SANDBOXES:
                    self._prepared.append(await self._prepare_sandbox())
                else:
                    self._ready.append(await self._make())
            except (BelljarError, TimeoutError) as error:
                log.warning("no session can be kept ready: %s", error or "its GPU gave no answer")
                return

    async def _prepare_sandbox(self) -> SessionFolders:
        folders = self._new_folders()
        try:
            await self._starter.prepare(self._environment, folders)
        except BaseException:
            await self._remove(folders)
            raise
        return folders

    def _new_folders(self) -> SessionFolders:
        folders = new_folders(self._folder, self._starter, self._records.new_id())
        self._records.enter(folders.session_id, "", self._environment, "", state="unborn")
        return folders

    async def _make(self) -> PooledSession:
        folders = self._new_folders()
        kernel = None
        has_context = sum(pooled.has_context for pooled in self._ready) < self._contexts
        try:
            kernel = await self._starter.start(self._environment, folders, is_ahead=True)
            if isinstance(kernel, RehearsableKernel):
                async with asyncio.timeout(CONTEXT_S if has_context else None):
                    failure = await kernel.rehearse(makes_context=has_context)
                if failure:
                    log.warning("a session is kept ready without a context on its GPU: %s", failure)
        except BaseException:
            # Also when the engine closes while the kernel rehearses.
            if kernel is not None:
                await kernel.aclose()
            await self._remove(folders)
            raise
        return PooledSession(folders, kernel, has_context)

    async def _discard(self, pooled: PooledSession) -> None:
        await pooled.kernel.aclose()
        await self._remove(pooled.folders)

    async def _remove(self, folders: SessionFolders) -> None:
        await self._starter.close_prepared(folders.session_id)
        await asyncio.to_thread(remove_tree, folders.root)
        self._records.forget(folders.session_id)
        self._starter.forget(folders.session_id)
        if folders.identity is not None:
            self._starter.provider.release_identity(folders.identity)

    async def aclose(self) -> None:
        """Close the sessions and sandboxes that nobody took."""
        self._is_closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await asyncio.gather(*self._discarding)
        while self._ready:
            await self._discard(self._ready.popleft())
        while self._prepared:
            await self._remove(self._prepared.popleft())


def new_folders(folder: Path, starter: KernelStarter, session_id: str) -> SessionFolders:
    """Create the folders of a new session."""
    folders = SessionFolders(session_id, folder / session_id, starter.provider.take_identity())
    folders.make()
    return folders


def _free_share() -> float:
    """Return the share of the machine's memory that is free; 1 where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1.0
