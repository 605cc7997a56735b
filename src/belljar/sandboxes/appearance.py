"""The machine as a session sees it: as many processors and as much memory as its limits allow.

Libraries size themselves by what they find: threads by `/sys/devices/system/cpu` and the scheduler's mask, buffers by
`/proc/meminfo`. Control groups change none of these. Only texts; `bubblewrap.py` puts them in place.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from belljar.sandboxes.base import Limits

_CORES = re.compile(r"^((?:siblings|cpu cores)\s*: )\d+", re.MULTILINE)


def processor_count(limits: Limits) -> int:
    """How many processors a session may think it has; 0: as many as there are."""
    count = math.ceil(limits.cpus)
    return count if 0 < count < len(os.sched_getaffinity(0)) else 0


def machine_files(limits: Limits) -> dict[str, str]:
    """Files to show instead of the host's, by path."""
    files: dict[str, str] = {}
    if count := processor_count(limits):
        numbers = "0" if count == 1 else f"0-{count - 1}"
        for name in ("online", "possible", "present"):
            files[f"/sys/devices/system/cpu/{name}"] = numbers + "\n"
        files["/proc/cpuinfo"] = _first_processors(_read("/proc/cpuinfo"), count)
    if limits.memory_mb and (text := _meminfo(_read("/proc/meminfo"), limits.memory_mb * 1024)):
        files["/proc/meminfo"] = text
    return {path: text for path, text in files.items() if text}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _first_processors(cpuinfo: str, count: int) -> str:
    blocks = [block + "\n\n" for block in cpuinfo.strip().split("\n\n")[:count] if block]
    return _CORES.sub(rf"\g<1>{count}", "".join(blocks))


def _meminfo(meminfo: str, limit_kb: int) -> str:
    """All of the limit is free when the session starts; what the host does with its memory is not the session's."""
    lines = [line.partition(":") for line in meminfo.splitlines()]
    total = next((int(rest.split()[0]) for name, _, rest in lines if name == "MemTotal"), 0)
    return "".join(_meminfo_lines([name for name, _, _ in lines], limit_kb)) if total > limit_kb else ""


def _meminfo_lines(names: list[str], limit_kb: int) -> Iterator[str]:
    for name in names:
        kilobytes = limit_kb if name in ("MemTotal", "MemFree", "MemAvailable") else 0
        yield f"{name + ':':<16}{kilobytes:>8} kB\n"
