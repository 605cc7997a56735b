"""One session: its folder, its kernel, and the turn that its executions take one after another.

Also owns the lease (when an unused session expires) and the authors of cells in a shared session. The registry creates
and ends sessions.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

from anyio import to_thread

from belljar.change_signal import ChangeKind, ChangeLog
from belljar.errors import CopyRefused, KernelDied, TooLarge
from belljar.executions.admission import Admission
from belljar.executions.cell import Cell
from belljar.executions.execution import Execution
from belljar.executions.shared_workspace import SharedWorkspace, WorkspaceFolder
from belljar.facts import SessionFacts
from belljar.files.disk_usage import DiskQuota
from belljar.files.snapshots import Snapshots
from belljar.files.workspace import Workspace
from belljar.journal.journal import ExecutionRecord, Journal
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.kernels.base import Kernel, pid_of
from belljar.logs import pseudonym
from belljar.models import Rewinding, SessionInfo, SessionNotice, iso
from belljar.outputs.events import Event
from belljar.outputs.plugin_screens import SCREEN_HOOK, plugin_screens
from belljar.outputs.recorder import OutputScreen, Screens
from belljar.plugins import Plugins
from belljar.policy.guard import Guard
from belljar.policy.output_filter import FilterScreen
from belljar.policy.rules import OutputRule
from belljar.privacy.redaction import RedactionScreen, SessionRedactor
from belljar.privacy.signed_urls import HIDDEN, KnownSignatures, signatures_in, without_signatures
from belljar.provisioning.environments import is_remote
from belljar.provisioning.gpus import SessionGpus
from belljar.provisioning.handover import Handover
from belljar.questions.inbox import Inbox
from belljar.sandboxes.base import Incident
from belljar.sandboxes.gpus import Gpu
from belljar.sessions.checkpoints import CheckpointDeposits, Checkpoints, UndoHistory
from belljar.sessions.comms import SessionComms
from belljar.sessions.folders import SessionFolders
from belljar.sessions.queue import ExecutionQueue, interrupt_all
from belljar.sessions.session_kernel import SessionKernel, StartKernel
from belljar.settings import MEBIBYTE, Settings
from belljar.settings.azure import AZURE
from belljar.skills.session_view import SessionSkills
from belljar.toolbox.broker import Broker

FollowEnvironment = Callable[[Callable[[str], None]], AbstractContextManager[None]]
"""Calls a function with what is said about the session's environment, while that is being made and the block runs."""
Watcher = Callable[[Execution | None], None]
"""Called with every execution when its turn has come, or when it ended without one; with None when the session ends."""

# After this long without a cell nobody is likely to send one in the time that a checkpoint takes.
IDLE_S = 0.1
# The time of the last use is recorded at most this often.
NOTE_S = 10.0
MOST_NUMBERED = 1_000
"""How many names with a number are tried for a new file."""


