"""One session: a folder, a kernel that may have to be replaced, and the turn that cells take one after another."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from belljar.errors import Busy, KernelDied, NoCheckpoint
from belljar.files.removal import remove_tree
from belljar.files.shelf import Shelf
from belljar.files.snapshots import Snapshots
from belljar.files.workspace import Workspace
from belljar.kernels.base import Kernel
from belljar.kernels.custody import Custody
from belljar.kernels.keeping import StateReport
from belljar.models import Rewinding, SessionInfo, SessionNotice
from belljar.outputs.screening import Screen, Screens
from belljar.policy.guard import Guard
from belljar.privacy.screen import VeilScreen
from belljar.privacy.veil import Veil
from belljar.sandboxes.base import Incident
from belljar.sessions.admission import Admission
from belljar.sessions.checkpoints import Checkpoints
from belljar.sessions.execution import Cell, Execution
from belljar.sessions.folders import SessionFolders
from belljar.sessions.hibernation import Waking, in_words, save
from belljar.sessions.journal import Journal, Record
from belljar.sessions.life import Life, StartKernel
from belljar.sessions.quota import DiskQuota
from belljar.sessions.roll import Entry, Roll
from belljar.sessions.sharing import Sharing
from belljar.settings import Settings
from belljar.toolbox.broker import Broker

Outcome = TypeVar("Outcome")
Watcher = Callable[[Execution | None], None]
"""Told of every execution when its turn has come or when it ended without one; None when the session ends."""

MEBIBYTE = 1024 * 1024
KEPT_EXECUTIONS = 50
TAKEN_BACK_MOST = 1_000
IDLE_S = 0.02
# Of a number of executions; more would be an id, or meant to be a nuisance.
MOST_DIGITS = 9
UNLIMITED_MB = 1024 * 1024
INSTRUCTIONS = (
    "Pass this session_id in the next calls: variables, imports and files stay. "
    "It ends after {minutes:g} minutes without use."
)


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
        roll: Roll,
        admission: Admission,
        start_kernel: StartKernel,
        guard: Guard,
        veil: Veil,
        shelf: Shelf | None = None,
        tools: Broker | None = None,
        custody: Custody | None = None,
    ) -> None:
        self.id = folders.session_id
        self.folders = folders
        self.principal = principal
        self.environment = environment
        self.reason = reason
        self.settings = settings
        self.journal = journal
        self._roll = roll
        self.admission = admission
        owner = folders.identity
        self.workspace = Workspace(folders.workspace, owner and (owner.uid, owner.gid))
        self.quota = DiskQuota((folders.workspace, folders.scratch, folders.home), settings.disk_mb or 0)
        self.guard = guard
        self.sharing = Sharing(shelf, self.workspace, folders.shared) if shelf else None
        """Its `workspace/`, which outlives it; None where there is none."""
        self.veil = veil
        """What its code and its callers may see of personal data."""
        self.tools = tools
        """Where its code calls tools; None where there are none."""
        if tools is not None:
            tools.attach(guard=guard, veil=veil, keep=self.write_file)
        self.turn = asyncio.Lock()
        snapshots = Snapshots(folders.workspace, folders.snapshots, limit_bytes=settings.checkpoint_disk_mb * MEBIBYTE)
        self.life = Life(
            folders,
            start_kernel=start_kernel,
            quota=self.quota,
            checkpoints=Checkpoints(snapshots, most=settings.checkpoints, memory_mb=settings.checkpoint_memory_mb),
            is_busy=lambda: self.is_busy,
            on_growth=self._on_growth,
            does_rewind=settings.on_death == "rewind",
            custody=custody,
        )
        self._executions: dict[str, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tasks_aside: set[asyncio.Task[Any]] = set()
        self._timeline: list[str] = []
        """The last executions that were not taken back, in order."""
        self.watchers: set[Watcher] = set()
        """People who share it. It is in use as long as there are any."""
        self._authors: list[str] = []
        self._is_closed = False
        self._count = 0
        self._created_at = time.time()
        self._used_at = time.time()
        self._used_ticks = time.monotonic()
        """The same by the clock that nobody sets: what expires does so by this one."""
        self._is_noticed = False

    # Cells

    def submit(self, cell: Cell, key: str = "") -> Execution:
        """Queue a cell; it runs when its turn comes, whoever waits for it."""
        self.admission.check_queue()
        self.journal.check_room()
        if len(self._tasks) >= self.settings.max_queue:
            raise Busy(
                f"session {self.id} has {len(self._tasks)} executions waiting, the most that max_queue allows",
                hint="Wait for some of them with get_execution, or interrupt them with interrupt_execution",
            )
        self._count += 1
        execution = Execution(secrets.token_hex(16), self, cell, self._count)
        self.journal.begin(Record(execution.id, self.id, self.principal, cell.code, None), time.time(), key)
        self._run(execution)
        return execution

    def _run(self, execution: Execution) -> None:
        self._remember_execution(execution)
        task = asyncio.get_running_loop().create_task(execution.run(), name=f"execution {execution.id}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_done, execution))

    def _remember_execution(self, execution: Execution) -> None:
        self._executions[execution.id] = execution
        if len(self._executions) > KEPT_EXECUTIONS:
            oldest = next((key for key, kept in self._executions.items() if kept.is_finished), None)
            if oldest is not None:
                del self._executions[oldest]

    def _on_done(self, execution: Execution, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.touch()
        self._tell(execution)
        if not self._tasks and self.life.checkpoints.are_kept and not self._is_closed:
            # While nobody waits, so that the next cell need not.
            self._run_aside(self._keep_when_idle())

    def _run_aside(self, work: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks_aside.add(task)
        task.add_done_callback(self._tasks_aside.discard)
        return task

    async def _keep_when_idle(self) -> None:
        await asyncio.sleep(max(IDLE_S, self.life.checkpoints.wait_s))
        if not self.is_busy and not self.turn.locked():
            async with self.turn:
                await self.life.keep()

    def begin(self, execution: Execution) -> None:
        """Its turn has come. One that waits is not part of what can be taken back: it will run all the same."""
        self._timeline.append(execution.id)
        del self._timeline[:-TAKEN_BACK_MOST]
        self.life.checkpoints.begin(execution.id, execution.number)
        self._tell(execution)
        if execution.number == 1:
            self.note()  # that it may have variables, for the next server if this one is killed

    def note(self) -> None:
        """Put on record how many executions there were and what they left, with whatever is committed next."""
        self._roll.note(self.id, self._count, self.life.variables)

    def _tell(self, execution: Execution | None) -> None:
        for watcher in [*self.watchers]:
            watcher(execution)

    def take_authors(self, author: str) -> list[str]:
        """Who else ran cells since the owner's last one, a name a cell, if this is the owner's; told once."""
        if author:
            self._authors.append(author)
            del self._authors[:-TAKEN_BACK_MOST]
            return []
        authors, self._authors = self._authors, []
        return authors

    def screens(self) -> Screens:
        """What the output of a new execution passes through."""
        veil: list[Screen] = [VeilScreen(self.veil)] if self.veil.covers_outputs else []
        return Screens([*veil, *self.guard.screens()])

    def cancel_calls(self) -> None:
        """The cell that runs is being stopped, and what it waits for with it."""
        if self.tools is not None:
            self.tools.cancel()

    def execution(self, execution_id: str) -> Execution | None:
        """An execution that is running or ended lately; older ones are in the journal."""
        return self._executions.get(execution_id)

    def latest(self) -> Execution | None:
        """The execution that was submitted last, if any is remembered."""
        return next(reversed(self._executions.values()), None)

    def running(self) -> list[Execution]:
        """Executions that run or wait for their turn, in order."""
        return [execution for execution in self._executions.values() if not execution.is_finished]

    def _on_growth(self) -> None:
        """The folder is over its limit and grows: stop the cell, or what a cell left running."""
        running = next((execution for execution in self.running() if execution.has_started), None)
        if running is not None:
            running.stop_for_disk(at_once=self.quota.is_far_over)
            return
        full = Incident("disk_full", f"folder {self.quota.detail}, and grew between two cells")
        self._run_aside(self.life.kill_idle(full))

    async def write_file(self, name: str, data: bytes) -> None:
        """Put a file into the folder, if there is room."""
        self.workspace.check_name(name)
        await self.quota.check_room(len(data))
        await asyncio.to_thread(self.workspace.write, name, data)

    # Other states of it

    def check_idle(self) -> None:
        """Refuse what cannot be done while a cell runs."""
        if running := self.running():
            raise Busy(
                f"session {self.id} has {len(running)} unfinished execution{'s' if len(running) > 1 else ''}",
                hint="Wait for it with get_execution, or stop it with interrupt_execution",
            )

    async def rewind(self, to: str | int) -> Rewinding:
        """Back to before an execution: by its id, or the number of executions to take back."""
        self.check_idle()
        # Whoever stops waiting must not leave it half-way, with the files of one state and the variables of another.
        # What is meant is told now, when nothing runs: by its turn there may be cells after it.
        rewinding = self._run_aside(self._rewind(self._target(to)))
        try:
            return await asyncio.shield(rewinding)
        except asyncio.CancelledError:
            rewinding.add_done_callback(_drop_outcome)
            if rewinding.cancelled():
                raise KernelDied(f"session {self.id} ended while it was rewound") from None
            raise

    async def _rewind(self, target: str) -> Rewinding:
        async with self.turn:
            lost = await self.life.rewind(self.life.checkpoints.find(target))
            if self.sharing is not None:
                self.sharing.forget()
            return Rewinding(session_id=self.id, to=target, undone=self.take_back(target), lost=lost)

    def take_back(self, since: str) -> list[str]:
        """The session is as it was before that execution: it and those after it are on record as undone."""
        if since not in self._timeline:
            return []
        place = self._timeline.index(since)
        undone, self._timeline = self._timeline[place:], self._timeline[:place]
        self.journal.undo(undone)
        return undone

    def _target(self, to: str | int) -> str:
        if to in self._timeline:  # looked up first: an id may consist of digits
            return str(to)
        if isinstance(to, int) or (to.isdecimal() and len(to) <= MOST_DIGITS):
            number = int(to)
            if not 0 < number <= len(self._timeline):
                raise NoCheckpoint(
                    f"session {self.id} has {len(self._timeline)} executions, {number} cannot be taken back",
                    hint="Pass 1 for the state before the last execution, or an execution_id",
                )
            return self._timeline[-number]
        raise NoCheckpoint(
            f"execution {to[:64]!r} is none of session {self.id}, or was taken back",
            hint="Pass an execution_id that this session answered with, or 1 for its last one",
        )

    # Sleep

    def resume(self, entry: Entry) -> None:
        """It was asleep on disk: what it was goes on, with the first kernel."""
        self._resume(entry)
        self.life.waking = Waking(self.folders, entry)
        self.veil.restore(self.folders.vault)

    def _resume(self, entry: Entry) -> None:
        self._created_at = entry.created_at
        self._count = entry.executions
        self._timeline = self.journal.timeline(self.id, TAKEN_BACK_MOST)
        self._is_noticed = True
        self.life.variables = entry.variables

    def take_over(self, entry: Entry, kernel: Kernel) -> None:
        """It lives on with the kernel that an earlier server left."""
        self._resume(entry)
        self.folders.state.unlink(missing_ok=True)
        self.life.checkpoints.refusal = "they ended with the server that kept them"
        self.life.adopt(kernel)

    def follow(self, record: Record, timeout_s: float, left_s: float) -> None:
        """Go on with an execution that its kernel was given by an earlier server; so much of its time is left."""
        execution = Execution(record.id, self, Cell(record.code, timeout_s), self._count)
        execution.resume(self.journal.events(record.id), left_s)
        self._run(execution)

    def catch_up(self) -> None:
        """Nothing ran when the earlier server ended: hear what was said since, before anything else is done."""
        self._run_aside(self._catch_up())

    async def _catch_up(self) -> None:
        async with self.turn:
            await self.life.catch_up()

    async def leave(self, end: str) -> StateReport | None:
        """Let the kernel live for the next server; what runs goes on. Idle, it is written to disk as well."""
        self._is_closed = True
        for task in [*self._tasks_aside]:
            task.cancel()
        report = None
        if not self.is_busy and self.settings.hibernate and self.life.kernel is not None:
            async with self.turn:
                report = await self._save(self.life.kernel)
            self._roll.put_to_sleep(self.id, end, [*map(in_words, report.lost)] if report else [])
        for execution in self.running():
            if execution.has_started:
                execution.abandon()
            else:
                execution.interrupt()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._tasks_aside, return_exceptions=True)
        await self.life.leave()
        return report

    async def put_to_sleep(self, end: str) -> StateReport | None:
        """Write the variables to disk and end the kernel. Returns what was kept; None: nothing was."""
        for execution in self.running():
            execution.interrupt()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        report = None
        async with self.turn:
            if self.life.waking is None and self.life.kernel is not None:
                report = await self._save(self.life.kernel)
        await self.aclose()
        await asyncio.to_thread(self.veil.save, self.folders.vault)
        self._roll.put_to_sleep(self.id, end, [*map(in_words, report.lost)] if report else [])
        return report

    async def _save(self, kernel: Kernel) -> StateReport | None:
        limit_mb = self.settings.disk_mb or self.settings.memory_mb or UNLIMITED_MB
        return await save(kernel, self.folders, limit_bytes=limit_mb * MEBIBYTE)

    # Life

    def is_blank(self) -> bool:
        """Whether nothing would be missed of it."""
        return self._count == 0 and self.life.waking is None and not self.workspace.list().entries

    @property
    def is_busy(self) -> bool:
        """Whether something runs or waits."""
        return bool(self._tasks)

    @property
    def state(self) -> Literal["running", "idle", "fresh"]:
        """What it does; `fresh` has no kernel yet."""
        return "running" if self.is_busy else "idle" if self.life.kernel else "fresh"

    @property
    def _left_s(self) -> float:
        """How long until it ends if nothing happens."""
        idle_s = 0.0 if self.is_busy or self.watchers else time.monotonic() - self._used_ticks
        return self.settings.session_idle_s - idle_s

    @property
    def is_expired(self) -> bool:
        """Whether nothing has used it for too long; what runs is never expired."""
        return not self.is_busy and self._left_s <= 0

    @property
    def expires_at(self) -> float:
        """When it ends if nothing happens."""
        return time.time() + self._left_s

    def touch(self) -> None:
        """It was used."""
        self._used_at = time.time()
        self._used_ticks = time.monotonic()

    async def aclose(self) -> None:
        """End the kernel and everything that runs; may be called twice. The folder stays."""
        self._is_closed = True
        self._tell(None)
        for task in [*self._tasks_aside]:
            task.cancel()
        for execution in self.running():
            execution.interrupt()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._tasks_aside, return_exceptions=True)
        await self.life.aclose()

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
        last = self.latest()
        return SessionInfo(
            session_id=self.id,
            environment=self.environment,
            kernel=self.life.kernel.name if self.life.kernel else "not started",
            sandbox=self.settings.sandbox,
            state=self.state,
            created_at=iso(self._created_at),
            last_used_at=iso(self._used_at),
            expires_at=iso(self.expires_at),
            age_s=round(time.time() - self._created_at, 1),
            memory_mb=round(self.life.kernel.memory_mb(), 1) if self.life.kernel else 0.0,
            executions=self._count,
            files=len(self.workspace.list().entries),
            checkpoints=self.life.checkpoints.count,
            reason=self.reason,
            last_status=last.result().status if last else None,
            last_cause=self.life.last_cause,
        )


def _drop_outcome(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more; a failure was told to whoever did."""
    if not task.cancelled():
        task.exception()


def iso(timestamp: float) -> str:
    """A time as callers read it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
