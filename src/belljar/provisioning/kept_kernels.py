"""Kernels that outlive their server: deposited with the supervisor, and restored by the next server.

Of a kernel these descriptors are deposited: its wire, its process, the listening sockets that its code calls the host
on, and the `NoteFile` that says what it runs. Of a snapshot it is the wire alone, because a snapshot ends when nobody
holds its wire any more. The sandbox is deposited by its provider's `SandboxHandover`.
"""

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from belljar.egress.session_sockets import SessionSocket
from belljar.environments.base import Environment
from belljar.errors import SandboxUnavailable
from belljar.kernels.base import Kernel, KernelSnapshot
from belljar.kernels.forked_process import ForkedProcess, SnapshotProcess, as_snapshot_process
from belljar.kernels.handover_note import NoteFile
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.wire import Wire
from belljar.provisioning.folders import KernelFolders
from belljar.provisioning.handover import RestoredCopy, RestoredKernel, RestoreServices
from belljar.provisioning.session_services import ServicedSandbox
from belljar.sandboxes.base import Identity, SandboxProcess
from belljar.sandboxes.handover import SandboxHandover
from belljar.supervisor import Deposit, SupervisorClient
from belljar.toolbox.base import CallRecord

FORM = 2
"""The version of the format of all that is deposited, sandboxes included. It is raised with every incompatible change.
"""
KERNELS = "session:"
COPIES = "copy:"
TREE = "toolbox"
_WIRE = 3


@dataclass(frozen=True, slots=True)
class _Parts:
    """A kernel that can be deposited, and its sandbox."""

    kernel: IPythonKernel
    sandbox: ServicedSandbox


