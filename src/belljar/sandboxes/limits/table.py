"""What a session may use, a row for each limit: the setting, and how the kernel and engines keep, count and prove it.

Who enforces, tells and tries limits reads them from here. Only data, and it can be imported on every system. What a
provider gives by other means is in the provider: the size of temporary folders is an option of their mounts, and a
virtual machine is made as large as the limits.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from belljar.sandboxes.base import Limits
from belljar.settings import MEBIBYTE

PERIOD_US = 100_000
"""The period in which shares of a processor are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of a session."""

    field: str
    """Of `Limits`."""
    setting: str
    unit: int = 1
    """How many of the kernel's units one of the setting's is."""
    is_shown: bool = False
    """Whether the console and the API tell it."""
    rlimit: str = ""
    """What limits each process, as setrlimit(2) and OCI name it; only where no control group has the limit."""
    counts_user: bool = False
    """Whether Linux counts that for a user, so that it needs one who has only this session."""
    controller: str = ""


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """The files of a controller in one hierarchy of control groups."""

    limits: Mapping[str, str]
    """What to write into which file; `{}` is the limit in the kernel's unit. The first file tells whether it is set."""
    hits: tuple[str, bytes]
    """The file and its entry that count how often the kernel enforced the limit."""
    optional: str = ""
    """The file that some kernels lack."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A program that hits a limit, for `belljar doctor`."""

    limits: Limits
    code: str
    """What the program does; it needs nothing but the interpreter."""
    proof: str
    """What to tell when the kernel stopped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLimit(Limit):
    """A limit that a controller of control groups enforces for all processes of a session together."""

    v1: GroupFiles
    v2: GroupFiles
    incident: Literal["out_of_memory", "too_many_processes"] | None
    """What to report when it was hit; None means that nothing fails then."""
    detail: str = ""
    """The incident's detail, where `{}` is the limit; that of memory tells more, and is made where it is measured."""
    docker_info: str
    """The entry of `docker info` that says whether the engine can limit it; podman names controllers."""
    engine_options: Callable[[Limits], Sequence[str]]
    """Return what an engine's `run` is given."""
    noun: str
    """In a sentence."""
    name: str
    """In the findings of `doctor`."""
    cost: str
    """What sessions go without where it is not enforced."""
    trial: Trial


def _memory_options(limits: Limits) -> Sequence[str]:
    # The second number is for memory and swap together.
    size = f"{limits.memory_mb}m"
    return ("--memory", size, "--memory-swap", size) if limits.memory_mb else ()


def _cpu_options(limits: Limits) -> Sequence[str]:
    # Engines refuse more processors than the host has.
    return ("--cpus", f"{min(limits.cpus, os.cpu_count() or 1):g}") if limits.cpus else ()


def _process_options(limits: Limits) -> Sequence[str]:
    # Engines have a limit of their own, which -1 takes away.
    return ("--pids-limit", str(limits.processes or -1))


LIMITS = (
    GroupedLimit(
        field="memory_mb",
        setting="memory_mb",
        unit=MEBIBYTE,
        is_shown=True,
        # Not RLIMIT_AS, because browsers and Arrow reserve far more addresses than they ever fill.
        rlimit="RLIMIT_DATA",
        controller="memory",
        # Hosts without swap accounting lack the second file. In v1 `memory.failcnt` stays 0 when memory and swap have
        # the same limit; `oom_kill` counts. In v2 `memory.oom.group` stays 0: the kernel then kills the largest
        # process, and not the earlier states of the session with it, nor the session for the sake of a program that it
        # started.
        v1=GroupFiles(
            {"memory.limit_in_bytes": "{}", "memory.memsw.limit_in_bytes": "{}"},
            ("memory.oom_control", b"oom_kill"),
            optional="memory.memsw.limit_in_bytes",
        ),
        v2=GroupFiles(
            {"memory.max": "{}", "memory.swap.max": "0"}, ("memory.events", b"oom_kill"), optional="memory.swap.max"
        ),
        incident="out_of_memory",
        docker_info="MemoryLimit",
        engine_options=_memory_options,
        noun="memory",
        name="memory",
        cost="each process of a session is limited by itself: many together can use up the machine's memory",
        trial=Trial(
            Limits(memory_mb=48),
            "held = b'x' * (96 << 20)",
            "held when hit: a program that wanted 96 MB was killed at 48 MB",
        ),
    ),
    GroupedLimit(
        field="cpus",
        setting="cpus",
        unit=PERIOD_US,
        is_shown=True,
        controller="cpu",
        v1=GroupFiles(
            {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": "{}"},
            ("cpu.stat", b"nr_throttled"),
        ),
        v2=GroupFiles({"cpu.max": f"{{}} {PERIOD_US}"}, ("cpu.stat", b"nr_throttled")),
        incident=None,
        docker_info="CpuCfsQuota",
        engine_options=_cpu_options,
        noun="CPU",
        name="processors",
        cost="a session is only placed on as many processors, which its code can undo",
        trial=Trial(
            Limits(cpus=0.1),
            "import time\nend = time.monotonic() + 0.25\nwhile time.monotonic() < end: pass",
            "held when hit: a busy program was stopped after 10% of each period",
        ),
    ),
    # Its files may be no larger; what they take together the server measures.
    Limit(field="disk_mb", setting="disk_mb", unit=MEBIBYTE, is_shown=True, rlimit="RLIMIT_FSIZE"),
    GroupedLimit(
        field="processes",
        setting="max_processes",
        is_shown=True,
        rlimit="RLIMIT_NPROC",
        counts_user=True,
        controller="pids",
        v1=GroupFiles({"pids.max": "{}"}, ("pids.events", b"max")),
        v2=GroupFiles({"pids.max": "{}"}, ("pids.events", b"max")),
        incident="too_many_processes",
        detail="wanted more than {:,} processes and threads, the limit",
        docker_info="PidsLimit",
        engine_options=_process_options,
        noun="processes",
        name="processes",
        cost="processes are counted for each user, where sessions have users of their own, or else not at all",
        trial=Trial(
            Limits(processes=8),
            # Those that it starts let go of the pipe, or it would not end before them.
            "import os, time\nfor _ in range(16):\n    if os.fork() == 0: os.close(2); time.sleep(9)",
            "held when hit: a program that wanted 16 processes was refused them at 8",
        ),
    ),
    Limit(field="temporary_mb", setting="temporary_mb", unit=MEBIBYTE),
    Limit(field="open_files", setting="max_open_files", rlimit="RLIMIT_NOFILE"),
)

CONTROLLERS = {limit.controller: limit for limit in LIMITS if isinstance(limit, GroupedLimit)}
"""The limits that control groups enforce, by the controllers we use, in the order in which their files are written."""
