"""Checkpoints of a session: frozen forks of its kernel with snapshots of its folder, bounded in number and size.

A checkpoint is taken while the session is idle, at the latest before the next cell starts. Only where more than `BURST`
cells follow each other at once, there is just one every `MIN_INTERVAL_S`. Also owns the list of executions that can be
undone. Knows kernels and files; the session decides what a rewind means.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from belljar import metrics
from belljar.errors import BelljarError, NoCheckpoint
from belljar.files.snapshots import RestoreReport, Snapshots
from belljar.journal.journal import Journal
from belljar.kernels.base import ForkableKernel, Kernel, KernelCheckpoint
from belljar.provisioning.handover import Handover, RestoredCheckpoint

# The checkpoint before the first cell


class FreshCheckpoint:
    """The checkpoint of a session that has run nothing.

    It needs no process, because a kernel that was just started is the same. Takes the place of the process and of the
    kernel that was forked.
    """

    def __init__(self, start: Callable[[], Awaitable[Kernel]]) -> None:
        self.lost: list[str] = []
        self._start = start

    def is_alive(self) -> bool:
        """Return True, because there is no process that could end."""
        return True

    def memory_mb(self) -> float:
        """Return 0, because there is no process."""
        return 0.0

    async def restore(self, checkpoint: KernelCheckpoint) -> Kernel:
        """Start a new kernel; `checkpoint` is this object."""
        return await self._start()

    def forget(self, checkpoint: KernelCheckpoint) -> None:
        """Do nothing, because there is no process to end."""

    def shares_sandbox(self, other: object) -> bool:
        """Return False, because it has no sandbox."""
        return False


# A checkpoint takes several times as long as a short cell. Between a model's cells there is time for it, except where a
# model sends a few at once. More cells without a pause come from a program: with a checkpoint each it would be three to
# five times slower, and with ten a second one call in twenty would take four times as long as the others.
MIN_INTERVAL_S = 2.0
BURST = 10
# Measuring the memory of all checkpoints takes longer than making one. While cells run it is done at most this often,
# and in addition whenever the session is idle.
MEASURE_INTERVAL_S = 1.0
TOO_FAST = f"it came right after {BURST} others, and of cells that fast a state is kept every {MIN_INTERVAL_S:g} s"


@dataclass(slots=True)
class Checkpoint:
    """A state of a session, and the execution that started from it."""

    origin: ForkableKernel | FreshCheckpoint
    process: KernelCheckpoint
    """What holds the variables."""
    variables: tuple[str, ...]
    label: str
    files_problem: str
    """Why the files were not saved; empty when they were."""
    execution_id: str = ""
    number: int = 0
    """The number of that execution in its session."""
    order: int = field(default_factory=time.time_ns)
    """Orders checkpoints by the time they were taken."""

    @property
    def is_fresh(self) -> bool:
        """Return whether it is the state of a session that has run nothing."""
        return isinstance(self.process, FreshCheckpoint)

    async def restore(self) -> Kernel:
        """Return a kernel that continues from this state; the process stays for further restores."""
        return await self.origin.restore(self.process)


class CheckpointDeposits:
    """Deposits the checkpoints of one session for the next server, where anything outlives this one."""

    def __init__(self, session_id: str, handover: Handover) -> None:
        self._session_id = session_id
        self._handover = handover

    def on_change(self, checkpoint: Checkpoint) -> None:
        """Deposit a checkpoint, so that it outlives the server."""
        if not self._handover.is_on:
            return
        description = {
            "label": checkpoint.label,
            "variables": checkpoint.variables,
            "files_gap": checkpoint.files_problem,
            "execution_id": checkpoint.execution_id,
            "number": checkpoint.number,
            "order": checkpoint.order,
        }
        self._handover.deposit_checkpoint(
            self._session_id, checkpoint.label, checkpoint.origin, checkpoint.process, description
        )

    def on_drop(self, checkpoint: Checkpoint) -> None:
        """Withdraw the deposit of a checkpoint that was dropped."""
        if self._handover.is_on:
            self._handover.withdraw_checkpoint(self._session_id, checkpoint.label)


def restored_checkpoints(
    deposits: Sequence[RestoredCheckpoint], kernel: ForkableKernel, make_fresh: Callable[[], FreshCheckpoint]
) -> list[Checkpoint]:
    """Return the checkpoints that an earlier server deposited for the session of this kernel."""
    checkpoints: list[Checkpoint] = []
    for restored in deposits:
        description = restored.description
        if restored.process is None:  # it has no process, because it is that of a fresh kernel
            origin = process = make_fresh()
        else:
            origin, process = kernel, restored.process
        checkpoints.append(
            Checkpoint(
                origin,
                process,
                tuple(description["variables"]),
                description["label"],
                description["files_gap"],
                description["execution_id"],
                description["number"],
                description["order"],
            )
        )
    return checkpoints


class Checkpoints:
    """The checkpoints of one session, oldest first."""

    def __init__(self, snapshots: Snapshots, deposits: CheckpointDeposits, *, most: int, memory_mb: int) -> None:
        self.is_due = True
        """Whether a cell has run since the last checkpoint was taken."""
        self.refusal = ""
        """Why the latest checkpoint could not be taken."""
        self._snapshots = snapshots
        self._most = most
        self._memory_mb = memory_mb
        self._checkpoints: list[Checkpoint] = []
        self.deposits = deposits
        self._lost: dict[str, str] = {}
        """Executions whose checkpoints were lost, and how."""
        self._unkept: dict[str, str] = {}
        """The latest executions from before which no state was kept, and why."""
        self._allowed = float(BURST)
        """How many checkpoints cells may wait for, as of `_allowed_at`."""
        self._allowed_at = self._measured_at = time.monotonic()
        self._measurement: asyncio.Future[dict[str, float]] | None = None
        """The memory that checkpoints use, in MB by label, while it is measured and until it was applied."""
        self._missed = ""
        """Why there is no state from before the next execution; empty where there is one."""

    def __bool__(self) -> bool:
        return bool(self._checkpoints)

    @property
    def count(self) -> int:
        """Return how many checkpoints a caller can go back to."""
        return sum(bool(one.execution_id) for one in self._checkpoints)

    def _spend_allowance(self) -> bool:
        """Spend one of the checkpoints that a cell may wait for; False when there is none left."""
        now = time.monotonic()
        earned = (now - self._allowed_at) / MIN_INTERVAL_S if MIN_INTERVAL_S > 0 else BURST
        self._allowed, self._allowed_at = min(BURST, self._allowed + earned), now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True

    @property
    def is_enabled(self) -> bool:
        """Return whether the settings allow any checkpoints."""
        return self._most > 0

    async def take(
        self,
        kernel: ForkableKernel,
        variables: tuple[str, ...],
        fresh: FreshCheckpoint | None = None,
        *,
        is_idle: bool = False,
    ) -> None:
        """Take a checkpoint, if a cell has run since the last one and no cell has to wait for too many of them.

        With `fresh`, the state before the first cell, the kernel is not forked. With `is_idle` no cell waits for it.
        """
        if not self._most or not self.is_due:
            return
        if not is_idle and not self._spend_allowance():
            self.refusal, self._missed = f"more than {BURST} cells came without a pause", TOO_FAST
            return
        self.is_due = False
        label = secrets.token_hex(8)
        # Copy the files and fork the kernel at once: only what cells left in the background runs meanwhile.
        snapshot = asyncio.get_running_loop().run_in_executor(None, self._snapshots.take, label)
        try:
            process = fresh or await kernel.fork_checkpoint()
        except (BelljarError, TimeoutError) as error:
            self.refusal = self._missed = str(error)
            await snapshot
            await asyncio.to_thread(self._snapshots.drop, label)
            return
        report = await snapshot
        self.refusal = self._missed = ""
        self._checkpoints.append(
            Checkpoint(fresh or kernel, process, variables, label, "" if report.is_complete else report.reason)
        )
        metrics.checkpoints.add()
        self.deposits.on_change(self._checkpoints[-1])
        await self._apply_limits(kernel)

    async def _apply_limits(self, current: ForkableKernel) -> None:
        for checkpoint in [one for one in self._checkpoints if not one.process.is_alive()]:
            await self._drop(checkpoint, current)
        while len(self._checkpoints) > self._most:
            await self._drop(self._checkpoints[0], current)
        # A cell may be waiting, and measuring takes some ms for each checkpoint: apply what was measured since the last
        # checkpoint, and measure while the cell runs.
        if self._measurement is not None and self._measurement.done():
            await self._limit_memory(self._measurement.result(), current)
            self._measurement = None
        if self._measurement is None and time.monotonic() - self._measured_at > MEASURE_INTERVAL_S:
            self._measurement = self._measure()

    async def limit_memory(self, current: ForkableKernel) -> None:
        """Drop the oldest checkpoints until the others use no more memory than allowed. Called while no cell waits."""
        if self._checkpoints:
            await self._limit_memory(await self._measure(), current)

    def _measure(self) -> "asyncio.Future[dict[str, float]]":
        self._measured_at = time.monotonic()
        measured = [*self._checkpoints]
        return asyncio.get_running_loop().run_in_executor(
            None, lambda: {one.label: one.process.memory_mb() for one in measured}
        )

    async def _limit_memory(self, sizes: Mapping[str, float], current: ForkableKernel) -> None:
        def used() -> float:
            return sum(sizes.get(one.label, 0.0) for one in self._checkpoints)

        while len(self._checkpoints) > 1 and used() > self._memory_mb:
            await self._drop(self._checkpoints[0], current)

    def on_execution(self, execution_id: str, number: int) -> None:
        """Note that an execution starts from the latest checkpoint, if nothing ran since that was taken."""
        if self._missed:
            self._unkept[execution_id] = self._missed
            if len(self._unkept) > MAX_REMEMBERED:
                del self._unkept[next(iter(self._unkept))]
        if self._checkpoints and not self._checkpoints[-1].execution_id and not self.is_due:
            self._checkpoints[-1].execution_id = execution_id
            self._checkpoints[-1].number = number
            self.deposits.on_change(self._checkpoints[-1])

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be restored; None if there is none."""
        return next((one for one in reversed(self._checkpoints) if one.process.is_alive()), None)

    def find(self, execution_id: str, undoable: Sequence[str]) -> Checkpoint:
        """Return the checkpoint before an execution, or raise `NoCheckpoint`.

        `undoable` are the executions that can be undone, oldest first.
        """
        found = next((one for one in self._checkpoints if one.execution_id == execution_id), None)
        if found is not None and found.process.is_alive():
            return found
        hint = self.hint(undoable, execution_id)
        if found is None and execution_id in self._lost:
            raise NoCheckpoint(
                f"the state from before execution {execution_id[:64]!r} was lost: {self._lost[execution_id]}",
                hint=f"Go on from the session as it is. {hint}",
            )
        reason = self._unkept.get(execution_id)
        why = f": {reason}" if reason else ""
        raise NoCheckpoint(f"no state was kept from before execution {execution_id[:64]!r}{why}", hint=hint)

    def hint(self, undoable: Sequence[str], wanted: str = "") -> str:
        """Return which states there are to go back to, the one nearest to the `wanted` execution first."""
        if not self._most:
            return "The server keeps none, because its setting checkpoints is 0"
        kept = {one.execution_id for one in self._checkpoints if one.process.is_alive()}
        places = [one for one in undoable if one in kept]
        if not places:
            return f"None could be kept: {self.refusal}" if self.refusal else "None is kept yet"
        known = f"States are kept from before: {', '.join(places)}"
        at = undoable.index(wanted) if wanted in undoable else 0
        nearest = next((place for place in reversed(range(at)) if undoable[place] in kept), None)
        if nearest is None:
            return known
        count = at - nearest
        others = "the one before it" if count == 1 else f"the {count} before it"
        return f'"{undoable[nearest]}" undoes it with {others}. {known}'

    def holds(self, execution_id: str) -> bool:
        """Return whether the variables from before an execution can be restored."""
        return any(
            one.execution_id == execution_id and one.variables and one.process.is_alive() for one in self._checkpoints
        )

    @property
    def targets(self) -> list[str]:
        """Return the executions whose state before them can be restored, oldest first."""
        # As `holds` says, but each is looked at once.
        return [
            one.execution_id
            for one in self._checkpoints
            if one.execution_id and one.variables and one.process.is_alive()
        ]

    def has_any_in_sandbox_of(self, kernel: ForkableKernel) -> bool:
        """Return whether a checkpoint that can still be restored is in this kernel's sandbox."""
        return any(one.process.is_alive() and one.origin.shares_sandbox(kernel) for one in self._checkpoints)

    async def restore_files(self, checkpoint: Checkpoint) -> list[str]:
        """Restore the folder to a checkpoint; return what could not be restored."""
        if checkpoint.files_problem:
            return [f"files: {checkpoint.files_problem}"]
        try:
            report = await asyncio.to_thread(self._snapshots.restore, checkpoint.label)
        except BelljarError as error:
            return [f"files: {error.message}"]
        return _lost_files(report)

    @asynccontextmanager
    async def files_of(self, checkpoint: Checkpoint) -> AsyncGenerator[None]:
        """Restore the folder to a checkpoint for the block, and undo that if the block fails.

        Where the present files cannot be saved for that, the folder is left as it is.
        """
        label = secrets.token_hex(8)
        report = await asyncio.to_thread(self._snapshots.take, label)
        try:
            if report.is_complete:
                await self.restore_files(checkpoint)
            yield
        except BaseException:
            if report.is_complete:
                await asyncio.to_thread(self._snapshots.restore, label)
            raise
        finally:
            await asyncio.to_thread(self._snapshots.drop, label)

    async def export_files(self, checkpoint: Checkpoint, target: Path) -> list[str]:
        """Write the files of a checkpoint into another folder; return what could not be written."""
        if checkpoint.files_problem:
            return [f"files: {checkpoint.files_problem}"]
        report = await asyncio.to_thread(self._snapshots.export, checkpoint.label, target)
        return _lost_files(report)

    async def drop_after(self, checkpoint: Checkpoint) -> None:
        """Drop the checkpoints after this one, to which the session was rewound, and clear its execution."""
        index = self._checkpoints.index(checkpoint)
        for later in self._checkpoints[index + 1 :]:
            await self._drop(later, checkpoint.origin)
        checkpoint.execution_id, checkpoint.number = "", 0
        self.deposits.on_change(checkpoint)
        self.is_due = False

    async def _drop(self, checkpoint: Checkpoint, current: ForkableKernel | FreshCheckpoint | None = None) -> None:
        """Drop a checkpoint; if its kernel is gone and it was the last in that kernel's sandbox, close the sandbox."""
        self._checkpoints.remove(checkpoint)
        self.deposits.on_drop(checkpoint)
        checkpoint.origin.forget(checkpoint.process)
        others = [*([current] if current is not None else []), *(one.origin for one in self._checkpoints)]
        origin = checkpoint.origin
        if not isinstance(origin, FreshCheckpoint) and not any(other.shares_sandbox(origin) for other in others):
            await origin.aclose()
        with contextlib.suppress(BelljarError):
            await asyncio.to_thread(self._snapshots.drop, checkpoint.label)

    def mark_lost(self, execution_ids: Iterable[str], why: str) -> None:
        """Note that the checkpoints before these executions, as far as there were any, are lost, and why."""
        self._lost |= dict.fromkeys(execution_ids, why)

    async def inherit(self, checkpoints: list[Checkpoint], store: Path) -> None:
        """Continue with the checkpoints of an earlier server, and with their files in its `store`."""
        labels = [checkpoint.label for checkpoint in checkpoints if not checkpoint.files_problem]
        complete = await asyncio.to_thread(self._snapshots.inherit, store, labels)
        for checkpoint in checkpoints:
            if not checkpoint.files_problem and checkpoint.label not in complete:
                checkpoint.files_problem = "they were lost with an earlier server"
            self._lost.pop(checkpoint.execution_id, None)
            self.deposits.on_change(checkpoint)  # another version of belljar may have deposited it
        self._checkpoints = sorted(checkpoints, key=lambda checkpoint: checkpoint.order)
        # The last one is the present state of the session if no execution started from it.
        self.is_due = not self._checkpoints or bool(self._checkpoints[-1].execution_id)

    async def detach(self, current: ForkableKernel) -> None:
        """Leave fresh checkpoints, and those in the current kernel's sandbox, to the next server; drop the others."""
        for checkpoint in [*self._checkpoints]:
            if checkpoint.is_fresh or checkpoint.origin.shares_sandbox(current):
                checkpoint.origin.forget(checkpoint.process)
            else:
                await self._drop(checkpoint, current)
        self._checkpoints = []

    async def aclose(self) -> None:
        """Drop all checkpoints, and close the sandboxes that were kept only for them."""
        for checkpoint in [*self._checkpoints]:
            await self._drop(checkpoint)


