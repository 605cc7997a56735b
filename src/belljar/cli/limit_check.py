"""The checks of `belljar doctor` on the limits of sessions, each proved by hitting it."""

import asyncio
import logging

from belljar.sandboxes.base import HostCheck
from belljar.sandboxes.limits.cgroup_discovery import CONTROLLERS, ControlGroups
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.limits.systemd_scope import request_scope
from belljar.sandboxes.limits.trials import LimitTrial, try_limits
from belljar.settings import Settings
from belljar.settings.azure import AZURE

_NAMES = {"memory": "memory", "cpu": "processors", "pids": "processes"}
_COSTS = {
    "memory": "each process of a session is limited by itself: many together can use up the machine's memory",
    "cpu": "a session is only placed on as many processors, which its code can undo",
    "pids": "processes are counted for each user, where sessions have users of their own, or else not at all",
}
_ELSEWHERE = {"container": "the engine", "microvm": "the virtual machine"}


def check_limits(settings: Settings) -> list[HostCheck]:
    """Return what bounds a session here; a check that is not ok never prevents one, and says what that costs."""
    if settings.environment == AZURE:
        return [HostCheck("limits", True, "the pool sets those of its sessions")]
    if owner := _ELSEWHERE.get(settings.sandbox):
        return [HostCheck("limits", True, f"{owner} sets those of sessions; see the line of the sandbox")]
    enforcer = Enforcer(asks_systemd=settings.systemd_scope)
    offer = enforcer.groups.offer
    logging.disable(logging.WARNING)  # the checks report what it would warn of
    try:
        tried = {trial.controller: trial for trial in asyncio.run(try_limits(enforcer))}
    finally:
        logging.disable(logging.NOTSET)
    is_there = offer.kind != "none"
    kind = HostCheck("control groups", is_there, _hierarchy(offer), "" if is_there else enforcer.advice)
    return [kind, *(_check(enforcer, tried.get(name), name) for name in CONTROLLERS)]


def _hierarchy(offer: ControlGroups) -> str:
    if offer.kind == "none":
        return "no hierarchy is mounted"
    places = ", ".join(sorted({str(place) for place in offer.usable().values()}))
    return f"{offer.kind}, " + (f"those of sessions are made below {places}" if places else "none can be made by us")


def _check(enforcer: Enforcer, trial: LimitTrial | None, controller: str) -> HostCheck:
    if trial is None:
        folder = enforcer.groups.offer.folders.get(controller)
        reason = f"{folder.parent if folder else 'our control group'} is not ours to divide"
        refusal = request_scope() if enforcer.asks_systemd else ""
        trial = LimitTrial(
            controller, False, "; ".join(filter(None, ("not for a session as a whole: " + reason, refusal)))
        )
    name, cost = _NAMES[controller], _COSTS[controller]
    return HostCheck(name, trial.is_enforced, trial.detail, "" if trial.is_enforced else enforcer.advice, cost)
