"""A session's kernel from its start to its end: started when needed, lost and mourned, kept asleep, rewound.

Everything here is done by whoever has the session's turn. Knows nothing of executions.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from belljar import measures
from belljar.errors import BelljarError, KernelStartFailed
from belljar.executions.outcome import KernelLoss, StateLossNotice, killed
from belljar.executions.quota import DiskQuota
from belljar.kernels.base import Kernel, is_forkable
from belljar.outputs.events import Finished
from belljar.provisioning.folders import KernelFolders
from belljar.provisioning.handover import Handover, RestoredCopy, ResumableKernel
from belljar.sandboxes.base import Incident
from belljar.sessions.checkpoints import Checkpoint, Checkpoints, FreshCheckpoint, states_of
from belljar.sessions.hibernation import WakeReport
from belljar.toolbox.base import CallRecord

CATCH_UP_S = 30.0
StartKernel = Callable[[KernelFolders], Awaitable[Kernel]]


class SessionKernel:
    """One session's. `on_growth` is called when its folder is over the limit and grows."""

    def __init__(
        self,
        folders: KernelFolders,
        *,
        start_kernel: StartKernel,
        quota: DiskQuota,
        checkpoints: Checkpoints,
        is_busy: Callable[[], bool],
        on_growth: Callable[[], None],
        does_rewind: bool,
        handover: Handover,
        extra_descriptor: int = -1,
    ) -> None:
        self.kernel: Kernel | None = None
        self.ended_by = ""
        """Why the kernel was ended from here while no cell ran."""
        self.last_cause: str | None = None
        self.variables: tuple[str, ...] = ()
        self.checkpoints = checkpoints
        self.waking: WakeReport | None = None
        """What is on disk for the first kernel."""
        self._folders = folders
        self._start_kernel = start_kernel
        self._quota = quota
        self._is_busy = is_busy
        self._on_growth = on_growth
        self._does_rewind = does_rewind
        self._handover = handover
        self._extra_descriptor = extra_descriptor
        """A descriptor of the session's that the next server is to have with its kernel; negative for none."""
        self._is_fresh = False
        self._loss: StateLossNotice | None = None
        self._watch: asyncio.Task[None] | None = None

    # The kernel

    async def ready(self) -> Kernel:
        """The kernel, started if there is none."""
        if self.kernel is not None and not self.kernel.is_alive():
            await self.on_death(self._idle_death(self.kernel))
        if self.kernel is None:
            if self.waking is not None:
                await self.waking.prepare()
            kernel = self.adopt(await self._start_kernel(self._folders), is_fresh=self.waking is None)
            if self.waking is not None:
                # Once: a kernel that dies of what was kept is not given it again.
                waking, self.waking = self.waking, None
                self._loss = loss = await waking.load(kernel)
                self.variables = tuple(name for name in self.variables if name not in loss.names)
            return kernel
        return self.kernel

    def adopt(self, kernel: Kernel, *, is_fresh: bool = False) -> Kernel:
        """Take a kernel that runs already; a fresh one has run nothing."""
        self.kernel = kernel
        self._is_fresh = is_fresh
        folders, extra = self._folders, self._extra_descriptor
        self._handover.deposit(folders.session_id, kernel, folders.identity, extra_descriptor=extra)
        if self._watch is None:
            watch = self._quota.watch(is_busy=self._is_busy, on_growth=self._on_growth)
            self._watch = asyncio.get_running_loop().create_task(watch)
        return kernel

    def _idle_death(self, kernel: Kernel) -> str:
        fact = "the kernel's process ended while no cell ran"
        hit = next((incident for incident in kernel.incidents() if incident.kind == "out_of_memory"), None)
        cause = self.ended_by or (killed(hit) if hit else "")
        self.last_cause = cause or fact
        return f"{fact} ({cause})" if cause else fact

    def remember(self, finished: Finished) -> None:
        """What the session holds after a cell."""
        self.variables = finished.variables
        self.checkpoints.is_due = True

    def take_loss(self) -> StateLossNotice | None:
        """What the last kernel took with it, told once."""
        loss, self._loss = self._loss, None
        return loss

    async def on_death(self, cause: str) -> KernelLoss:
        """The kernel died. Where that is wished and possible the latest checkpoint takes its place."""
        self.ended_by = ""
        names, self.variables = self.variables, ()
        latest = self.checkpoints.latest() if self._does_rewind else None
        if latest is not None:
            since = latest.execution_id
            with contextlib.suppress(BelljarError):
                return KernelLoss(tuple(await self.rewind(latest)), is_rewound=True, since=since)
        await self._leave_kernel()
        gone = f"Gone: {', '.join(names[:40])}{' …' if len(names) > 40 else ''}." if names else "It held no variables."
        self._loss = StateLossNotice(
            names, f"{cause}. This is a fresh kernel: imports and variables are gone, files are kept. {gone}"
        )
        return KernelLoss(names)

    async def _leave_kernel(self) -> None:
        """Let a kernel go; copies of it that sleep can still be woken, so its sandbox stays with them."""
        kernel, self.kernel = self.kernel, None
        self._handover.withdraw(self._folders.session_id)
        if kernel is not None:
            await self._end(kernel)

    async def _end(self, kernel: Kernel, successor: Kernel | None = None) -> None:
        if is_forkable(kernel) and (
            self.checkpoints.are_of(kernel) or (successor is not None and kernel.shares_sandbox(successor))
        ):
            await kernel.discard(successor)
        else:
            await kernel.aclose()

    # Beyond the end of the server

    def note_execution(self, execution_id: str, timeout_s: float) -> None:
        """An execution is about to be given to the kernel: the next server may have to know which."""
        self._handover.note_execution(self._folders.session_id, execution_id, timeout_s)

    def note_call(self, number: int, record: CallRecord) -> None:
        """That execution calls a tool, or has called it."""
        self._handover.note_call(self._folders.session_id, number, record)

    async def catch_up(self, kernel: ResumableKernel) -> None:
        """Go on with the kernel of an earlier server, none of whose cells is known to run; it may be gone by now."""
        if kernel is not self.kernel:
            return
        try:
            if not await self._has_answered(kernel):
                # What a person did to a widget may take as long; its variables are worth more than its end.
                async with asyncio.timeout(CATCH_UP_S):
                    await kernel.interrupt()
                    await kernel.catch_up()
        except BelljarError:
            pass  # it has died, which the next cell is told
        except TimeoutError:
            self.ended_by = f"it gave the server that took it over no answer in {2 * CATCH_UP_S:g} s"
            await kernel.kill()

    async def _has_answered(self, kernel: ResumableKernel) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                await kernel.catch_up()
                return True
        return False

    async def detach(self) -> None:
        """Let go of the kernel and let it live, with the earlier states of it."""
        await self._stop_watch()
        kernel, self.kernel = self.kernel, None
        if is_forkable(kernel):
            await self.checkpoints.detach(kernel)
        await self._handover.detach(self._folders.session_id)

    async def kill_idle(self, incident: Incident) -> None:
        """End a kernel between two cells, for what a cell left running."""
        if self.kernel is not None:
            self.ended_by = killed(incident)
            await self.kernel.kill()

    # Checkpoints

    async def take_checkpoint(self, *, is_idle: bool = False) -> None:
        """Put a copy of the session as it is now to sleep, unless that was done since the last cell."""
        is_fresh, self._is_fresh = self._is_fresh, False
        if is_forkable(self.kernel):
            beginning = self._beginning() if is_fresh else None
            await self.checkpoints.take(self.kernel, self.variables, beginning)
            if is_idle:
                await self.checkpoints.weigh(self.kernel)
        elif self.kernel is not None:
            self.checkpoints.refusal = f"sessions of {self.kernel.name} cannot be copied"

    def _beginning(self) -> FreshCheckpoint:
        return FreshCheckpoint(partial(self._start_kernel, self._folders))

    async def inherit(self, copies: Sequence[RestoredCopy], store: Path) -> None:
        """Go on with the states that an earlier server kept; their files are in its store."""
        if is_forkable(self.kernel):
            await self.checkpoints.inherit(states_of(copies, self.kernel, self._beginning), store)

    async def rewind(self, checkpoint: Checkpoint) -> list[str]:
        """Go on from a checkpoint: variables and files as they were. Returns what did not come along.

        The kernel of that state answers before the present one is given up. If it does not, nothing has changed.
        """
        if self.kernel is not None and not self.kernel.is_alive():
            await self._leave_kernel()
        present = self.kernel
        try:
            woken = await self._wake(checkpoint)
        except (BelljarError, TimeoutError) as error:
            fact = f"the earlier state could not be woken: {error or 'it did not answer'}"
            if present is not None:
                hint = "The session is as it was before the rewind: go on from it"
                raise KernelStartFailed(fact, hint=hint) from error
            self._lose("A rewind failed")
            raise KernelStartFailed(fact) from error
        self._handover.withdraw(self._folders.session_id)
        self.adopt(woken, is_fresh=checkpoint.is_beginning)
        await self.checkpoints.drop_after(checkpoint)
        if present is not None:
            await self._end(present, woken)
        # Now that nobody is left who could write to them.
        lost = await self.checkpoints.restore_files(checkpoint)
        if not woken.is_alive():
            await self._leave_kernel()
            self._lose("A rewind failed")
            raise KernelStartFailed("the earlier state ended when it took the place of the present one")
        self.variables = checkpoint.variables
        self._loss = None
        measures.rewinds.add()
        return [*lost, *checkpoint.copy.lost]

    async def _wake(self, checkpoint: Checkpoint) -> Kernel:
        if not checkpoint.is_beginning:
            return await checkpoint.restore()
        # A kernel that is started may import what lies in the folder: it finds the files of its time.
        async with self.checkpoints.files_of(checkpoint):
            return await checkpoint.restore()

    def _lose(self, what: str) -> None:
        names, self.variables = self.variables, ()
        self._loss = StateLossNotice(names, f"{what}. This is a fresh kernel: imports and variables are gone")

    async def aclose(self) -> None:
        """End the kernel, its copies and the watch; may be called twice."""
        await self._stop_watch()
        self._handover.withdraw(self._folders.session_id)
        if self.kernel is not None:
            kernel, self.kernel = self.kernel, None
            await kernel.aclose()
        await self.checkpoints.aclose()

    async def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
