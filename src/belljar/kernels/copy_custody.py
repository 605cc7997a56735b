"""Sleeping copies of kernels that outlive their server: their wires are kept, with what the next server has to know.

A copy ends when nobody holds its wire any more. What its state means is known to sessions.
"""

from typing import Any

from belljar.errors import SandboxUnavailable
from belljar.kernels.base import Kernel
from belljar.kernels.frames import Wire
from belljar.kernels.hatches import HatchedSandbox
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.sleepers import SleepingKernel
from belljar.sandboxes.namespace.enclosure import NamespaceSandbox
from belljar.supervisor import Deposit, Supervisor

PREFIX = "copy:"


class CopyCustody:
    """Those of one server, by the id of their session and a label."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._claimed: set[str] = set()
        """Keys of what an earlier server has left, and is wanted."""

    def keep(self, session_id: str, label: str, origin: object, copy: object, words: dict[str, Any]) -> None:
        """Keep a copy that sleeps beside its origin, or words alone where there is no process."""
        place = place_of(origin) if isinstance(origin, IPythonKernel) else ""
        if isinstance(copy, SleepingKernel):
            if not place:
                return
            told = {"place": place, "pid": copy.pid, "lost": copy.lost, "words": words}
            deposit = Deposit(told, copy.wire.descriptors)
        else:
            deposit = Deposit({"place": "", "words": words})
        self._supervisor.keep(_key(session_id, label), deposit)

    def drop(self, session_id: str, label: str) -> None:
        """It is over; may be called twice."""
        self._supervisor.drop(_key(session_id, label))

    def readopt(self, session_id: str, kernel: IPythonKernel) -> list[tuple[dict[str, Any], SleepingKernel | None]]:
        """What was kept for a session, as far as it sleeps in the sandbox of its kernel; the rest is over."""
        found: list[tuple[dict[str, Any], SleepingKernel | None]] = []
        for key in self._keys(_key(session_id, "")):
            try:
                state = self._take(key, kernel)
            except (SandboxUnavailable, OSError, LookupError):  # its session is worth more than an earlier state of it
                continue
            self._claimed.add(key)
            if state is None:
                self._supervisor.drop(key)
            else:
                found.append(state)
        kernel.readopt_copies([copy for _, copy in found if copy is not None])
        return found

    def _take(self, key: str, kernel: IPythonKernel) -> tuple[dict[str, Any], SleepingKernel | None] | None:
        """One of them; None when its process is gone, or in another sandbox than the kernel."""
        deposit = self._supervisor.take(key)
        if not deposit.descriptors:
            return deposit.words["words"], None
        wire = Wire(has_streams=False, kept=deposit.descriptors)
        try:
            wire.peer_pid = deposit.words["pid"]
            if deposit.words["place"] == place_of(kernel) and not wire.is_hung_up():
                return deposit.words["words"], SleepingKernel(wire, deposit.words["lost"])
        except LookupError:
            wire.close()
            raise
        wire.close()
        return None

    def settle(self) -> None:
        """Everything that is wanted is readopted: the rest is over."""
        for key in self._keys(PREFIX):
            if key not in self._claimed:
                self._supervisor.drop(key)

    def _keys(self, prefix: str) -> list[str]:
        return [key for key in self._supervisor.found if key.startswith(prefix) and self._supervisor.has(key)]


def place_of(kernel: Kernel) -> str:
    """The key of the sandbox that a kernel is in; empty for one that is not kept."""
    hatched = kernel.sandbox if isinstance(kernel, IPythonKernel) else None
    inner = hatched.inner if isinstance(hatched, HatchedSandbox) else None
    return inner.key if isinstance(inner, NamespaceSandbox) else ""


def _key(session_id: str, label: str) -> str:
    return f"{PREFIX}{session_id}:{label}"
