"""What the operating system tells of processes: who descends from whom, and the memory they hold."""

import contextlib
import os
import resource
import secrets
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path


def children(pid: int) -> set[int]:
    """The processes that one has started and that still run."""
    return {child for child, parent in _parents().items() if parent == pid}


def descendants(pid: int) -> set[int]:
    """All processes below one, itself not among them."""
    below: defaultdict[int, list[int]] = defaultdict(list)
    for child, parent in _parents().items():
        below[parent].append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        waiting += (new := [child for child in below[waiting.pop()] if child not in found])
        found.update(new)
    return found


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    return parents


def proportional_mb(pids: set[int]) -> float:
    """PSS: private memory, and of each shared page the share that is theirs."""
    return sum(_field_kb(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids) / 1024


def resident_mb(pid: int) -> float:
    """RSS now."""
    return _field_kb(Path(f"/proc/{pid}/status"), "VmRSS:") / 1024


def peak_resident_mb(pid: int) -> float:
    """RSS at its highest."""
    return _field_kb(Path(f"/proc/{pid}/status"), "VmHWM:") / 1024


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor time of one process and of its children that have ended and were waited for, in seconds."""

    own_s: float = 0.0
    of_children_s: float = 0.0


def processor_time(pid: int) -> ProcessorTime:
    """Zero for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ProcessorTime()
    user, system, of_children, system_of_children = map(int, text[text.rindex(")") + 2 :].split()[11:15])
    tick = os.sysconf("SC_CLK_TCK")
    return ProcessorTime(_exact_s(pid) or (user + system) / tick, (of_children + system_of_children) / tick)


def _exact_s(pid: int) -> float:
    """In nanoseconds where Linux has them: a process that took 9 ms has taken no tick of 10 ms."""
    try:
        return (
            sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
        )
    except OSError:
        return 0.0


@contextlib.contextmanager
def whole_processor_time() -> Generator[tuple[Callable[[], float], str]]:
    """Yield what tells the processor time of this process and of all that it starts, and what that leaves out, if any.

    A control group of cgroup v1 counts all. Without one, those are missing that nobody waits for, such as processes
    that end with their sandbox.
    """
    group = Path("/sys/fs/cgroup/cpuacct") / f"belljar-bench-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError:
        yield _waited_for_s, "without the kernels themselves, which nothing here counts"
        return
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield lambda: int((group / "cpuacct.usage").read_text()) / 1e9, ""
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (group.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()


def _waited_for_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def command_line(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _field_kb(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
