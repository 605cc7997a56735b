"""Checkpoints that outlive the server: deposited for the next one, and restored from what an earlier one deposited."""

from collections.abc import Callable, Sequence

from belljar.kernels.base import ForkableKernel
from belljar.provisioning.handover import Handover, RestoredCheckpoint
from belljar.sessions.checkpoints import Checkpoint, CheckpointWatcher, FreshCheckpoint


class CheckpointDeposits(CheckpointWatcher):
    """Deposits the checkpoints of one session for the next server."""

    def __init__(self, session_id: str, handover: Handover) -> None:
        self._session_id = session_id
        self._handover = handover

    def on_change(self, checkpoint: Checkpoint) -> None:
        """Deposit a checkpoint, so that it outlives the server."""
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
