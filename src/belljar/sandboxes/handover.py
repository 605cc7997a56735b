"""The contract for providers that can hand the sandboxes of one server to the next.

A server deposits them with its supervisor. The key of a deposit is all that the next server needs to restore the
sandbox. Only the runtime asks whether a provider can hand over; everyone else talks to a `Handover`
(`provisioning/handover.py`), which does nothing where that is off.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from belljar.sandboxes.base import Sandbox, SandboxProcess
from belljar.supervisor import SupervisorClient


class RestoredSandbox(NamedTuple):
    """A sandbox that an earlier server deposited."""

    sandbox: Sandbox
    processes: Sequence[SandboxProcess]
    """The commands that were started in it, oldest first."""


class SandboxHandover(Protocol):
    """Deposits sandboxes for the next server, and restores those of an earlier one."""

    def deposit(self, sandbox: Sandbox) -> str:
        """Deposit a sandbox that a session's kernel runs in. Called again whenever a kernel was started in it.

        Return its key; empty when it cannot be handed over.
        """
        ...

    def key_of(self, sandbox: Sandbox) -> str:
        """Return the key that a sandbox is deposited under; empty when it is not."""
        ...

    def detach(self, sandbox: Sandbox) -> None:
        """Release a deposited sandbox without ending it. Called when the server stops."""
        ...

    def restore(self, key: str) -> RestoredSandbox:
        """Return a sandbox that an earlier server deposited; SandboxUnavailable when nothing of it is left."""
        ...

    async def end_unclaimed(self) -> None:
        """End the sandboxes that nobody has restored. Called once, after the last `restore`."""
        ...


@runtime_checkable
class HandoverProvider(Protocol):
    """A provider whose sandboxes can outlive the server, with their processes as the supervisor's children."""

    def hand_over_with(self, supervisor: SupervisorClient) -> SandboxHandover:
        """Start all processes as the supervisor's children from now on. Called once, before anything is opened."""
        ...
