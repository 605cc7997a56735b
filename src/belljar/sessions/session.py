"""One session: a folder, a kernel that may have to be replaced, and the turn that cells take one after another."""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from belljar.errors import Busy
from belljar.files.removal import remove_tree
from belljar.files.workspace import Workspace
from belljar.kernels.base import Kernel
from belljar.kernels.starting import Folders
from belljar.models import SessionInfo, SessionNotice
from belljar.outputs.events import Finished
from belljar.sandboxes.base import Identity, Incident
from belljar.sessions.causes import killed
from belljar.sessions.execution import Cell, Execution
from belljar.sessions.journal import Journal, Record
from belljar.sessions.quota import DiskQuota
from belljar.settings import Settings

KEPT_EXECUTIONS = 50
INSTRUCTIONS = (
    "Pass this session_id in the next calls: variables, imports and files stay. "
    "It ends after {minutes:g} minutes without use."
)

StartKernel = Callable[[Folders], Awaitable[Kernel]]


@dataclass(frozen=True, slots=True)
class SessionFolders:
    """The session's places on the host."""

    session_id: str
    root: Path
    identity: Identity | None = None
    """Whose they are, where the session is a user of its own."""

    @property
    def workspace(self) -> Path:
        """Working directory of the cells, `/mnt/data` inside."""
        return self.root / "workspace"

    @property
    def scratch(self) -> Path:
        """Sockets and connection files."""
        return self.root / "scratch"

    @property
    def home(self) -> Path:
        """HOME under providers without a private one."""
        return self.root / "home"

    @property
    def layer(self) -> Path:
        """Packages installed for this session alone."""
        return self.root / "layer"

    @property
    def displays(self) -> Path:
        """What executions showed, out of the cells' reach."""
        return self.root / "displays"

    def make(self) -> None:
        """Make them all, below a folder that is closed to others."""
        for folder in (self.workspace, self.scratch, self.home, self.layer):
            folder.mkdir(parents=True, mode=0o700)
            if self.identity is not None and folder != self.layer:
                os.chown(folder, self.identity.uid, self.identity.gid)
        # Ours, and read by the session's user through its mount.
        self.layer.chmod(0o755)


@dataclass(frozen=True, slots=True)
class Loss:
    """What went with a kernel that died, told to the next execution."""

    names: tuple[str, ...]
    notice: str


