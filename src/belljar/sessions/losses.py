"""What became of a session's variables when its kernel changed, in a form that executions tell."""

from dataclasses import dataclass

from belljar.models import State


@dataclass(frozen=True, slots=True)
class Loss:
    """What went with a kernel that died, told to the next execution."""

    names: tuple[str, ...]
    notice: str
    state: State = "lost"


@dataclass(frozen=True, slots=True)
class Burial:
    """What is left after a kernel died: nothing, or the state of a checkpoint."""

    lost: tuple[str, ...]
    is_rewound: bool = False
    since: str = ""
    """The first execution that was taken back."""

    @property
    def state(self) -> State:
        """What became of the session's variables."""
        return "rewound" if self.is_rewound else "lost"
