"""Proves the limits of sessions by hitting them, for `belljar doctor`.

That a file can be written does not tell that the kernel obeys. So each trial makes a control group in the way the first
session will, lets a program in it go beyond one limit, and asks the kernel whether it was stopped. It takes about a
third of a second, which is why servers do not do it at their start.
"""

import asyncio
import sys

from belljar.errors import BelljarError
from belljar.sandboxes.child import ProgramSilent, run_program
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.limits.table import CONTROLLERS

_TIMEOUT_S = 60.0


async def try_limits(enforcer: Enforcer) -> dict[str, str]:
    """Hit every limit that control groups seem to give here; return for each why it did not hold, or nothing."""
    return {controller: await _try_limit(enforcer, controller) for controller in enforcer.groups.controllers}


async def _try_limit(enforcer: Enforcer, controller: str) -> str:
    trial = CONTROLLERS[controller].trial
    try:
        enforcement = enforcer.enforce("doctor", trial.limits)
    except BelljarError as error:
        return error.message
    try:
        if (group := enforcement.group) is None:
            return "no control group can be made for it"
        command = enforcement.limited_command([sys.executable, "-I", "-S", "-c", trial.code])
        complaint = await asyncio.to_thread(_complaint_of, command)
        if group.hits(controller):
            return ""
        return f"the limit was set and did not hold{complaint and f': {complaint}'}"
    finally:
        # This also ends the processes that the program has left in the group.
        await enforcement.release()


def _complaint_of(command: list[str]) -> str:
    """Run a program that may well be killed; return the last thing it said."""
    try:
        errors = run_program(command, timeout_s=_TIMEOUT_S).errors
    except ProgramSilent as silence:
        return str(silence)
    return (errors.strip().splitlines() or [""])[-1][:200]