class KernelHandover:
    """The implementation of `Handover` that deposits with a supervisor."""

    is_on = True

    def __init__(self, supervisor: SupervisorClient, sandboxes: SandboxHandover) -> None:
        self._supervisor = supervisor
        self._sandboxes = sandboxes
        self._deposited: dict[str, _Parts] = {}
        self._note_files: dict[str, NoteFile] = {}
        self._restored_copies: set[str] = set()
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
        copied = process if isinstance(process, ForkedProcess) else None
        keeper = [copied.listening_end] if copied is not None and copied.listening_end >= 0 else []
        extra = [extra_descriptor] if extra_descriptor >= 0 else []
        words = {
            "form": FORM,
            "sandbox": key,
            "pid": parts.kernel.wire.peer_pid,
            "is_copy": copied is not None,
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
        self._supervisor.store(f"{KERNELS}{session_id}", Deposit(words, descriptors, is_session=True))

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

    def deposit_copy(
        self, session_id: str, label: str, origin: object, copy: KernelSnapshot, words: dict[str, Any]
    ) -> None:
        """See `Handover`. A snapshot ends with the server if its kernel's sandbox is not deposited."""
        deposit = Deposit({"place": "", "words": words})
        if isinstance(copy, SnapshotProcess):
            if not (place := self._sandbox_key_of(origin)):
                return
            fields = {"place": place, "pid": copy.pid, "lost": copy.lost, "words": words}
            deposit = Deposit(fields, copy.wire.descriptors)
        self._supervisor.store(_copy_key(session_id, label), deposit)

    def withdraw_copy(self, session_id: str, label: str) -> None:
        """See `Handover`."""
        self._supervisor.drop(_copy_key(session_id, label))

    def deposit_tree(self, descriptor: int) -> None:
        """See `Handover`."""
        self._supervisor.store(TREE, Deposit({}, [descriptor]))

    # When the server stops

    async def settled(self) -> None:
        """See `Handover`."""
        await self._supervisor.settled()

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

    def left(self) -> list[str]:
        """See `Handover`."""
        return [key.removeprefix(KERNELS) for key in self._supervisor.found if key.startswith(KERNELS)]

    def identity_of(self, session_id: str) -> Identity | None:
        """See `Handover`."""
        deposit = self._supervisor.take(f"{KERNELS}{session_id}")
        for descriptor in deposit.descriptors:
            os.close(descriptor)
        _check_form(deposit.words)
        identity = deposit.words["identity"]
        return Identity(*identity) if identity else None

    async def restore(
        self, session_id: str, folders: KernelFolders, environment: Environment, restore_services: RestoreServices
    ) -> RestoredKernel:
        """See `Handover`."""
        deposit = self._supervisor.take(f"{KERNELS}{session_id}")
        left, words = [*deposit.descriptors], deposit.words
        try:
            _check_form(words)
            kernel = await self._rebuild(session_id, folders, environment, restore_services, words, left)
            note_file = self._note_files[session_id]
            note, calls, copies = note_file.note, note_file.calls(), self._restore_copies(session_id, kernel)
            return RestoredKernel(kernel, note, calls, copies, left.pop(0) if words["has_entrusted"] else -1)
        except BaseException:
            self.withdraw(session_id)
            raise
        finally:
            for descriptor in left:
                os.close(descriptor)

    async def end_unclaimed(self) -> None:
        """See `Handover`."""
        for key in self._left_copies(COPIES):
            if key not in self._restored_copies:
                self._supervisor.drop(key)
        await self._sandboxes.end_unclaimed()

    async def _rebuild(
        self,
        session_id: str,
        folders: KernelFolders,
        environment: Environment,
        restore_services: RestoreServices,
        words: dict[str, Any],
        left: list[int],
    ) -> IPythonKernel:
        """Make a kernel from what was deposited, and remove the descriptors that it uses from `left`."""
        sandbox, processes = self._sandboxes.restore(words["sandbox"])
        try:
            _check_lives(left[_WIRE + 1])
            wire = Wire(in_packets=True, kept=[left.pop(0) for _ in range(_WIRE)])
            wire.peer_pid = words["pid"]
            try:
                self._note_files[session_id] = NoteFile(left.pop(0))
                process = _process_of(words, processes, left.pop(0), left)
                sockets = {name: SessionSocket(left.pop(0)) for name in words["doors"]}
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

    def _restore_copies(self, session_id: str, kernel: IPythonKernel) -> list[RestoredCopy]:
        """Return the checkpoints that were deposited of a session, and drop those whose process is gone."""
        copies: list[RestoredCopy] = []
        for key in self._left_copies(_copy_key(session_id, "")):
            try:
                restored = self._restore_copy(key, kernel)
            except (SandboxUnavailable, OSError, LookupError):  # restore the session even if a checkpoint is lost
                continue
            self._restored_copies.add(key)
            if restored is None:
                self._supervisor.drop(key)
            else:
                copies.append(restored)
        kernel.readopt_copies([as_snapshot_process(each.copy) for each in copies if each.copy is not None])
        return copies

    def _restore_copy(self, key: str, kernel: IPythonKernel) -> RestoredCopy | None:
        """Return one checkpoint; None when its process is gone, or in another sandbox than the kernel."""
        deposit = self._supervisor.take(key)
        if not deposit.descriptors:
            return RestoredCopy(deposit.words["words"], None)
        wire = Wire(has_streams=False, kept=deposit.descriptors)
        try:
            wire.peer_pid = deposit.words["pid"]
            if deposit.words["place"] == self._sandbox_key_of(kernel) and not wire.is_hung_up():
                return RestoredCopy(deposit.words["words"], SnapshotProcess(wire, deposit.words["lost"]))
        except LookupError:
            wire.close()
            raise
        wire.close()
        return None

    def _left_copies(self, prefix: str) -> list[str]:
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
    words: dict[str, Any], processes: Sequence[SandboxProcess], pidfd: int, left: list[int]
) -> SandboxProcess:
    if words["is_copy"]:
        kept = ForkedProcess()
        kept.restored(words["pid"], pidfd, left.pop(0) if words["has_keeper"] else -1)
        return kept
    os.close(pidfd)
    if not processes:
        raise SandboxUnavailable("the kernel's process has ended")
    return processes[-1]


def _check_form(words: dict[str, Any]) -> None:
    if words.get("form") != FORM:
        raise SandboxUnavailable(f"it was kept by another version of belljar (form {words.get('form')}, not {FORM})")


def _check_lives(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        raise SandboxUnavailable("the kernel's process has ended")


def _copy_key(session_id: str, label: str) -> str:
    return f"{COPIES}{session_id}:{label}"
