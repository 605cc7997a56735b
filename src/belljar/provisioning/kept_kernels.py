"""Kernels that outlive their server: deposited with the supervisor, and restored by the next server.

Of a kernel these descriptors are deposited: its wire, its process, the listening sockets that its code calls the host
on, and the `NoteFile` that says what it runs. Of a checkpoint it is the wire alone, whose end ends its process. The
sandbox is deposited by its provider's `SandboxHandover`.
"""

import logging
import os
import select
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from belljar.egress.session_sockets import SessionSocket
from belljar.environments.base import Environment
from belljar.errors import SandboxUnavailable
from belljar.kernels.base import Kernel, KernelCheckpoint
from belljar.kernels.forked_process import CheckpointProcess, ForkedProcess, as_checkpoint_process
from belljar.kernels.handover_note import NoteFile
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.wire import Wire
from belljar.provisioning.handover import Handover, RestoredCheckpoint, RestoredKernel, RestoreServices
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.provisioning.session_services import ServicedSandbox
from belljar.sandboxes.base import Identity, SandboxHandover, SandboxProcess
from belljar.supervisor import Deposit, SupervisorClient, unreadable
from belljar.toolbox.base import CallRecord

KERNELS = "session:"
CHECKPOINTS = "copy:"
TREE = "toolbox"
_WIRE = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A kernel that can be deposited, and its sandbox."""

    kernel: IPythonKernel
    sandbox: ServicedSandbox


class KernelHandover(Handover):
    """The `Handover` that deposits with a supervisor."""

    is_on = True

    def __init__(self, supervisor: SupervisorClient, sandboxes: SandboxHandover) -> None:
        self._supervisor = supervisor
        self._sandboxes = sandboxes
        self._deposited: dict[str, _Parts] = {}
        self._note_files: dict[str, NoteFile] = {}
        self._restored_checkpoints: set[str] = set()
        """The keys of the checkpoints that were restored or found gone."""

    async def faults(self) -> dict[str, str]:
        """See `Handover`."""
        return {"supervisor": await self._supervisor.fault()}

    # While a session runs

    def deposit(
        self, session_id: str, kernel: Kernel, identity: Identity | None, *, extra_descriptor: int = -1
    ) -> None:
        """See `Handover`. Only a kernel of our own runner can be deposited, in a sandbox that can be deposited too."""
        parts = _parts_of(kernel)
        key = self._sandboxes.deposit(parts.sandbox.inner) if parts else ""
        if parts is None or not key:
            self.withdraw(session_id)
            return
        self._deposited[session_id] = parts
        if session_id not in self._note_files:
            self._note_files[session_id] = NoteFile()
        note_file = self._note_files[session_id]
        parts.kernel.use_note_file(note_file)
        process = parts.kernel.process
        forked = process if isinstance(process, ForkedProcess) else None
        keeper = [forked.listening_end] if forked is not None and forked.listening_end >= 0 else []
        extra = [extra_descriptor] if extra_descriptor >= 0 else []
        fields = {
            "sandbox": key,
            "pid": parts.kernel.wire.peer_pid,
            "is_copy": forked is not None,
            "has_keeper": bool(keeper),
            "has_entrusted": bool(extra),
            "doors": [*parts.sandbox.sockets],
            "identity": [identity.uid, identity.gid] if identity else None,
        }
        sockets = [socket.descriptor for socket in parts.sandbox.sockets.values()]
        descriptors = [
            *parts.kernel.wire.descriptors,
            note_file.descriptor,
            parts.kernel.pidfd,
            *keeper,
            *sockets,
            *extra,
        ]
        self._supervisor.store(f"{KERNELS}{session_id}", Deposit(fields, descriptors, is_session=True))

    def withdraw(self, session_id: str) -> None:
        """See `Handover`."""
        self._supervisor.drop(f"{KERNELS}{session_id}")
        self._release(session_id)

    def has(self, session_id: str) -> bool:
        """See `Handover`."""
        return self._supervisor.has(f"{KERNELS}{session_id}")

    def has_any(self) -> bool:
        """See `Handover`."""
        return self._supervisor.has_any(KERNELS)

    def note_execution(self, session_id: str, execution_id: str, timeout_s: float) -> None:
        """See `Handover`."""
        if session_id in self._note_files:
            self._note_files[session_id].note_execution(execution_id, timeout_s)

    def note_call(self, session_id: str, number: int, record: CallRecord) -> None:
        """See `Handover`."""
        if session_id in self._note_files:
            self._note_files[session_id].note_call(number, record)

    def deposit_checkpoint(
        self, session_id: str, label: str, origin: object, checkpoint: KernelCheckpoint, description: dict[str, Any]
    ) -> None:
        """See `Handover`. A checkpoint ends with the server if its kernel's sandbox is not deposited."""
        deposit = Deposit({"place": "", "words": description})
        if isinstance(checkpoint, CheckpointProcess):
            if not (place := self._sandbox_key_of(origin)):
                return
            fields = {"place": place, "pid": checkpoint.pid, "lost": checkpoint.lost, "words": description}
            deposit = Deposit(fields, checkpoint.wire.descriptors)
        self._supervisor.store(_checkpoint_key(session_id, label), deposit)

    def withdraw_checkpoint(self, session_id: str, label: str) -> None:
        """See `Handover`."""
        self._supervisor.drop(_checkpoint_key(session_id, label))

    def deposit_tree(self, descriptor: int) -> None:
        """See `Handover`."""
        self._supervisor.store(TREE, Deposit({}, [descriptor]))

    # When the server stops

    async def wait_until_settled(self) -> None:
        """See `Handover`."""
        await self._supervisor.wait_until_settled()

    async def detach(self, session_id: str) -> None:
        """See `Handover`."""
        if (parts := self._deposited.get(session_id)) is not None:
            parts.kernel.detach()
            await parts.sandbox.detach()
            self._sandboxes.detach(parts.sandbox.inner)
        self._release(session_id)

    def _release(self, session_id: str) -> None:
        self._deposited.pop(session_id, None)
        if (note_file := self._note_files.pop(session_id, None)) is not None:
            note_file.close()

    # When the next server starts

    @property
    def refusal(self) -> str:
        """See `Handover`."""
        return self._supervisor.refusal

    def left(self) -> list[str]:
        """See `Handover`."""
        return [key.removeprefix(KERNELS) for key in self._supervisor.found if key.startswith(KERNELS)]

    def identity_of(self, session_id: str) -> Identity | None:
        """See `Handover`."""
        deposit = self._supervisor.take(f"{KERNELS}{session_id}")
        for descriptor in deposit.descriptors:
            os.close(descriptor)
        with _told_by_maker(deposit):
            identity = deposit.fields["identity"]
            return Identity(*identity) if identity else None

    async def restore(
        self, session_id: str, folders: KernelFolders, environment: Environment, restore_services: RestoreServices
    ) -> RestoredKernel:
        """See `Handover`."""
        deposit = self._supervisor.take(f"{KERNELS}{session_id}")
        left, fields = [*deposit.descriptors], deposit.fields
        try:
            with _told_by_maker(deposit):
                kernel = await self._rebuild(session_id, folders, environment, restore_services, fields, left)
                note_file = self._note_files[session_id]
                note, calls = note_file.note, note_file.calls()
                checkpoints = self._restore_checkpoints(session_id, kernel)
                return RestoredKernel(kernel, note, calls, checkpoints, left.pop(0) if fields["has_entrusted"] else -1)
        except BaseException:
            self.withdraw(session_id)
            raise
        finally:
            for descriptor in left:
                os.close(descriptor)

    async def end_unclaimed(self) -> None:
        """See `Handover`."""
        for key in self._left_keys(CHECKPOINTS):
            if key not in self._restored_checkpoints:
                self._supervisor.drop(key)
        await self._sandboxes.end_unclaimed()

    async def _rebuild(
        self,
        session_id: str,
        folders: KernelFolders,
        environment: Environment,
        restore_services: RestoreServices,
        fields: dict[str, Any],
        left: list[int],
    ) -> IPythonKernel:
        """Make a kernel from what was deposited, and remove the descriptors that it uses from `left`."""
        sandbox, processes = self._sandboxes.restore(fields["sandbox"])
        try:
            _check_lives(left[_WIRE + 1])
            wire = Wire(in_packets=True, kept=[left.pop(0) for _ in range(_WIRE)])
            wire.peer_pid = fields["pid"]
            try:
                self._note_files[session_id] = NoteFile(left.pop(0))
                process = _process_of(fields, processes, left.pop(0), left)
                sockets = {name: SessionSocket(left.pop(0)) for name in fields["doors"]}
                serviced = await restore_services(sandbox, folders, environment, sockets)
            except BaseException:
                wire.close()
                raise
        except BaseException:
            await sandbox.aclose()
            raise
        kernel = IPythonKernel(wire, serviced, process, environment)
        kernel.use_note_file(self._note_files[session_id])
        return kernel

    def _restore_checkpoints(self, session_id: str, kernel: IPythonKernel) -> list[RestoredCheckpoint]:
        """Return the checkpoints that were deposited of a session, and drop those whose process is gone."""
        checkpoints: list[RestoredCheckpoint] = []
        for key in self._left_keys(_checkpoint_key(session_id, "")):
            try:
                restored = self._restore_checkpoint(key, kernel)
            except (SandboxUnavailable, OSError, LookupError):  # restore the session even if a checkpoint is lost
                continue
            self._restored_checkpoints.add(key)
            if restored is None:
                self._supervisor.drop(key)
            else:
                checkpoints.append(restored)
        kernel.adopt_checkpoints(
            [as_checkpoint_process(each.process) for each in checkpoints if each.process is not None]
        )
        return checkpoints

    def _restore_checkpoint(self, key: str, kernel: IPythonKernel) -> RestoredCheckpoint | None:
        """Return one checkpoint; None when its process is gone, or in another sandbox than the kernel."""
        deposit = self._supervisor.take(key)
        if not deposit.descriptors:
            return RestoredCheckpoint(deposit.fields["words"], None)
        wire = Wire(has_streams=False, kept=deposit.descriptors)
        try:
            wire.peer_pid = deposit.fields["pid"]
            if deposit.fields["place"] == self._sandbox_key_of(kernel) and not wire.is_hung_up():
                return RestoredCheckpoint(deposit.fields["words"], CheckpointProcess(wire, deposit.fields["lost"]))
        except LookupError:
            wire.close()
            raise
        wire.close()
        return None

    def _left_keys(self, prefix: str) -> list[str]:
        return [key for key in self._supervisor.found if key.startswith(prefix) and self._supervisor.has(key)]

    def _sandbox_key_of(self, kernel: object) -> str:
        """Return the key of the sandbox that a kernel is in; empty where the sandbox is not deposited."""
        parts = _parts_of(kernel)
        return self._sandboxes.key_of(parts.sandbox.inner) if parts else ""


def _parts_of(kernel: object) -> _Parts | None:
    if isinstance(kernel, IPythonKernel) and isinstance(kernel.sandbox, ServicedSandbox):
        return _Parts(kernel, kernel.sandbox)
    return None


def _process_of(
    fields: dict[str, Any], processes: Sequence[SandboxProcess], pidfd: int, left: list[int]
) -> SandboxProcess:
    if fields["is_copy"]:
        forked = ForkedProcess()
        forked.take_over(fields["pid"], pidfd, left.pop(0) if fields["has_keeper"] else -1)
        return forked
    os.close(pidfd)
    if not processes:
        raise SandboxUnavailable("the kernel's process has ended")
    return processes[-1]


@contextmanager
def _told_by_maker(deposit: Deposit) -> Generator[None]:
    """Turn the error for fields that are not as expected into one that names the version that deposited them."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        log.warning("a deposit made by %s cannot be read: %r", deposit.maker, error)
        raise unreadable(deposit.maker) from error


def _check_lives(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        raise SandboxUnavailable("the kernel's process has ended")


def _checkpoint_key(session_id: str, label: str) -> str:
    return f"{CHECKPOINTS}{session_id}:{label}"
