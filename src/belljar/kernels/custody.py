"""Kernels that outlive their server: deposited with their sandbox, and made whole by the next server.

Of a kernel the wire's descriptors are kept, the one of its process, the doors its code knocks at, and a slate. Knows
nothing of sessions but their ids.
"""

import os
import select
from typing import Any

from belljar.egress.listening import Door
from belljar.environments.base import Environment
from belljar.errors import SandboxUnavailable
from belljar.kernels.base import Kernel
from belljar.kernels.copies import KeptProcess
from belljar.kernels.copy_custody import CopyCustody
from belljar.kernels.folders import Folders
from belljar.kernels.frames import Wire
from belljar.kernels.hatches import HatchedSandbox
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.slate import Note, Slate
from belljar.kernels.starting import KernelStarter
from belljar.sandboxes.base import Identity, Keeping, Sandbox, SandboxProcess
from belljar.sandboxes.namespace.enclosure import NamespaceSandbox
from belljar.supervisor import Deposit, Supervisor
from belljar.toolbox.base import CallRecord

PREFIX = "session:"
FORM = 2
"""Of what is deposited, sandboxes included. Raised when an earlier or later server could not make sense of it."""
_WIRE = 3


class Custody:
    """The kernels of one server that a supervisor keeps, by the id of their session."""

    def __init__(self, supervisor: Supervisor, provider: Keeping, starter: KernelStarter) -> None:
        self._supervisor = supervisor
        self._provider = provider
        self._starter = starter
        self._slates: dict[str, Slate] = {}
        self.copies = CopyCustody(supervisor)
        self._entrusted: dict[str, int] = {}
        """Of sessions that are being taken over."""

    def keep(self, session_id: str, kernel: Kernel, identity: Identity | None, entrusted: int = -1) -> None:
        """A session has this kernel from now on; one that cannot be kept ends with the server.

        `entrusted` is a descriptor that the next server is to have with it, negative for none.
        """
        hatched = kernel.sandbox if isinstance(kernel, IPythonKernel) else None
        key = self._provider.keep(hatched.inner) if isinstance(hatched, HatchedSandbox) else ""
        if not isinstance(kernel, IPythonKernel) or not isinstance(hatched, HatchedSandbox) or not key:
            self.let_go(session_id)
            return
        slate = self._slates.get(session_id)
        if slate is None:
            slate = self._slates[session_id] = Slate()
        kernel.note_request(slate)
        process = kernel.process
        telling = process.listening_end if isinstance(process, KeptProcess) else -1
        words = {
            "form": FORM,
            "sandbox": key,
            "pid": kernel.wire.peer_pid,
            "is_copy": isinstance(process, KeptProcess),
            "has_keeper": telling >= 0,
            "has_entrusted": entrusted >= 0,
            "doors": [*hatched.doors],
            "identity": [identity.uid, identity.gid] if identity else None,
        }
        doors = [door.descriptor for door in hatched.doors.values()]
        descriptors = [*kernel.wire.descriptors, slate.descriptor, kernel.pidfd]
        descriptors += [*([telling] if telling >= 0 else []), *doors, *([entrusted] if entrusted >= 0 else [])]
        self._supervisor.keep(f"{PREFIX}{session_id}", Deposit(words, descriptors, is_session=True))

    def has(self, session_id: str) -> bool:
        """Whether its kernel will be there for the next server."""
        return self._supervisor.has(f"{PREFIX}{session_id}")

    def slate(self, session_id: str) -> Slate | None:
        """Where to note what its kernel is given; None while that is not kept."""
        return self._slates.get(session_id)

    def note(self, session_id: str) -> Note:
        """What its kernel was last given."""
        slate = self._slates.get(session_id)
        return slate.note if slate else Note()

    def calls(self, session_id: str) -> list[CallRecord]:
        """The tools that the execution has called which its kernel was last given."""
        slate = self._slates.get(session_id)
        return slate.calls() if slate else []

    def let_go(self, session_id: str) -> None:
        """Its kernel is gone, or will go with the server; may be called twice."""
        self._supervisor.drop(f"{PREFIX}{session_id}")
        if (slate := self._slates.pop(session_id, None)) is not None:
            slate.close()

    async def leave(self, session_id: str, kernel: IPythonKernel) -> None:
        """The server stops: answer for a kernel no longer, and let it live."""
        hatched = kernel.sandbox
        kernel.leave()
        if isinstance(hatched, HatchedSandbox):
            await hatched.leave()
            self._provider.leave(hatched.inner)
        if (slate := self._slates.pop(session_id, None)) is not None:
            slate.close()

    # What an earlier server has left

    def found(self) -> list[str]:
        """The ids of the sessions whose kernels were kept."""
        return [key.removeprefix(PREFIX) for key in self._supervisor.found if key.startswith(PREFIX)]

    def identity_of(self, session_id: str) -> Identity | None:
        """The user of a session whose kernel was kept, where it has one of its own."""
        deposit = self._supervisor.take(f"{PREFIX}{session_id}")
        for descriptor in deposit.descriptors:
            os.close(descriptor)
        _check_form(deposit.words)
        identity = deposit.words["identity"]
        return Identity(*identity) if identity else None

    def entrusted(self, session_id: str) -> int:
        """The descriptor that was kept with a session's kernel, for who closes it; negative for none. Told once."""
        return self._entrusted.pop(session_id, -1)

    async def readopt(self, session_id: str, folders: Folders, environment: Environment) -> IPythonKernel:
        """The kernel of a session; SandboxUnavailable when it cannot be had any more, and then it is no more."""
        deposit = self._supervisor.take(f"{PREFIX}{session_id}")
        left = [*deposit.descriptors]
        try:
            _check_form(deposit.words)
            return await self._rebuild(session_id, folders, environment, deposit.words, left)
        except BaseException:
            self.let_go(session_id)
            raise
        finally:
            for descriptor in left:
                os.close(descriptor)

    async def settled(self) -> None:
        """Until it is known what is kept."""
        await self._supervisor.settled()

    async def settle(self) -> None:
        """Everything that is wanted is readopted: end the rest."""
        self.copies.settle()
        await self._provider.settle()

    async def _rebuild(
        self, session_id: str, folders: Folders, environment: Environment, words: dict[str, Any], left: list[int]
    ) -> IPythonKernel:
        """Takes from the descriptors those that it uses."""
        sandbox = self._provider.readopt(words["sandbox"])
        try:
            _check_lives(left[_WIRE + 1])
            wire = Wire(in_packets=True, kept=[left.pop(0) for _ in range(_WIRE)])
            wire.peer_pid = words["pid"]
            try:
                self._slates[session_id] = Slate(left.pop(0))
                pidfd = left.pop(0)
                process = _process_of(words, sandbox, pidfd, left)
                doors = {name: Door(left.pop(0)) for name in words["doors"]}
                hatched = await self._starter.rehatch(sandbox, folders, environment, doors)
            except BaseException:
                wire.close()
                raise
        except BaseException:
            await sandbox.aclose()
            raise
        kernel = IPythonKernel(wire, hatched, process, environment)
        kernel.note_request(self._slates[session_id])
        if words["has_entrusted"]:
            self._entrusted[session_id] = left.pop(0)
        return kernel


def _process_of(words: dict[str, Any], sandbox: Sandbox, pidfd: int, left: list[int]) -> SandboxProcess:
    if words["is_copy"]:
        kept = KeptProcess()
        kept.readopt(words["pid"], pidfd, left.pop(0) if words["has_keeper"] else -1)
        return kept
    os.close(pidfd)
    processes = sandbox.processes() if isinstance(sandbox, NamespaceSandbox) else []
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