class Session:
    """A session as surfaces use it; cells go through `submit`."""

    def __init__(
        self,
        folders: SessionFolders,
        *,
        principal: str,
        environment: str,
        reason: str,
        settings: Settings,
        journal: Journal,
        records: SessionRecords,
        admission: Admission,
        start_kernel: StartKernel,
        follow_environment: FollowEnvironment,
        guard: Guard,
        plugins: Plugins,
        redactor: SessionRedactor,
        handover: Handover,
        gpus: SessionGpus,
        changes: ChangeLog,
        inbox: Inbox,
        workspace_folder: WorkspaceFolder | None = None,
        tools: Broker | None = None,
        skills: SessionSkills | None = None,
        is_piece: bool = False,
    ) -> None:
        self.id = folders.session_id
        self.is_piece = is_piece
        """Whether it is a map's, for one piece of code: no earlier state of it is kept, and it never sleeps."""
        self.folders = folders
        self.displays = folders.displays
        self.principal = principal
        self.inbox = inbox
        self.environment = environment
        self.reason = reason
        self.settings = settings
        self.journal = journal
        self._records = records
        self.admission = admission
        owner = folders.identity
        self.workspace = Workspace(folders.workspace, owner and (owner.uid, owner.gid))
        self.quota = DiskQuota((*folders.own, folders.layer), settings.disk_mb or 0)
        self.sharing = SharedWorkspace(workspace_folder, self.workspace, folders.shared) if workspace_folder else None
        """Its `workspace/` folder, which outlives it; None where there is none."""
        self.guard = guard
        self.plugins = plugins
        self.redactor = redactor
        """Redacts the personal data that its code and its callers may not see."""
        self.signatures = KnownSignatures()
        """Signatures in URLs that its code was given; they are removed from output."""
        self.skills = skills
        """Its folder `skills/`; None where there are no skills."""
        self.tools = tools
        """The broker for its code's tool calls; None where there are no tools."""
        if tools is not None:
            tools.attach(owner=principal, guard=guard, redactor=redactor, keep=self.write_file)
        self.turn = asyncio.Lock()
        self.handover = handover
        self._follow_environment = follow_environment
        self.gpus = gpus
        """The GPUs of all sessions, this one's by its id."""
        self._changes = changes
        self.session_kernel = self._make_session_kernel(start_kernel)
        self.queue = ExecutionQueue(self.id, most=settings.max_queue, on_done=self._on_done)
        self.authors = Authors()
        self.watchers: set[Watcher] = set()
        """The people who share it; it counts as used while there are any."""
        self.comms = SessionComms(self)
        """The messages between its widgets and the front ends that show them."""
        self.undo_history = UndoHistory(self.id, journal)
        self.lease = Lease(
            self.id,
            idle_s=settings.session_idle_s,
            sleeps=settings.hibernate and not is_remote(environment),
            is_in_use=lambda: self.is_busy or bool(self._uses or self.watchers),
            find_gpus=lambda: gpus.of(self.id),
        )
        self._uses = 0
        self._stricter: list[Guard] = []
        """Guards beside its own, of the workflow whose step runs."""
        self._is_closed = False
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._idle_since = time.monotonic()
        self._is_checkpointing = False
        self.count = 0
        """How many executions were submitted so far."""
        self._noted: tuple[str, ...] = ()
        """The names of its variables as they are on record."""
        self._noted_at = -NOTE_S

    def _make_session_kernel(self, start_kernel: StartKernel) -> SessionKernel:
        folders, settings, handover = self.folders, self.settings, self.handover
        limit_bytes, outlives_server = settings.checkpoint_disk_mb * MEBIBYTE, handover.is_on
        snapshots = Snapshots(
            folders.workspace, folders.snapshots, limit_bytes=limit_bytes, outlives_server=outlives_server
        )
        deposits = CheckpointDeposits(self.id, handover)
        return SessionKernel(
            folders,
            start_kernel=start_kernel,
            quota=self.quota,
            checkpoints=Checkpoints(
                snapshots,
                deposits,
                most=0 if self.is_piece else settings.checkpoints,
                memory_mb=settings.checkpoint_memory_mb,
            ),
            is_busy=lambda: self.is_busy,
            on_growth=self._on_growth,
            does_rewind=settings.on_death == "rewind",
            handover=handover,
            extra_descriptor=self.redactor.log_descriptor,
        )

    # Executions

    def submit(self, cell: Cell, key: str = "") -> Execution:
        """Queue a cell; it runs when its turn comes, whether or not anyone waits for it."""
        self.admission.check_queue(self.principal)
        self.journal.check_room()
        self.queue.check_room()
        self.count += 1
        self.signatures.learn(signatures_in(cell.code))
        execution = Execution(self.journal.new_id(), self, cell, self.count)
        code = without_signatures(cell.code)
        record = ExecutionRecord(
            execution.id, self.id, self.principal, code, None, author=cell.author, client=cell.client
        )
        self.journal.submit(record, time.time(), key)
        self.queue.add(execution)
        self._publish("execution", "queued", execution.id)
        return execution

    async def start(self) -> Kernel:
        """Start the kernel now, if there is none, instead of with the first cell."""
        async with self.turn:
            return await self.session_kernel.ensure_started()

    async def interrupt(self) -> list[Execution]:
        """Stop all executions that run or wait, and wait until they have ended; return them."""
        running = self.queue.running()
        await interrupt_all(running)
        return running

    def _on_done(self, execution: Execution) -> None:
        self.lease.touch()
        self._publish("execution", "ended", execution.id)
        self._notify_watchers(execution)
        self._idle_since = time.monotonic()
        is_scheduled = self._checkpoint_task is not None and not self._checkpoint_task.done()
        if not self.is_busy and self.session_kernel.checkpoints.is_enabled and not self._is_closed and not is_scheduled:
            # Take the checkpoint now, while nobody waits, so that the next cell need not wait for it.
            self._checkpoint_task = self.queue.run_aside(self._checkpoint_when_idle())

    async def _checkpoint_when_idle(self) -> None:
        # Wait again after each cell that ended meanwhile: this task covers those too.
        while (wait_s := self._idle_since + IDLE_S - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)
        if not self.is_busy and not self.turn.locked():
            async with self.turn:
                self._is_checkpointing = True
                try:
                    await self.session_kernel.take_checkpoint(is_idle=True)
                finally:
                    self._is_checkpointing = False

    def _publish(self, kind: ChangeKind, state: str, execution_id: str = "") -> None:
        """Publish a change to monitors. Unlike watchers, they do not keep the session from expiring."""
        if not self.is_piece:
            self._changes.publish(kind, state, self.id, self.principal, execution_id)

    def _notify_watchers(self, execution: Execution | None) -> None:
        for watcher in [*self.watchers]:
            watcher(execution)

    # For executions: see `ExecutionContext`

    def on_turn(self, execution_id: str, number: int) -> None:
        """See `ExecutionContext`."""
        self.undo_history.add(execution_id)
        self.session_kernel.checkpoints.on_execution(execution_id, number)
        if (execution := self.queue.find(execution_id)) is not None:
            self._notify_watchers(execution)

    def waits_for(self, execution_id: str) -> str:
        """See `ExecutionContext`."""
        unfinished = [execution.id for execution in self.queue.running()]
        ahead = unfinished.index(execution_id) if execution_id in unfinished else 0
        if ahead:
            others = f" and {ahead - 1} more" if ahead > 1 else ""
            return f"execution {unfinished[0]}{others} of this session to end"
        return self.admission.waits_for(self.principal)

    def on_start(self, execution_id: str) -> None:
        """See `ExecutionContext`."""
        self._publish("execution", "begun", execution_id)

    def note_author(self, author: str) -> str:
        """See `ExecutionContext`."""
        return self.authors.on_cell(author)

    def pass_to_views(self, execution_id: str, sequence: int, event: Event) -> bool:
        """See `ExecutionContext`."""
        return self.comms.tell(execution_id, sequence, event)

    def record_use(self) -> None:
        """Record that it is used and its variables, if they changed or `NOTE_S` passed; the next commit includes it."""
        now, variables = time.monotonic(), self.session_kernel.variables
        if variables != self._noted or now - self._noted_at > NOTE_S:
            self._noted, self._noted_at = variables, now
            self._records.record_use(self.id, variables)

    def following_environment(self, on_progress: Callable[[str], None]) -> AbstractContextManager[None]:
        """See `ExecutionContext`."""
        return self._follow_environment(on_progress)

    def screens(self) -> Screens:
        """Return the screens (filters) that the output of a new execution passes through."""
        redaction: list[OutputScreen] = [RedactionScreen(self.redactor)] if self.redactor.redacts_outputs else []
        hidden = [OutputRule(text=signature, replace=HIDDEN) for signature in self.signatures.all()]
        stricter = [screen for guard in self._stricter for screen in guard.screens()]
        own: list[OutputScreen] = [*(self.guard.screens() if self.guard.filters_output else ()), *stricter]
        own += [FilterScreen(hidden)] if hidden else []
        if SCREEN_HOOK in self.plugins.used_hooks:
            own += plugin_screens(self.plugins, SessionFacts(self.id, self.principal, self.environment))
        return Screens([*redaction, *own])

    @contextmanager
    def tightened(self, guard: Guard) -> Generator[None]:
        """Apply a second guard to tool calls and output until the block ends; its caller examines the code."""
        self._stricter.append(guard)
        try:
            with self.tools.tightened(guard) if self.tools is not None else nullcontext():
                yield
        finally:
            self._stricter.remove(guard)

    async def write_file(self, name: str, data: bytes) -> None:
        """Write a file into the folder, if there is room."""
        self.workspace.check_name(name)
        async with self.quota.room_for(len(data)):
            await to_thread.run_sync(self.workspace.write, name, data)

    async def add_file(self, stem: str, extension: str, data: bytes) -> str:
        """See `ExecutionContext`."""
        async with self.quota.room_for(len(data)):
            return await to_thread.run_sync(_create_numbered, self.workspace, stem, extension, data)

    def _on_growth(self) -> None:
        """Stop the cell that runs, or what a cell left running, because the folder is over its limit and grows."""
        running = next((execution for execution in self.queue.running() if execution.has_started), None)
        if running is not None:
            running.stop_for_disk(at_once=self.quota.is_far_over)
            return
        full = Incident("disk_full", f"folder {self.quota.detail}, and grew between two cells")
        self.queue.run_aside(self.session_kernel.kill_idle(full))

    # Rewinding

    async def rewind(self, to: str | int) -> Rewinding:
        """Rewind to before an execution, given by its id or as the number of executions to undo."""
        self.check_forkable("rewound")
        self.queue.check_idle()
        # In a task of its own, because a caller that stops waiting must not leave it half done, with the files of one
        # state and the variables of another. The target is resolved now, while nothing runs, because there may be
        # further executions by the time it gets the turn.
        rewinding = self.queue.run_aside(self._rewind(self.state_before(to)))
        try:
            return await asyncio.shield(rewinding)
        except asyncio.CancelledError:
            rewinding.add_done_callback(_ignore_exception)
            if rewinding.cancelled():
                raise KernelDied(f"session {self.id} ended while it was rewound") from None
            raise

    def state_before(self, to: str | int) -> str:
        """Return the execution, among those that can be undone, that a caller means; refuse what means none."""
        return self.undo_history.target(to, self.session_kernel.checkpoints.hint(self.undo_history.ids))

    async def _rewind(self, target: str) -> Rewinding:
        async with self.turn:
            checkpoint = self.session_kernel.checkpoints.find(target, self.undo_history.ids)
            lost = await self.session_kernel.rewind(checkpoint)
            return Rewinding(session_id=self.id, to=target, undone=self.undo_since(target), lost=lost)

    def check_forkable(self, done: str) -> None:
        """Refuse what needs a fork of the kernel where none can be made."""
        if self.environment == AZURE:
            raise CopyRefused(
                f"session {self.id} cannot be {done}: it lives in an Azure pool, which cannot copy or keep its memory",
                hint="Start a new session and run the cells again",
            )

    def undo_since(self, since: str) -> list[str]:
        """Record an execution and those after it as undone, because the session was rewound; return their ids."""
        if self.sharing is not None:
            self.sharing.forget()
        undone = self.undo_history.undo_since(since)
        for execution_id in undone:
            self._publish("execution", "undone", execution_id)
        return undone

    # Lifetime

    @property
    def is_expired(self) -> bool:
        """Return whether it was unused for too long; a session that runs a cell never is."""
        return not self.is_busy and self.lease.left_s <= 0

    @property
    def is_idle(self) -> bool:
        """Return whether nobody uses it at the moment: no cell, no request under way, nobody attached."""
        return not (self.is_in_turn or self._uses or self.watchers)

    @property
    def is_in_turn(self) -> bool:
        """Return whether a cell or a request has the kernel; a checkpoint that nobody waits for does not count."""
        return self.is_busy or (self.turn.locked() and not self._is_checkpointing)

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Count it as used until the block ends, although no cell of it runs."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self.lease.touch()

    def restore(self, entry: SessionRecord, loss: str) -> None:
        """Restore a session of an earlier server from its record; `loss` says why its checkpoints are lost."""
        self.lease.restore(entry.created_at)
        self.count = entry.executions
        self.undo_history.restore()
        self.session_kernel.checkpoints.mark_lost(self.undo_history.ids, loss)
        self.session_kernel.variables = entry.variables

    def is_blank(self) -> bool:
        """Return whether it has no executions, no files and no saved variables."""
        return self.count == 0 and self.session_kernel.waking is None and not self.workspace.list().entries

    def close_aside(self) -> None:
        """Do nothing more between cells, because the session is about to end or leave this server."""
        self._is_closed = True
        self.queue.stop_aside()

    async def aclose(self) -> None:
        """End the kernel and everything that runs; may be called twice. The folder stays."""
        self.close_aside()
        self._notify_watchers(None)
        self.queue.interrupt()
        await self.queue.cancel()
        await self.session_kernel.aclose()
        self.redactor.close()

    # State

    @property
    def log_ids(self) -> dict[str, str]:
        """Return the ids that a log line about it carries."""
        return {"session_id": self.id, "principal": pseudonym(self.principal)}

    @property
    def is_busy(self) -> bool:
        """Return whether an execution runs or waits."""
        return not self.queue.is_empty

    @property
    def state(self) -> Literal["running", "idle", "fresh"]:
        """Return what it does; `fresh` means that it has no kernel yet."""
        return "running" if self.is_busy else "idle" if self.session_kernel.kernel else "fresh"

    def info(self) -> SessionInfo:
        """Return the session's entry for lists. Call it in a thread, because it lists the folder."""
        last = self.queue.latest()
        return SessionInfo(
            session_id=self.id,
            environment=self.environment,
            kernel=self.session_kernel.kernel.name if self.session_kernel.kernel else "not started",
            sandbox=self.settings.sandbox,
            state=self.state,
            created_at=iso(self.lease.created_at),
            last_used_at=iso(self.lease.used_at),
            expires_at=iso(self.lease.expires_at),
            age_s=round(time.time() - self.lease.created_at, 1),
            memory_mb=round(self.session_kernel.kernel.memory_mb(), 1) if self.session_kernel.kernel else 0.0,
            gpus=[gpu.uuid for gpu in self.gpus.of(self.id)],
            gpu_memory_mb=round(self.gpus.memory_mb(self.id, pid_of(self.session_kernel.kernel)), 1),
            executions=self.count,
            files=len(self.workspace.list().entries),
            checkpoints=self.session_kernel.checkpoints.count,
            reason=self.reason,
            last_status=last.result().status if last else None,
            last_cause=self.session_kernel.last_cause,
        )