def _lost_files(report: RestoreReport) -> list[str]:
    """Return the files that could not be restored, those of one reason together: a full disk concerns all of them."""
    names: dict[str, list[str]] = {}
    for omission in report.skipped:
        names.setdefault(omission.reason, []).append(omission.name)
    return [f"{'file' if len(some) == 1 else 'files'} {', '.join(some)}: {why}" for why, some in names.items()]


# The executions that can be undone, in order

MAX_REMEMBERED = 1_000
# The longest number of executions that is parsed as one; anything longer is an id, or an abuse.
MAX_DIGITS = 9


class UndoHistory:
    """The last executions of one session that were not undone."""

    def __init__(self, session_id: str, journal: Journal) -> None:
        self._session_id = session_id
        self._journal = journal
        self._ids: list[str] = []

    def restore(self) -> None:
        """Read what an earlier server left from the journal."""
        self._ids = self._journal.not_undone(self._session_id, MAX_REMEMBERED)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of the executions, oldest first."""
        return tuple(self._ids)

    def add(self, execution_id: str) -> None:
        """Add an execution whose turn has come. One that waits cannot be undone, because it will run all the same."""
        self._ids.append(execution_id)
        del self._ids[:-MAX_REMEMBERED]

    def undo_since(self, since: str) -> list[str]:
        """Record an execution and those after it as undone, and return their ids."""
        if since not in self._ids:
            return []
        index = self._ids.index(since)
        undone, self._ids = self._ids[index:], self._ids[:index]
        self._journal.undo(undone)
        return undone

    def target(self, to: str | int, hint: str) -> str:
        """Return the id of the execution that a caller means by its id, or by the number of executions to undo.

        `hint` says which there are, for a caller who means none of them.
        """
        if to in self._ids:  # looked up first, because an id may consist of digits
            return str(to)
        if isinstance(to, int) or (to.isdecimal() and len(to) <= MAX_DIGITS):
            number = int(to)
            if not 0 < number <= len(self._ids):
                raise NoCheckpoint(
                    f"session {self._session_id} has {len(self._ids)} executions, {number} cannot be taken back",
                    hint=hint,
                )
            return self._ids[-number]
        raise NoCheckpoint(
            f"execution {to[:64]!r} is none of session {self._session_id}, or was taken back",
            hint=hint,
        )
