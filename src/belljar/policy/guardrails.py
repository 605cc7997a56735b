"""The guardrails of a runtime: reads the policy file, adds the settings' rules to it and applies its limits to them."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from belljar.errors import PolicyError
from belljar.policy.decision_log import DecisionLog
from belljar.policy.guard import CompiledPolicy, Guard, compile_policy
from belljar.policy.policy_file import load_policy
from belljar.policy.rules import CodeRule, Policy, PolicyLimits
from belljar.settings import Settings

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_EMPTY = Policy.model_construct()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guardrails:
    """The policy and the settings that hold for every session of a runtime."""

    settings: Settings
    """The settings after the policy's limits were applied."""
    compiled: CompiledPolicy
    sections: Mapping[str, BaseModel] = field(default_factory=dict[str, BaseModel])
    """The file's tables that belong to other packages."""

    def trial(self) -> Guard:
        """Return a guard to learn what the policy would decide; it counts and logs nothing."""
        return Guard(compile_policy(self.compiled.policy))

    def guard(self, session_id: str, principal: str, folder: Path) -> Guard:
        """Return a session's guard, which keeps its state in `folder`."""
        return Guard(self.compiled, session_id, principal, folder)


def read_guardrails(
    settings: Settings, sections: Mapping[str, type[BaseModel]] = {}, *, is_logged: bool = False
) -> Guardrails:
    """Read the policy that the settings name. A faulty file raises, so that the server does not start.

    `is_logged` wants decisions in the log even if there is no policy, because plugins decide too.
    """
    is_wanted = bool(settings.policy or settings.blocked_patterns or settings.guardrails_strict)
    if not settings.guardrails:
        if is_wanted:
            log.warning("guardrails are switched off: the policy is not obeyed")
        decisions = DecisionLog(settings.data_directory) if is_logged else None
        return Guardrails(limited(settings, None), compile_policy(_EMPTY, decisions))
    loaded = load_policy(Path(settings.policy), sections) if settings.policy else None
    policy = loaded.policy if loaded else _EMPTY
    blocked = [blocking(settings.blocked_patterns)] if settings.blocked_patterns else []
    is_strict = policy.strict or settings.guardrails_strict
    policy = policy.model_copy(update={"code": [*policy.code, *blocked], "strict": is_strict})
    decisions = DecisionLog(settings.data_directory) if is_wanted or is_logged else None
    return Guardrails(
        limited(settings, policy.limits), compile_policy(policy, decisions), loaded.sections if loaded else {}
    )


def blocking(patterns: list[str]) -> CodeRule:
    """Return the rule of the setting `blocked_patterns`: a dotted name blocks its import and use, else a pattern."""
    names = [name for entry in patterns if _NAME.fullmatch(name := entry.strip().removesuffix("("))]
    others = [entry for entry in patterns if not _NAME.fullmatch(entry.strip().removesuffix("("))]
    reason = "it is one of blocked_patterns"
    try:
        return CodeRule.model_validate({"reason": reason, "imports": names, "calls": names, "patterns": others})
    except ValueError as error:
        raise PolicyError(
            f"blocked_patterns: {error}", hint="Write names like os.system, or patterns like open(_, 'w*')"
        ) from None


def limited(settings: Settings, limits: PolicyLimits | None) -> Settings:
    """Return the settings, made stricter where the policy says so."""
    changes: dict[str, object] = {}
    if not settings.allow_network_access or (limits and limits.allow_network_access is False):
        changes["egress"] = []
    elif limits and limits.allowed_networks is not None:
        changes["egress"] = limits.allowed_networks
    if limits and limits.max_execution_time is not None:
        changes["execution_timeout_s"] = min(settings.execution_timeout_s, limits.max_execution_time)
    if limits and limits.max_memory_mb is not None:
        changes["memory_mb"] = min(settings.memory_mb or limits.max_memory_mb, limits.max_memory_mb)
    if limits and limits.max_gpus is not None:
        changes["max_gpus"] = limits.max_gpus if settings.max_gpus is None else min(settings.max_gpus, limits.max_gpus)
    return settings.model_copy(update=changes) if changes else settings