def _create_numbered(workspace: Workspace, stem: str, extension: str, data: bytes) -> str:
    """Create the first file of `stem-1`, `stem-2` and so on that there is not, and return its name."""
    for number in range(1, MOST_NUMBERED + 1):
        name = f"{stem}-{number}{extension}"
        with suppress(FileExistsError):
            workspace.create(name, data)
            return name
    raise TooLarge(f"there are {MOST_NUMBERED:,} files like {stem}-1{extension} already", hint="Delete some of them")


def _ignore_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task that nobody waits for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


# The lease of a session

INSTRUCTIONS = "Pass this session_id in the next calls: variables and files stay."
SLEEPS = "It sleeps after {idle} and wakes with the next call."
ENDS = "It ends after {idle}."


def idle_time(idle_s: float) -> str:
    """Return a time without use as people say it, such as "30 idle minutes"."""
    return f"{round(idle_s / 60, 1):g} idle minutes" if idle_s >= 60 else f"{idle_s:g} idle seconds"


class Lease:
    """How long a session may stay: `idle_s` from its last use on, and without limit while it is in use."""

    def __init__(
        self,
        session_id: str,
        *,
        idle_s: float,
        is_in_use: Callable[[], bool],
        sleeps: bool = False,
        find_gpus: Callable[[], Sequence[Gpu]] = tuple[Gpu, ...],
    ) -> None:
        self._session_id = session_id
        self._sleeps = sleeps
        self._find_gpus = find_gpus
        self._idle_s = idle_s
        self._is_in_use = is_in_use
        self.created_at = time.time()
        self.used_at = time.time()
        self._used_ticks = time.monotonic()
        """The same by the monotonic clock, which decides when the session expires."""
        self._is_noticed = False

    def restore(self, created_at: float) -> None:
        """Restore the lease of an earlier server's session, whose notice was given already."""
        self.created_at = created_at
        self._is_noticed = True

    def touch(self) -> None:
        """Note that the session was used."""
        self.used_at = time.time()
        self._used_ticks = time.monotonic()

    @property
    def left_s(self) -> float:
        """Return how long until the session expires if it is not used."""
        return self._idle_s - (0.0 if self._is_in_use() else time.monotonic() - self._used_ticks)

    @property
    def expires_at(self) -> float:
        """Return when the session expires if it is not used."""
        return time.time() + self.left_s

    def notice(self) -> SessionNotice | None:
        """Return the notice for the first caller; None for later ones."""
        if self._is_noticed:
            return None
        self._is_noticed = True
        end = (SLEEPS if self._sleeps else ENDS).format(idle=idle_time(self._idle_s))
        instructions = f"{INSTRUCTIONS} {end}"
        if names := [f"GPU {gpu.index} ({gpu.name})" for gpu in self._find_gpus()]:
            instructions += f" It has {', '.join(names)}."
        return SessionNotice(session_id=self._session_id, instructions=instructions, expires_at=iso(self.expires_at))


