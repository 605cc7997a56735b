"""Earlier states of a session that outlive its server: told to whoever keeps their processes, and made whole again."""

from collections.abc import Callable
from typing import Any

from belljar.kernels.copy_custody import CopyCustody
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.sleepers import SleepingKernel
from belljar.sessions.beginnings import Beginning
from belljar.sessions.checkpoints import Checkpoint

Kept = list[tuple[dict[str, Any], SleepingKernel | None]]
"""What was said of each state, and its copy, where it is one."""


class KeptStates:
    """Those of one session. See `belljar.sessions.checkpoints.Watcher`."""

    def __init__(self, session_id: str, custody: CopyCustody) -> None:
        self._session_id = session_id
        self._custody = custody

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
        self._custody.keep(self._session_id, checkpoint.label, checkpoint.origin, checkpoint.copy, words)

    def dropped(self, checkpoint: Checkpoint) -> None:
        """It is over."""
        self._custody.drop(self._session_id, checkpoint.label)


def states_of(kept: Kept, kernel: IPythonKernel, begin: Callable[[], Beginning]) -> list[Checkpoint]:
    """The states that an earlier server kept of a session with this kernel."""
    states: list[Checkpoint] = []
    for words, copy in kept:
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
