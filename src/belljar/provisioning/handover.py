"""How sessions are handed from one server to the next.

Sessions and the runtime talk to a `Handover` whether or not the setting `keep_alive` is on. Where it is off that does
nothing; where it is on they have the one of `kept_kernels.py`. Knows of sessions nothing but their ids.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from belljar.egress.session_sockets import SessionSocket
from belljar.environments.base import Environment
from belljar.errors import SandboxUnavailable
from belljar.kernels.base import Kernel, KernelCheckpoint
from belljar.kernels.handover_note import RunningNote
from belljar.outputs.events import Event
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.provisioning.session_services import ServicedSandbox
from belljar.sandboxes.base import Identity, Sandbox
from belljar.toolbox.base import CallRecord

RestoreServices = Callable[
    [Sandbox, KernelFolders, Environment, Mapping[str, SessionSocket]], Awaitable[ServicedSandbox]
]
"""Serves the listening sockets of an earlier server again; `KernelStarter.restore_services`."""


class ResumableKernel(Kernel, Protocol):
    """A kernel that an earlier server started."""

    def resume(self) -> AsyncIterator[Event]:
        """Yield the rest of the cell that the earlier server gave it, if that has not ended.

        Called once, under the session's turn. Without a cell there is only the output that came meanwhile. If no
        `Finished` comes at the end, the cell in the `RunningNote` has never reached the kernel.
        """
        ...

    async def catch_up(self) -> None:
        """Read what the kernel has sent since, and keep its output for the next cell. Called instead of `resume`."""
        ...


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint of a session, as it was deposited."""

    description: dict[str, Any]
    """What the session deposited with it."""
    process: KernelCheckpoint | None
    """Its process; None for a checkpoint that needs none."""


@dataclass(frozen=True, slots=True)
class RestoredKernel:
    """What an earlier server has deposited of a session."""

    kernel: ResumableKernel
    note: RunningNote
    """Which execution the kernel was last given."""
    calls: list[CallRecord]
    """The tools that this execution has called so far."""
    checkpoints: list[RestoredCheckpoint]
    extra_descriptor: int
    """What was deposited with the kernel, for the caller to close; negative for none."""


class Handover:
    """Deposits the kernels of this server for the next one, and restores those that an earlier server deposited.

    Everything is by the id of a session. A call about a kernel that is not deposited does nothing. This one is for
    servers with which all sessions end: nothing is or was deposited.
    """

    is_on = False
    """Whether anything outlives this server."""

    async def faults(self) -> dict[str, str]:
        """Return what does not work now, by the name of the part; an empty text for a part that works."""
        return {}

    # While a session runs

    def deposit(
        self, session_id: str, kernel: Kernel, identity: Identity | None, *, extra_descriptor: int = -1
    ) -> None:
        """Have this kernel outlive the server, in place of the session's last one, where that is possible.

        `extra_descriptor` is handed to the next server together with the kernel; negative for none.
        """

    def withdraw(self, session_id: str) -> None:
        """Deposit the session's kernel no longer, because it has ended or is about to; may be called twice."""

    def has(self, session_id: str) -> bool:
        """Return whether the session's kernel is deposited, as far as is known; see `wait_until_settled`."""
        return False

    def note_execution(self, session_id: str, execution_id: str, timeout_s: float) -> None:
        """Record which execution the kernel is about to be given."""

    def note_call(self, session_id: str, number: int, record: CallRecord) -> None:
        """Record that this execution calls a tool, or has called it."""

    def deposit_checkpoint(
        self, session_id: str, label: str, origin: object, checkpoint: KernelCheckpoint, description: dict[str, Any]
    ) -> None:
        """Have a checkpoint of the session outlive the server, or replace its description.

        `checkpoint` was forked from the kernel `origin`. Of one that has no process, only the description is deposited.
        """

    def withdraw_checkpoint(self, session_id: str, label: str) -> None:
        """Deposit this checkpoint no longer; may be called twice."""

    # When the server stops

    async def wait_until_settled(self) -> None:
        """Wait until `has` is certain."""

    async def detach(self, session_id: str) -> None:
        """Release a deposited kernel and its sandbox without ending them."""

    # When the next server starts

    @property
    def refusal(self) -> str:
        """Why nothing of what an earlier server left can be had, where that is so."""
        return ""

    def left(self) -> list[str]:
        """Return the ids of the sessions whose kernels an earlier server has deposited."""
        return []

    def identity_of(self, session_id: str) -> Identity | None:
        """Return the user of such a session, where it has one of its own. Called before `restore`."""
        raise SandboxUnavailable(f"no kernel of session {session_id} is kept")

    async def restore(
        self, session_id: str, folders: KernelFolders, environment: Environment, restore_services: RestoreServices
    ) -> RestoredKernel:
        """Return the kernel of such a session; SandboxUnavailable when it cannot be had, and then it is ended."""
        raise SandboxUnavailable(f"no kernel of session {session_id} is kept")

    async def end_unclaimed(self) -> None:
        """End everything that was deposited and nobody restored. Called once, after the last `restore`."""

    # The tree of generated bindings

    def deposit_tree(self, descriptor: int) -> None:
        """Keep a folder locked beyond the end of the server, because sessions that outlive it have it mounted."""

    def has_any(self) -> bool:
        """Return whether the kernel of any session is deposited."""
        return False