class Session:
    """Made and ended by the registry; everything else goes through `submit`."""

    def __init__(
        self,
        folders: SessionFolders,
        *,
        principal: str,
        environment: str,
        reason: str,
        settings: Settings,
        journal: Journal,
        start_kernel: StartKernel,
    ) -> None:
        self.id = folders.session_id
        self.folders = folders
        self.principal = principal
        self.environment = environment
        self.reason = reason
        self.settings = settings
        self.journal = journal
        owner = folders.identity
        self.workspace = Workspace(folders.workspace, owner and (owner.uid, owner.gid))
        self.quota = DiskQuota((folders.workspace, folders.scratch, folders.home), settings.disk_mb or 0)
        self.turn = asyncio.Lock()
        self._start_kernel = start_kernel
        self._kernel: Kernel | None = None
        self._watch: asyncio.Task[None] | None = None
        self.ended_by = ""
        """Why the kernel was ended from here while no cell ran."""
        self._loss: Loss | None = None
        self.last_cause: str | None = None
        self._variables: tuple[str, ...] = ()
        self._executions: dict[str, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tasks_aside: set[asyncio.Task[None]] = set()
        self._count = 0
        self._created_at = time.time()
        self._used_at = time.time()
        self._is_noticed = False

    # Cells

    def submit(self, cell: Cell) -> Execution:
        """Queue a cell; it runs when its turn comes, whoever waits for it."""
        if len(self._tasks) >= self.settings.max_queue:
            raise Busy(
                f"session {self.id} has {len(self._tasks)} executions waiting, the most that max_queue allows",
                hint="Wait for some of them with get_execution, or interrupt them with interrupt_execution",
            )
        execution = Execution(secrets.token_hex(16), self, cell)
        self.journal.begin(Record(execution.id, self.id, self.principal, cell.code, None), time.time())
        self._count += 1
        self._remember_execution(execution)
        task = asyncio.get_running_loop().create_task(execution.run(), name=f"execution {execution.id}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return execution

    def _remember_execution(self, execution: Execution) -> None:
        self._executions[execution.id] = execution
        if len(self._executions) > KEPT_EXECUTIONS:
            oldest = next((key for key, kept in self._executions.items() if kept.is_finished), None)
            if oldest is not None:
                del self._executions[oldest]

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.touch()

    def execution(self, execution_id: str) -> Execution | None:
        """An execution that is running or ended lately; older ones are in the journal."""
        return self._executions.get(execution_id)

    def running(self) -> list[Execution]:
        """Executions that run or wait for their turn, in order."""
        return [execution for execution in self._executions.values() if not execution.is_finished]

    # The kernel, used by the execution that has the turn

    async def ready_kernel(self) -> Kernel:
        """The kernel, started if there is none."""
        if self._kernel is not None and not self._kernel.is_alive():
            await self.bury_kernel(self._idle_death(self._kernel))
        if self._kernel is None:
            self._kernel = await self._start_kernel(self.folders)
            watch = self.quota.watch(is_busy=lambda: self.is_busy, on_growth=self._on_growth)
            self._watch = asyncio.get_running_loop().create_task(watch)
        return self._kernel

    def _idle_death(self, kernel: Kernel) -> str:
        fact = "the kernel's process ended while no cell ran"
        hit = next((incident for incident in kernel.incidents() if incident.kind == "out_of_memory"), None)
        cause = self.ended_by or (killed(hit) if hit else "")
        self.last_cause = cause or fact
        return f"{fact} ({cause})" if cause else fact

    def _on_growth(self) -> None:
        """The folder is over its limit and grows: stop the cell, or what a cell left running."""
        running = next((execution for execution in self.running() if execution.has_started), None)
        if running is not None:
            running.stop_for_disk(at_once=self.quota.is_far_over)
        elif self._kernel is not None:
            self.ended_by = killed(Incident("disk_full", f"folder {self.quota.detail}, and grew between two cells"))
            self._tasks_aside.add(task := asyncio.get_running_loop().create_task(self._kernel.kill()))
            task.add_done_callback(self._tasks_aside.discard)

    async def write_file(self, name: str, data: bytes) -> None:
        """Put a file into the folder, if there is room."""
        self.workspace.check_name(name)
        await self.quota.check_room(len(data))
        await asyncio.to_thread(self.workspace.write, name, data)

    def take_loss(self) -> Loss | None:
        """What the last kernel took with it, told once."""
        loss, self._loss = self._loss, None
        return loss

    def remember(self, finished: Finished) -> None:
        """What the session holds after a cell."""
        self._variables = finished.variables

    async def bury_kernel(self, cause: str) -> tuple[str, ...]:
        """The kernel died: release it and tell which variables are gone. The next turn starts a fresh one."""
        await self._release_kernel()
        self.ended_by = ""
        names, self._variables = self._variables, ()
        gone = f"Gone: {', '.join(names[:40])}{' …' if len(names) > 40 else ''}." if names else "It held no variables."
        self._loss = Loss(
            names, f"{cause}. This is a fresh kernel: imports and variables are gone, files are kept. {gone}"
        )
        return names

    # Life

    @property
    def is_busy(self) -> bool:
        """Whether something runs or waits."""
        return bool(self._tasks)

    @property
    def expires_at(self) -> float:
        """When it ends if nothing happens."""
        return (time.time() if self.is_busy else self._used_at) + self.settings.session_idle_s

    def touch(self) -> None:
        """It was used."""
        self._used_at = time.time()

    async def aclose(self) -> None:
        """End the kernel and everything that runs; may be called twice. The folder stays."""
        for execution in self.running():
            execution.interrupt()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._release_kernel()

    async def _release_kernel(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._kernel is not None:
            await self._kernel.aclose()
        self._kernel = None

    def remove_files(self) -> None:
        """Delete everything it kept on disk."""
        remove_tree(self.folders.root)

    # What callers see

    def uri_of(self, name: str) -> str:
        """The resource URI of a file in the session folder."""
        return f"kernel://{self.id}/{quote(name)}"

    def notice(self) -> SessionNotice | None:
        """What the first caller is told; None ever after."""
        if self._is_noticed:
            return None
        self._is_noticed = True
        instructions = INSTRUCTIONS.format(minutes=self.settings.session_idle_s / 60)
        return SessionNotice(session_id=self.id, instructions=instructions, expires_at=iso(self.expires_at))

    def info(self) -> SessionInfo:
        """A line for lists. Looks through the folder, so call it in a thread."""
        last = next(reversed(self._executions.values()), None)
        return SessionInfo(
            session_id=self.id,
            environment=self.environment,
            kernel=self._kernel.name if self._kernel else "not started",
            sandbox=self.settings.sandbox,
            state="running" if self.is_busy else "idle" if self._kernel else "fresh",
            created_at=iso(self._created_at),
            last_used_at=iso(self._used_at),
            expires_at=iso(self.expires_at),
            age_s=round(time.time() - self._created_at, 1),
            memory_mb=round(self._kernel.memory_mb(), 1) if self._kernel else 0.0,
            executions=self._count,
            files=len(self.workspace.list().entries),
            reason=self.reason,
            last_status=last.result().status if last else None,
            last_cause=self.last_cause,
        )


def iso(timestamp: float) -> str:
    """A time as callers read it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
