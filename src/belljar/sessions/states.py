"""Earlier states of a session that outlive its server: told to whoever keeps their processes, and made whole again."""

from collections.abc import Callable, Sequence

from belljar.kernels.base import Copyable
from belljar.kernels.handover import Handover, RestoredCopy
from belljar.sessions.beginnings import Beginning
from belljar.sessions.checkpoints import Checkpoint


class KeptStates:
    """Those of one session. See `belljar.sessions.checkpoints.Watcher`."""

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


def states_of(copies: Sequence[RestoredCopy], kernel: Copyable, begin: Callable[[], Beginning]) -> list[Checkpoint]:
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
