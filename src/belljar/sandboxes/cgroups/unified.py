"""Groups of the unified hierarchy, v2: one tree for all controllers."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from belljar.sandboxes.base import Limits
from belljar.sandboxes.cgroups.folders import MEBIBYTE, PERIOD_US, Folders, write


@dataclass(slots=True)
class UnifiedGroup(Folders):
    """A group of the v2 hierarchy: one folder."""

    _peak: int = -1

    @property
    def _folder(self) -> Path | None:
        return next(iter(self.folders.values()), None)

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers it has."""
        if folder := self.folders.get("memory"):
            write(folder / "memory.max", limits.memory_mb * MEBIBYTE)
            with contextlib.suppress(FileNotFoundError):
                write(folder / "memory.swap.max", 0)
            self.open_peak(folder / "memory.peak")
        if folder := self.folders.get("cpu"):
            write(folder / "cpu.max", f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", limits.processes)

    def open_peak(self, path: Path) -> None:
        """From Linux 6.12 on a peak is reset for the descriptor that wrote to it; before, it cannot be."""
        with contextlib.suppress(OSError):
            self._peak = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def entrances(self) -> list[str]:
        """See the contract."""
        folder = self._folder
        return [str(folder / "cgroup.procs")] if folder else []

    def oom_kills(self) -> int:
        """See the contract."""
        return self.entry("memory", "memory.events", b"oom_kill")

    def refused_forks(self) -> int:
        """See the contract."""
        return self.entry("pids", "pids.events", b"max")

    def take_peak_bytes(self) -> int:
        """See the contract."""
        if self._peak < 0:
            return 0
        try:
            peak = int(os.pread(self._peak, 64, 0))
            os.pwrite(self._peak, b"0\n", 0)
        except (OSError, ValueError):
            return 0
        return peak

    def cached_bytes(self) -> int:
        """See the contract."""
        cache, shared = self.entries("memory", "memory.stat", b"file", b"shmem")
        return max(0, cache - shared)

    def kill(self) -> None:
        """`cgroup.kill` (Linux 5.14) leaves no moment for a fork to slip away."""
        folder = self._folder
        try:
            if folder is not None:
                write(folder / "cgroup.kill", 1)
        except OSError:
            Folders.kill(self)

    def release(self) -> None:
        """See the contract."""
        if self._peak >= 0:
            os.close(self._peak)
            self._peak = -1
        Folders.release(self)
