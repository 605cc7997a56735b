"""Groups of the old hierarchy, v1: a tree for each controller."""

import contextlib
from dataclasses import dataclass

from belljar.sandboxes.base import Limits
from belljar.sandboxes.cgroups.folders import MEBIBYTE, PERIOD_US, Folders, write


@dataclass(slots=True)
class OldGroup(Folders):
    """A group of the v1 hierarchy: a folder in each controller's tree."""

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers it has."""
        if folder := self.folders.get("memory"):
            size = limits.memory_mb * MEBIBYTE
            write(folder / "memory.limit_in_bytes", size)
            # Hosts without swap accounting have no such file; with no swap to use, nothing is lost.
            with contextlib.suppress(FileNotFoundError):
                write(folder / "memory.memsw.limit_in_bytes", size)
        if folder := self.folders.get("cpu"):
            write(folder / "cpu.cfs_period_us", PERIOD_US)
            write(folder / "cpu.cfs_quota_us", round(limits.cpus * PERIOD_US))
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", limits.processes)

    def entrances(self) -> list[str]:
        """`tasks` and not `cgroup.procs`: moving only itself, a process need not stop all others (1 ms for 15)."""
        return [str(folder / "tasks") for folder in self.folders.values()]

    def oom_kills(self) -> int:
        """`memory.failcnt` stays 0 when memory and swap have the same limit: only `oom_kill` tells."""
        return self.entry("memory", "memory.oom_control", b"oom_kill")

    def refused_forks(self) -> int:
        """See the contract."""
        return self.entry("pids", "pids.events", b"max")

    def take_peak_bytes(self) -> int:
        """See the contract."""
        peak = int(self.read("memory", "memory.max_usage_in_bytes") or 0)
        self.reset("memory", "memory.max_usage_in_bytes")
        return peak

    def cached_bytes(self) -> int:
        """See the contract."""
        cache, shared = self.entries("memory", "memory.stat", b"total_cache", b"total_shmem")
        return max(0, cache - shared)