# The authors of cells in a shared session

MAX_REMEMBERED = 1_000
MAX_DEEDS = 10


class Authors:
    """The people who ran cells or used widgets in one session since its owner's last cell."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """The author of each cell."""
        self._users: dict[str, None] = {}
        """The people who used widgets, in order."""
        self._deeds: list[str] = []
        """What people did beside running cells, in order."""

    def note(self, deed: str) -> None:
        """Note what a person did to the session, as a clause that tells it to the owner's next cell."""
        self._deeds.append(deed)
        del self._deeds[:-MAX_DEEDS]

    def use(self, author: str) -> None:
        """Note that someone other than the owner used a widget; an empty author is the owner."""
        if author:
            self._users[author] = None

    def on_cell(self, author: str) -> str:
        """Note that a cell begins, the owner's if `author` is empty; return a notice for its output, if any."""
        if author:
            self._names.append(author)
            del self._names[:-MAX_REMEMBERED]
            return f"run by {author}, who shares this session"
        names, self._names, users, self._users = self._names, [], self._users, {}
        cells = "a cell" if len(names) == 1 else f"{len(names)} cells"
        runners, widget_users = " and ".join(dict.fromkeys(names)), " and ".join(users)
        parts = [f"{runners} ran {cells}"] if names else []
        parts += ["used widgets" if widget_users == runners else f"{widget_users} used widgets"] if users else []
        deeds, self._deeds = self._deeds, []
        parts += deeds
        return f"{' and '.join(parts)} in this session since your last one" if parts else ""
