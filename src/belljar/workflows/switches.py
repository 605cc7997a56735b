"""Switches that another system's workflow files have under `guardrails`, and the rules of belljar's that they become.

A switch for which there is no rule is refused or told, never dropped: somebody relies on it.
"""

from collections.abc import Mapping
from typing import Any, cast

from belljar.errors import PolicyError
from belljar.policy.guardrails import blocking
from belljar.policy.rules import CodeRule

_HIDE = ("privacy_protection", "pii_detection", "tokenization")
_LIMITS = ("max_execution_time", "max_memory_mb", "allowed_networks")
_WITHOUT_RULE = {
    "content_filtering": "what outputs must not hold is a rule in `output`",
    "security_checks": "what code must not do is a rule in `code`, and the sandbox holds code in any case",
    "rate_limiting": "how often a tool may be called is `rate` or `max_calls` of a rule in `tools`",
}
"""Switches that mean rules which the other system has built in, and what to write in their place."""
_FLAGS = ("enabled", "strict_mode", *_HIDE, *_WITHOUT_RULE)
HIDDEN = {"hide": ["email", "phone", "card", "iban", "national_id"], "phone_regions": ["US"]}
"""The privacy rules of a switch. Numbers without a country's code count as American, as in the other system."""
SCHEMA: dict[str, Any] = {
    **{name: {"type": "boolean", "description": "A switch of another system's files"} for name in _FLAGS},
    "max_execution_time": {"type": "number", "description": "As in limits"},
    "blocked_patterns": {"type": "array", "items": {"type": "string"}, "description": "As the setting of that name"},
}


def with_own_rules(value: Any) -> Any:
    """Return a table of guardrails with rules of belljar's in place of switches; None for one that is switched off."""
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    for name in _FLAGS:
        if given.get(name, False) not in (True, False):
            raise ValueError(f"{name} is neither true nor false")
    if given.get("enabled") is False:
        return None
    switches = {*_FLAGS, *_LIMITS, "blocked_patterns"}
    rules = {name: each for name, each in given.items() if name not in switches}
    if given.get("strict_mode"):
        rules["strict"] = True
    if any(given.get(name) for name in _HIDE):
        rules["privacy"] = _with_hidden(rules.get("privacy", {}))
    # An empty list of networks is what every session has without it.
    if limits := {name: given[name] for name in _LIMITS if given.get(name) not in (None, [])}:
        written = rules.get("limits", {})
        rules["limits"] = {**limits, **cast("dict[str, Any]", written)} if isinstance(written, dict) else written
    if patterns := given.get("blocked_patterns"):
        rules["code"] = [*_listed(rules.get("code", [])), _blocking(patterns)]
    return rules


def switch_notes(value: Any) -> list[str]:
    """Return, in words, which switches of a table do less or something else than they say."""
    given: Mapping[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if given.get("enabled") is False:
        return ["enabled: false switches off these guardrails alone; the policy of the server holds in any case"]
    notes = [f"{name} does nothing by itself: {instead}" for name, instead in _WITHOUT_RULE.items() if given.get(name)]
    if given.get("tokenization") is False and any(given.get(name) for name in _HIDE):
        notes.append("what is found of personal data is replaced by tokens, with tokenization: false, too")
    return notes


def _with_hidden(written: Any) -> Any:
    if not isinstance(written, dict):
        return written  # it is told to be no table
    table = cast("dict[str, Any]", written)
    return {**table, **{name: [*_listed(table.get(name, [])), *each] for name, each in HIDDEN.items()}}


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _blocking(patterns: Any) -> CodeRule:
    found = _listed(patterns)
    if not all(isinstance(each, str) for each in found):
        raise ValueError("blocked_patterns is no list of texts")
    try:
        return blocking(cast("list[str]", found))
    except PolicyError as error:
        raise ValueError(str(error)) from None
