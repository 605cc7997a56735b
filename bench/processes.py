"""What the operating system tells of processes: who descends from whom, and the memory they hold."""

from collections import defaultdict
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """All processes below one, itself not among them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            children[int(stat[stat.rindex(")") + 2 :].split()[1])].append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        waiting += (new := [child for child in children[waiting.pop()] if child not in found])
        found.update(new)
    return found


def proportional_mb(pids: set[int]) -> float:
    """PSS: private memory, and of each shared page the share that is theirs."""
    return sum(_field_kb(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids) / 1024


def resident_mb(pid: int) -> float:
    """RSS now."""
    return _field_kb(Path(f"/proc/{pid}/status"), "VmRSS:") / 1024


def peak_resident_mb(pid: int) -> float:
    """RSS at its highest."""
    return _field_kb(Path(f"/proc/{pid}/status"), "VmHWM:") / 1024


def _field_kb(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
