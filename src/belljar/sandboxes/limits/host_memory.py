"""How much memory the server and its sessions may have together: the machine's, or less in a container or service.

Where that is too little, Linux kills the server itself, which then can say nothing. So it is said when the server
starts.
"""

from pathlib import Path

from belljar.sandboxes.limits.cgroup_discovery import read_membership, read_own_group
from belljar.settings import MEBIBYTE

NEEDED_MB = 160
"""A server takes some 60 MB, a session with an idle kernel 40 to 60, and both need some room for work."""
_TOP_V1 = Path("/sys/fs/cgroup/memory")
"""Our own group in a container on a v1 host, where the path that Linux tells is the host's."""
_LIMITS = ("memory.max", "memory.limit_in_bytes")


def memory_allowance_mb(process: Path = Path("/proc/self")) -> int:
    """Return the machine's memory, or the lowest limit of the groups that this process is in; 0 where unknown."""
    known = [limit for limit in (_machine_bytes(process), _group_bytes(process)) if limit]
    return min(known, default=0) // MEBIBYTE


def memory_shortage(process: Path = Path("/proc/self")) -> str:
    """Return a sentence if there is too little memory for a server and one session, or nothing."""
    allowed = memory_allowance_mb(process)
    if not 0 < allowed < NEEDED_MB:
        return ""
    return (
        f"This host or container has {allowed} MB of memory for the server and its sessions, and they need "
        f"{NEEDED_MB} MB or more: Linux may kill the server at any time. Give it more, such as `docker run -m 512m`"
    )


def _machine_bytes(process: Path) -> int:
    try:
        fields = (process.parent / "meminfo").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * 1024 if fields[:1] == ["MemTotal:"] else 0


def _group_bytes(process: Path) -> int:
    """Return the lowest limit of our group and those above it, as far as they are visible."""
    own = read_own_group(process) or read_membership(process).folders.get("memory", _TOP_V1)
    found: list[int] = []
    for folder in (own, *own.parents):
        for name in _LIMITS:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                found.append(int(text))
    return min(found, default=0)
