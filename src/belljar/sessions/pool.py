"""Sessions that nobody has asked for yet: folder, user and kernel of each are ready for whoever asks next.

Behind them stands one that has all but its kernel, for whoever finds the others taken: its sandbox takes longer to make
than a fork to enter it, and an empty one costs next to nothing.

Filled in the background, for the configured environment, as long as the machine has memory to spare.
"""

import asyncio
import logging
import secrets
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

# Of the machine's memory: below it nothing is kept ready.
LEAST_FREE = 0.1
SPARE_ROOMS = 1
# Who has just taken one has a first cell to run, which a new one would take the processor from.
GIVE_WAY_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledSession:
    """A session but for its owner."""

    folders: SessionFolders
    kernel: Kernel


class Pool:
    """Keeps `size` of them. Opened by the registry."""

    def __init__(
        self, starter: KernelStarter, folder: Path, roll: SessionRecords, *, environment: str, size: int
    ) -> None:
        self._starter = starter
        self._roll = roll
        self._folder = folder
        self._environment = environment
        self._size = size
        self._ready: deque[PooledSession] = deque()
        self._rooms: deque[SessionFolders] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._discarding: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def is_full(self) -> bool:
        """Whether everything is there that should be."""
        return len(self._ready) >= self._size and len(self._rooms) >= SPARE_ROOMS

    def take(self, environment: str) -> PooledSession | None:
        """One for that environment, if there is one; another will take its place."""
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
        self.fill(after_s=GIVE_WAY_S)
        return taken

    def take_room(self, environment: str) -> SessionFolders | None:
        """The places of a session whose sandbox is open already, if there is one for that environment."""
        taken = self._rooms.popleft() if environment == self._environment and self._rooms else None
        self.fill(after_s=GIVE_WAY_S)
        return taken

    def fill(self, after_s: float = 0.0) -> None:
        """See that it gets full."""
        if not self._is_closed and not self.is_full and (self._filling is None or self._filling.done()):
            # In a context of its own: it is not the doing of the request that emptied the pool.
            self._filling = asyncio.get_running_loop().create_task(self._fill(after_s), context=Context())

    async def _fill(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while not self.is_full:
            if not await self._starter.is_warm(self._environment) or _free_share() < LEAST_FREE:
                return
            try:
                # A room first: it is made in no time, and the next one to ask may come before a kernel is ready.
                if len(self._rooms) < SPARE_ROOMS:
                    self._rooms.append(await self._make_room())
                else:
                    self._ready.append(await self._make())
            except BelljarError as error:
                log.warning("no session can be kept ready: %s", error)
                return

    async def _make_room(self) -> SessionFolders:
        folders = self._new_folders()
        try:
            await self._starter.prepare(self._environment, folders)
        except BaseException:
            await self._remove(folders)
            raise
        return folders

    def _new_folders(self) -> SessionFolders:
        folders = new_folders(self._folder, self._starter)
        self._roll.enter(folders.session_id, "", self._environment, "", state="unborn")
        return folders

    async def _make(self) -> PooledSession:
        folders = self._new_folders()
        kernel = None
        try:
            kernel = await self._starter.start(self._environment, folders, is_ahead=True)
            if isinstance(kernel, RehearsableKernel):
                await kernel.rehearse()
        except BaseException:
            # The engine may close while it rehearses.
            if kernel is not None:
                await kernel.aclose()
            await self._remove(folders)
            raise
        return PooledSession(folders, kernel)

    async def _discard(self, unborn: PooledSession) -> None:
        await unborn.kernel.aclose()
        await self._remove(unborn.folders)

    async def _remove(self, folders: SessionFolders) -> None:
        await self._starter.vacate(folders.session_id)
        await asyncio.to_thread(remove_tree, folders.root)
        self._roll.forget(folders.session_id)
        self._starter.forget(folders.session_id)
        if folders.identity is not None:
            self._starter.provider.release_identity(folders.identity)

    async def aclose(self) -> None:
        """End those that nobody asked for."""
        self._is_closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await asyncio.gather(*self._discarding)
        while self._ready:
            await self._discard(self._ready.popleft())
        while self._rooms:
            await self._remove(self._rooms.popleft())


def new_session_id() -> str:
    """A name nobody can guess."""
    return secrets.token_hex(16)


def new_folders(folder: Path, starter: KernelStarter) -> SessionFolders:
    """The places of a session that is about to be, with a name nobody can guess."""
    session_id = new_session_id()
    folders = SessionFolders(session_id, folder / session_id, starter.provider.take_identity())
    folders.make()
    return folders


def _free_share() -> float:
    """Of the machine's memory; all of it where that cannot be told."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1.0
