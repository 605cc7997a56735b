"""Proves the limits of sessions by hitting them, for `belljar doctor`.

That a file can be written does not tell that the kernel obeys. So each trial makes a control group in the way the first
session will, lets a program in it go beyond one limit, and asks the kernel whether it was stopped. It takes about a
third of a second, which is why servers do not do it at their start.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from belljar.errors import BelljarError
from belljar.sandboxes.base import Limits
from belljar.sandboxes.limits.cgroups import ControlGroup
from belljar.sandboxes.limits.enforcement import Enforcer

__all__ = ["LimitTrial", "try_limits"]

_TIMEOUT_S = 60.0
_MEMORY_MB = 48
_PROCESSES = 8
_CPUS = 0.1


@dataclass(frozen=True, slots=True)
class LimitTrial:
    """What came of trying one limit."""

    controller: str
    is_enforced: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Attempt:
    limits: Limits
    code: str
    """What the program does; it needs nothing but the interpreter."""
    count: Callable[[ControlGroup], int]
    """How often the kernel stopped it."""
    proof: str


_ATTEMPTS = {
    "memory": _Attempt(
        Limits(memory_mb=_MEMORY_MB),
        f"held = b'x' * ({2 * _MEMORY_MB} << 20)",
        lambda group: group.oom_kills(),
        f"held when hit: a program that wanted {2 * _MEMORY_MB} MB was killed at {_MEMORY_MB} MB",
    ),
    "cpu": _Attempt(
        Limits(cpus=_CPUS),
        "import time\nend = time.monotonic() + 0.25\nwhile time.monotonic() < end: pass",
        lambda group: group.throttled_periods(),
        f"held when hit: a busy program was stopped after {_CPUS:.0%} of each period",
    ),
    "pids": _Attempt(
        Limits(processes=_PROCESSES),
        # Those that it starts let go of the pipe, or it would not end before them.
        f"import os, time\nfor _ in range({2 * _PROCESSES}):\n    if os.fork() == 0: os.close(2); time.sleep(9)",
        lambda group: group.refused_forks(),
        f"held when hit: a program that wanted {2 * _PROCESSES} processes was refused them at {_PROCESSES}",
    ),
}


async def try_limits(enforcer: Enforcer) -> list[LimitTrial]:
    """Hit every limit that control groups seem to give here; return for each whether the kernel enforced it."""
    return [await _try_limit(enforcer, controller) for controller in enforcer.groups.controllers]


async def _try_limit(enforcer: Enforcer, controller: str) -> LimitTrial:
    attempt = _ATTEMPTS[controller]
    try:
        enforcement = enforcer.enforce("doctor", attempt.limits)
    except BelljarError as error:
        return LimitTrial(controller, False, error.message)
    try:
        if (group := enforcement.group) is None:
            return LimitTrial(controller, False, "no control group can be made for it")
        command = enforcement.guarded([sys.executable, "-I", "-S", "-c", attempt.code])
        complaint = await asyncio.to_thread(_complaint_of, command)
        if attempt.count(group):
            return LimitTrial(controller, True, attempt.proof)
        return LimitTrial(controller, False, f"the limit was set and did not hold{complaint and f': {complaint}'}")
    finally:
        # This also ends the processes that the program has left in the group.
        await enforcement.release()


def _complaint_of(command: list[str]) -> str:
    """Run a program that may well be killed; return the last thing it said."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [""])[-1][:200]
