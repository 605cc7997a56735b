"""What a control group of one sandbox can do, whichever hierarchy it is in."""

from pathlib import Path
from typing import Protocol


class Group(Protocol):
    """The control group of one sandbox."""

    folders: dict[str, Path]
    """By controller: those with a limit, and no others."""

    def entrances(self) -> list[str]:
        """Files that a process with one thread writes `0` to when it wants to come in."""
        ...

    def oom_kills(self) -> int:
        """How many processes were killed for want of memory, ever."""
        ...

    def refused_forks(self) -> int:
        """How many processes and threads were refused, ever."""
        ...

    def take_peak_bytes(self) -> int:
        """The most that was charged since the last call; 0 when unknown."""
        ...

    def cached_bytes(self) -> int:
        """What of it is copies of files on disk, which the kernel takes back when it needs room."""
        ...

    def members(self) -> set[int]:
        """The processes in it now."""
        ...

    def has(self, pid: int) -> bool:
        """Whether a process is in all of it."""
        ...

    def join(self, pid: int) -> None:
        """Move a process in; `ProcessLookupError` when it is gone."""
        ...

    def allow_processes(self, count: int) -> None:
        """Change how many there may be, where they are counted; those that are there stay."""
        ...

    def kill(self) -> None:
        """Kill everybody inside, without waiting."""
        ...

    def release(self) -> None:
        """Close what is open of it; may be called twice."""
        ...

    def remove(self) -> bool:
        """Remove it, if nobody is in it any more; whether it is gone."""
        ...
