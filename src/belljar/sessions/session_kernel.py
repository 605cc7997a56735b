"""A session's kernel: started when needed, replaced when it dies, forked for checkpoints, rewound, handed over.

Callers have the session's turn. Knows nothing of executions but their ids.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from belljar import metrics
from belljar.errors import BelljarError, KernelStartFailed
from belljar.executions.outcome import KernelLoss, StateLossNotice, killed_text
from belljar.files.disk_usage import DiskQuota
from belljar.kernels.base import Kernel, StatefulKernel, is_forkable, is_remote
from belljar.outputs.events import Finished
from belljar.provisioning.handover import Handover, RestoredCheckpoint, ResumableKernel
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.sandboxes.base import Incident
from belljar.sessions.checkpoints import Checkpoint, Checkpoints, FreshCheckpoint, restored_checkpoints
from belljar.sessions.hibernation import SavedStateLoader
from belljar.toolbox.base import CallRecord

CATCH_UP_S = 30.0
StartKernel = Callable[[KernelFolders], Awaitable[Kernel]]


class SessionKernel:
    """The kernel of one session. `on_growth` is called when the session's folder is over its limit and grows."""

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
        """Why this object ended the kernel while no cell ran; empty when it did not."""
        self.last_cause: str | None = None
        self.variables: tuple[str, ...] = ()
        self.checkpoints = checkpoints
        self.waking: SavedStateLoader | None = None
        """Loads what is on disk into the first kernel; None when there is nothing."""
        self._folders = folders
        self._start_kernel = start_kernel
        self._quota = quota
        self._is_busy = is_busy
        self._on_growth = on_growth
        self._does_rewind = does_rewind
        self._handover = handover
        self._extra_descriptor = extra_descriptor
        """A descriptor that is deposited with the kernel for the next server; negative for none."""
        self._is_fresh = False
        self._loss: StateLossNotice | None = None
        self._watch: asyncio.Task[None] | None = None

    # The kernel

    async def ensure_started(self) -> Kernel:
        """Return the kernel; start one if there is none or it has died."""
        if self.kernel is not None and not self.kernel.is_alive():
            await self.on_death(self._idle_death(self.kernel))
        if is_remote(self.kernel) and (fact := await self.kernel.look()):
            self.last_cause = fact
            await self.on_death(fact)
        if self.kernel is None:
            if self.waking is not None:
                await self.waking.prepare()
            kernel = self.adopt(await self._start_kernel(self._folders), is_fresh=self.waking is None)
            if self.waking is not None:
                # Only once, because a kernel that dies of the saved state must not be given it again.
                waking, self.waking = self.waking, None
                self._loss = loss = await waking.load(kernel)
                self.variables = tuple(name for name in self.variables if name not in loss.names)
            return kernel
        return self.kernel

    def adopt(self, kernel: Kernel, *, is_fresh: bool = False) -> Kernel:
        """Use a kernel that runs already; `is_fresh` says that it has run nothing."""
        self.kernel = kernel
        self._is_fresh = is_fresh
        folders, extra = self._folders, self._extra_descriptor
        if self._handover.is_on:
            self._handover.deposit(folders.session_id, kernel, folders.identity, extra_descriptor=extra)
        if self._watch is None:
            watch = self._quota.watch(is_busy=self._is_busy, on_growth=self._on_growth)
            self._watch = asyncio.get_running_loop().create_task(watch)
        return kernel

    def _idle_death(self, kernel: Kernel) -> str:
        fact = "the kernel's process ended while no cell ran"
        incident = next((incident for incident in kernel.incidents() if incident.kind == "out_of_memory"), None)
        cause = self.ended_by or (killed_text(incident) if incident else "")
        self.last_cause = cause or fact
        return f"{fact} ({cause})" if cause else fact

    def remember(self, finished: Finished) -> None:
        """Note which variables the session holds after a cell."""
        self.variables = finished.variables
        self.checkpoints.is_due = True

    def take_loss(self) -> StateLossNotice | None:
        """Return what was lost with the last kernel, to the first caller only; None to later ones."""
        loss, self._loss = self._loss, None
        return loss

    def note_predecessor(self, notice: str) -> None:
        """Let the next execution be told what became of another session that this one takes the place of."""
        self._loss = StateLossNotice((), notice)

    async def on_death(self, cause: str) -> KernelLoss:
        """Replace a kernel that died by the latest checkpoint, if the settings say so and it works; else release it."""
        self.ended_by = ""
        names, self.variables = self.variables, ()
        latest = self.checkpoints.latest() if self._does_rewind else None
        if latest is not None:
            since = latest.execution_id
            with contextlib.suppress(BelljarError):
                return KernelLoss(tuple(await self.rewind(latest)), is_rewound=True, since=since)
        # Only a kernel that can save its variables tells their names.
        gone = " It held no variables." if isinstance(self.kernel, StatefulKernel) else ""
        await self._release_kernel()
        gone = _gone(names) or gone
        self._loss = StateLossNotice(
            names, f"{cause}. This is a fresh kernel: imports and variables are gone, files are kept.{gone}"
        )
        return KernelLoss(names)

    async def _release_kernel(self) -> None:
        """Release the kernel; its sandbox stays while checkpoints in it can still be restored."""
        kernel, self.kernel = self.kernel, None
        self._handover.withdraw(self._folders.session_id)
        if kernel is not None:
            await self._end_kernel(kernel)

    async def _end_kernel(self, kernel: Kernel, successor: Kernel | None = None) -> None:
        if is_forkable(kernel) and (
            self.checkpoints.has_any_in_sandbox_of(kernel)
            or (successor is not None and kernel.shares_sandbox(successor))
        ):
            await kernel.discard(successor)
        else:
            await kernel.aclose()

    # Across a change of servers

    def note_execution(self, execution_id: str, timeout_s: float) -> None:
        """Note for the next server which execution the kernel is about to be given."""
        if self._handover.is_on:
            self._handover.note_execution(self._folders.session_id, execution_id, timeout_s)

    def note_call(self, number: int, record: CallRecord) -> None:
        """Note for the next server a tool call of that execution."""
        self._handover.note_call(self._folders.session_id, number, record)

    async def catch_up(self, kernel: ResumableKernel) -> None:
        """Read what the kernel of an earlier server sent since, where no cell of it is known to run."""
        if kernel is not self.kernel:  # it was replaced meanwhile
            return
        try:
            if not await self._has_answered(kernel):
                # It may run a long callback of a widget. Interrupt that, because the variables are worth more.
                async with asyncio.timeout(CATCH_UP_S):
                    await kernel.interrupt()
                    await kernel.catch_up()
        except BelljarError:
            pass  # it has died, which the next cell reports
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
        """Leave the kernel and its checkpoints alive for the next server."""
        await self._stop_watch()
        kernel, self.kernel = self.kernel, None
        if is_forkable(kernel):
            await self.checkpoints.detach(kernel)
        await self._handover.detach(self._folders.session_id)

    async def kill_idle(self, incident: Incident) -> None:
        """Kill the kernel between two cells, because of what a cell left running."""
        if self.kernel is not None:
            self.ended_by = killed_text(incident)
            await self.kernel.kill()

    # Checkpoints

    async def take_checkpoint(self, *, is_idle: bool = False) -> None:
        """Take a checkpoint of the session, unless one was taken since the last cell."""
        is_fresh, self._is_fresh = self._is_fresh, False
        if is_forkable(self.kernel):
            fresh = self._make_fresh_checkpoint() if is_fresh else None
            await self.checkpoints.take(self.kernel, self.variables, fresh, is_idle=is_idle)
            if is_idle:
                await self.checkpoints.limit_memory(self.kernel)
        elif self.kernel is not None:
            self.checkpoints.refusal = f"sessions of {self.kernel.name} cannot be copied"

    def _make_fresh_checkpoint(self) -> FreshCheckpoint:
        return FreshCheckpoint(partial(self._start_kernel, self._folders))

    async def inherit(self, checkpoints: Sequence[RestoredCheckpoint], store: Path) -> None:
        """Continue with the checkpoints that an earlier server deposited; their files are in its `store`."""
        if is_forkable(self.kernel):
            await self.checkpoints.inherit(
                restored_checkpoints(checkpoints, self.kernel, self._make_fresh_checkpoint), store
            )

    async def rewind(self, checkpoint: Checkpoint) -> list[str]:
        """Continue from a checkpoint, with its variables and files; return what could not be restored.

        The present kernel is given up only when the kernel of the checkpoint has answered. If it does not answer,
        nothing has changed.
        """
        if self.kernel is not None and not self.kernel.is_alive():
            await self._release_kernel()
        present = self.kernel
        try:
            restored = await self._restore(checkpoint)
        except (BelljarError, TimeoutError) as error:
            fact = f"the earlier state could not be woken: {error or 'it did not answer'}"
            if present is not None:
                hint = "The session is as it was before the rewind: go on from it"
                raise KernelStartFailed(fact, hint=hint) from error
            self._note_loss("A rewind failed")
            raise KernelStartFailed(fact) from error
        self._handover.withdraw(self._folders.session_id)
        self.adopt(restored, is_fresh=checkpoint.is_fresh)
        await self.checkpoints.drop_after(checkpoint)
        if present is not None:
            await self._end_kernel(present, restored)
        # Only now, when no process is left that could write to the files.
        lost = await self.checkpoints.restore_files(checkpoint)
        if not restored.is_alive():
            await self._release_kernel()
            self._note_loss("A rewind failed")
            raise KernelStartFailed("the earlier state ended when it took the place of the present one")
        self.variables = checkpoint.variables
        self._loss = None
        metrics.rewinds.add()
        return [*lost, *checkpoint.process.lost]

    async def _restore(self, checkpoint: Checkpoint) -> Kernel:
        if not checkpoint.is_fresh:
            return await checkpoint.restore()
        # A kernel that starts may import files from the folder, so it must find the files of the checkpoint.
        async with self.checkpoints.files_of(checkpoint):
            return await checkpoint.restore()

    def _note_loss(self, what: str) -> None:
        names, self.variables = self.variables, ()
        self._loss = StateLossNotice(
            names, f"{what}. This is a fresh kernel: imports and variables are gone.{_gone(names)}"
        )

    async def aclose(self) -> None:
        """End the kernel, its checkpoints and the watch on the folder; may be called twice."""
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


def _gone(names: Sequence[str]) -> str:
    return f" Gone: {', '.join(names[:40])}{' …' if len(names) > 40 else ''}." if names else ""
