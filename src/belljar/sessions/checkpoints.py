"""Earlier states of a session: sleeping copies of its kernel and what its folder held, bounded in number and size.

A state is kept between two cells, at the latest before the next one begins, however fast they follow each other; only
where more than `BURST` do so, a state every `SHORTEST_S` has to do. Knows kernels and files; what a rewind means to a
caller is the session's.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from belljar import measures
from belljar.errors import BelljarError, NoCheckpoint
from belljar.files.snapshots import Snapshots
from belljar.journal.journal import Journal
from belljar.kernels.base import ForkableKernel, Kernel, KernelSnapshot
from belljar.provisioning.handover import Handover, RestoredCopy

# The state of a session before its first cell, which need not be copied: a kernel that was just started is like it.


class FreshCheckpoint:
    """Stands for a copy, and for the kernel that it would sleep beside."""

    def __init__(self, start: Callable[[], Awaitable[Kernel]]) -> None:
        self.lost: list[str] = []
        self._start = start

    def is_alive(self) -> bool:
        """Always: there is nothing that could end."""
        return True

    def memory_mb(self) -> float:
        """Nothing."""
        return 0.0

    async def restore(self, copy: KernelSnapshot) -> Kernel:
        """Start a kernel; the copy is this."""
        return await self._start()

    def forget(self, copy: KernelSnapshot) -> None:
        """Nothing is kept."""

    def shares_sandbox(self, other: object) -> bool:
        """It has none."""
        return False


# A state takes several times as long to keep as a short cell to run. A model's cells follow each other a few at a time;
# more of them, and faster than this, are a program's, which would be three to five times slower for it.
SHORTEST_S = 0.1
BURST = 10
# To weigh the states takes longer than to make one: on demand it is done this often, and whenever the session is idle.
WEIGH_S = 1.0
TOO_FAST = (
    f"This cell cannot be undone alone: it came right after {BURST} others, and of cells that fast a state is kept "
    f"every {SHORTEST_S:g} s"
)


@dataclass(slots=True)
class Checkpoint:
    """A state, and the execution that began from it."""

    origin: ForkableKernel | FreshCheckpoint
    copy: KernelSnapshot
    variables: tuple[str, ...]
    label: str
    files_gap: str
    """Why the files were not kept; empty when they were."""
    execution_id: str = ""
    number: int = 0
    """Which execution of its session that was."""
    order: int = field(default_factory=time.time_ns)
    """Earlier ones have a lower one."""

    @property
    def is_beginning(self) -> bool:
        """Whether it is a session that has run nothing."""
        return isinstance(self.copy, FreshCheckpoint)

    async def restore(self) -> Kernel:
        """A kernel that goes on from here; the copy sleeps on."""
        return await self.origin.restore(self.copy)


class CheckpointWatcher(Protocol):
    """Who wants to know of every state, to have it outlive the server."""

    def kept(self, checkpoint: Checkpoint) -> None:
        """It is new, or there is something new of it."""
        ...

    def dropped(self, checkpoint: Checkpoint) -> None:
        """It is over."""
        ...


class Checkpoints:
    """Those of one session, oldest first."""

    def __init__(self, snapshots: Snapshots, watcher: CheckpointWatcher, *, most: int, memory_mb: int) -> None:
        self.is_due = True
        """Whether a cell has run since the last one was taken."""
        self.refusal = ""
        """Why the latest could not be taken."""
        self._snapshots = snapshots
        self._most = most
        self._memory_mb = memory_mb
        self._kept: list[Checkpoint] = []
        self.watcher = watcher
        self._lost: dict[str, str] = {}
        """Executions whose states were lost, and how."""
        self._allowed = float(BURST)
        """How many may be taken right now, as of then."""
        self._allowed_at = self._weighed_at = time.monotonic()
        self._is_too_fast = False

    def __bool__(self) -> bool:
        return bool(self._kept)

    @property
    def count(self) -> int:
        """How many a caller can go back to."""
        return sum(bool(kept.execution_id) for kept in self._kept)

    @property
    def wait_s(self) -> float:
        """How long until the next may be taken."""
        now = time.monotonic()
        earned = (now - self._allowed_at) / SHORTEST_S if SHORTEST_S > 0 else BURST
        self._allowed, self._allowed_at = min(BURST, self._allowed + earned), now
        return (1 - self._allowed) * SHORTEST_S

    @property
    def gap(self) -> str:
        """What there is to say at a cell that has no state before it because there were too many so quickly."""
        return TOO_FAST if self._is_too_fast else ""

    @property
    def are_kept(self) -> bool:
        """Whether there are to be any."""
        return self._most > 0

    async def take(
        self, kernel: ForkableKernel, variables: tuple[str, ...], beginning: FreshCheckpoint | None = None
    ) -> None:
        """Keep the state as it is, if it is new and the last one is not too recent; a beginning is its own copy."""
        self._is_too_fast = self._most > 0 and self.is_due and self.wait_s > 0
        if not self._most or not self.is_due or self._is_too_fast:
            return
        self.is_due = False
        self._allowed -= 1
        label = secrets.token_hex(8)
        # Both at once: nothing of the session's runs meanwhile but what it left in the background.
        snapshot = asyncio.get_running_loop().run_in_executor(None, self._snapshots.take, label)
        try:
            copy = beginning or await kernel.snapshot()
        except (BelljarError, TimeoutError) as error:
            self.refusal = str(error)
            await snapshot
            await asyncio.to_thread(self._snapshots.drop, label)
            return
        report = await snapshot
        self.refusal = ""
        self._kept.append(
            Checkpoint(beginning or kernel, copy, variables, label, "" if report.is_complete else report.reason)
        )
        measures.checkpoints.add()
        self.watcher.kept(self._kept[-1])
        await self._stay_within_bounds(kernel)

    async def _stay_within_bounds(self, current: ForkableKernel) -> None:
        for checkpoint in [kept for kept in self._kept if not kept.copy.is_alive()]:
            await self._drop(checkpoint, current)
        while len(self._kept) > self._most:
            await self._drop(self._kept[0], current)
        if time.monotonic() - self._weighed_at > WEIGH_S:
            await self.weigh(current)

    async def weigh(self, current: ForkableKernel) -> None:
        """Drop the oldest ones until the others hold no more memory than they may."""
        self._weighed_at = time.monotonic()
        if not self._kept:
            return
        sizes = await asyncio.to_thread(lambda: [kept.copy.memory_mb() for kept in self._kept])
        while len(self._kept) > 1 and sum(sizes[-len(self._kept) :]) > self._memory_mb:
            await self._drop(self._kept[0], current)

    def on_execution(self, execution_id: str, number: int) -> None:
        """An execution begins; the latest state is the one before it, if nothing ran since."""
        if self._kept and not self._kept[-1].execution_id and not self.is_due:
            self._kept[-1].execution_id = execution_id
            self._kept[-1].number = number
            self.watcher.kept(self._kept[-1])

    def latest(self) -> Checkpoint | None:
        """The newest that can be woken."""
        return next((kept for kept in reversed(self._kept) if kept.copy.is_alive()), None)

    def find(self, execution_id: str) -> Checkpoint:
        """The state before an execution."""
        found = next((kept for kept in self._kept if kept.execution_id == execution_id), None)
        if found is None and execution_id in self._lost:
            raise NoCheckpoint(
                f"the state from before execution {execution_id[:64]!r} was lost: {self._lost[execution_id]}",
                hint=f"Go on from the session as it is. {self._what_there_is()}",
            )
        if found is None or not found.copy.is_alive():
            raise NoCheckpoint(
                f"no state was kept from before execution {execution_id[:64]!r}", hint=self._what_there_is()
            )
        return found

    def _what_there_is(self) -> str:
        if not self._most:
            return "The server keeps none, because its setting checkpoints is 0"
        known = ", ".join(kept.execution_id for kept in self._kept if kept.execution_id)
        if not known:
            return f"None could be kept: {self.refusal}" if self.refusal else "None is kept yet"
        latest = f". The latest could not be kept: {self.refusal}" if self.refusal else ""
        return f"States are kept from before: {known}{latest}"

    def holds(self, execution_id: str) -> bool:
        """Whether the variables there were before an execution can be had back."""
        return any(kept.execution_id == execution_id and kept.variables and kept.copy.is_alive() for kept in self._kept)

    def are_of(self, kernel: ForkableKernel) -> bool:
        """Whether a state sleeps in this kernel's sandbox, and can still be woken."""
        return any(kept.copy.is_alive() and kept.origin.shares_sandbox(kernel) for kept in self._kept)

    async def restore_files(self, checkpoint: Checkpoint) -> list[str]:
        """Put the folder back as it was; what could not be is named."""
        if checkpoint.files_gap:
            return [f"files: {checkpoint.files_gap}"]
        try:
            report = await asyncio.to_thread(self._snapshots.restore, checkpoint.label)
        except BelljarError as error:
            return [f"files: {error.message}"]
        return [f"file {omission.name}: {omission.reason}" for omission in report.skipped]

    @asynccontextmanager
    async def files_of(self, checkpoint: Checkpoint) -> AsyncGenerator[None]:
        """Have the folder be as it was then; should the block fail, it is again as it is now.

        Where the files of now cannot be kept for that, the folder is left alone.
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
        """Make another folder hold what this one did; what could not be is named."""
        if checkpoint.files_gap:
            return [f"files: {checkpoint.files_gap}"]
        report = await asyncio.to_thread(self._snapshots.export, checkpoint.label, target)
        return [f"file {omission.name}: {omission.reason}" for omission in report.skipped]

    async def drop_after(self, checkpoint: Checkpoint) -> None:
        """Later states are of a past that did not happen; this one is fresh again."""
        place = self._kept.index(checkpoint)
        for later in self._kept[place + 1 :]:
            await self._drop(later, checkpoint.origin)
        checkpoint.execution_id, checkpoint.number = "", 0
        self.watcher.kept(checkpoint)
        self.is_due = False

    async def _drop(self, checkpoint: Checkpoint, current: ForkableKernel | FreshCheckpoint | None = None) -> None:
        """Forget one, and close the sandbox of a kernel that is gone with the last state that slept in it."""
        self._kept.remove(checkpoint)
        self.watcher.dropped(checkpoint)
        checkpoint.origin.forget(checkpoint.copy)
        others = [*([current] if current is not None else []), *(kept.origin for kept in self._kept)]
        origin = checkpoint.origin
        if not isinstance(origin, FreshCheckpoint) and not any(other.shares_sandbox(origin) for other in others):
            await origin.aclose()
        with contextlib.suppress(BelljarError):
            await asyncio.to_thread(self._snapshots.drop, checkpoint.label)

    def lose(self, execution_ids: Iterable[str], why: str) -> None:
        """The states from before these executions are gone, as far as there were any."""
        self._lost |= dict.fromkeys(execution_ids, why)

    async def inherit(self, states: list[Checkpoint], store: Path) -> None:
        """Go on with the states that an earlier server kept, and with the files of them in its store."""
        labels = [state.label for state in states if not state.files_gap]
        whole = await asyncio.to_thread(self._snapshots.inherit, store, labels)
        for state in states:
            if not state.files_gap and state.label not in whole:
                state.files_gap = "they were lost with an earlier server"
            self._lost.pop(state.execution_id, None)
        self._kept = sorted(states, key=lambda state: state.order)
        # One that no execution began from is the state that the session is in.
        self.is_due = not self._kept or bool(self._kept[-1].execution_id)

    async def detach(self, current: ForkableKernel) -> None:
        """Leave those to the next server that sleep beside the current kernel, or need no process; end the others."""
        for checkpoint in [*self._kept]:
            if checkpoint.is_beginning or checkpoint.origin.shares_sandbox(current):
                checkpoint.origin.forget(checkpoint.copy)
            else:
                await self._drop(checkpoint, current)
        self._kept = []

    async def aclose(self) -> None:
        """Forget all of them, and close the sandboxes that were kept for them alone."""
        for checkpoint in [*self._kept]:
            await self._drop(checkpoint)


# The executions a session is made of, in order: what can be taken back, and what a caller means by "the last two".

MOST_REMEMBERED = 1_000
# Of a number of executions; more would be an id, or meant to be a nuisance.
MOST_DIGITS = 9


class Timeline:
    """The last executions of one session that were not taken back."""

    def __init__(self, session_id: str, journal: Journal) -> None:
        self._session_id = session_id
        self._journal = journal
        self._ids: list[str] = []

    def restore(self) -> None:
        """As an earlier server left it."""
        self._ids = self._journal.timeline(self._session_id, MOST_REMEMBERED)

    @property
    def ids(self) -> tuple[str, ...]:
        """All of them, oldest first."""
        return tuple(self._ids)

    def add(self, execution_id: str) -> None:
        """Its turn has come. One that waits is not part of what can be taken back: it will run all the same."""
        self._ids.append(execution_id)
        del self._ids[:-MOST_REMEMBERED]

    def take_back(self, since: str) -> list[str]:
        """Put an execution and those after it on record as undone; returns them."""
        if since not in self._ids:
            return []
        place = self._ids.index(since)
        undone, self._ids = self._ids[place:], self._ids[:place]
        self._journal.undo(undone)
        return undone

    def target(self, to: str | int) -> str:
        """The execution that a caller means: by its id, or by the number of executions to take back."""
        if to in self._ids:  # looked up first: an id may consist of digits
            return str(to)
        if isinstance(to, int) or (to.isdecimal() and len(to) <= MOST_DIGITS):
            number = int(to)
            if not 0 < number <= len(self._ids):
                raise NoCheckpoint(
                    f"session {self._session_id} has {len(self._ids)} executions, {number} cannot be taken back",
                    hint="Pass 1 for the state before the last execution, or an execution_id",
                )
            return self._ids[-number]
        raise NoCheckpoint(
            f"execution {to[:64]!r} is none of session {self._session_id}, or was taken back",
            hint="Pass an execution_id that this session answered with, or 1 for its last one",
        )


# Earlier states of a session that outlive its server: told to whoever keeps their processes, and made whole again.


class KeptCheckpoints:
    """Those of one session. See `belljar.sessions.checkpoints.CheckpointWatcher`."""

    def __init__(self, session_id: str, handover: Handover) -> None:
        self._session_id = session_id
        self._handover = handover

    def kept(self, checkpoint: Checkpoint) -> None:
        """Have it outlive the server."""
        words = {
            "label": checkpoint.label,
            "variables": checkpoint.variables,
            "files_gap": checkpoint.files_gap,
            "execution_id": checkpoint.execution_id,
            "number": checkpoint.number,
            "order": checkpoint.order,
        }
        self._handover.deposit_copy(self._session_id, checkpoint.label, checkpoint.origin, checkpoint.copy, words)

    def dropped(self, checkpoint: Checkpoint) -> None:
        """It is over."""
        self._handover.withdraw_copy(self._session_id, checkpoint.label)


def states_of(
    copies: Sequence[RestoredCopy], kernel: ForkableKernel, begin: Callable[[], FreshCheckpoint]
) -> list[Checkpoint]:
    """The states that an earlier server kept of a session with this kernel."""
    states: list[Checkpoint] = []
    for restored in copies:
        words, copy = restored.words, restored.copy
        beginning = begin() if copy is None else None
        states.append(
            Checkpoint(
                beginning or kernel,
                beginning or copy or begin(),
                tuple(words["variables"]),
                words["label"],
                words["files_gap"],
                words["execution_id"],
                words["number"],
                words["order"],
            )
        )
    return states
