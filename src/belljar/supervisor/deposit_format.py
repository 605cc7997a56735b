"""The format of what one server leaves for the next: its version, and how the former format is read.

A deposit's fields are an object of JSON, and each is written with the format's version and that of belljar. To change
what any deposit holds, the notes of `kernels/handover_note.py` included: raise `FORM`, have `_upgraded` make the new
fields of those of the form before, and add the new fields to `tests/left`.
"""

from typing import Any

from belljar.distribution import own_version
from belljar.errors import SandboxUnavailable

FORM = 3
_FORMER = FORM - 1
_OWN = ("form", "version")
_RENAMED = {"is_left_alone": "is_alone", "kills_maker": "is_alone", "has_stage": "has_root_view"}
_ADDED_TO_SPEC: dict[str, Any] = {"folders": [], "devices": {}, "keeps_set_ids": False}


def written(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a deposit as they are stored."""
    return {"form": FORM, "version": own_version(), **fields}


def maker_of(stored: dict[str, Any]) -> str:
    """Return which belljar made a deposit, in words."""
    version = stored.get("version")
    return f"belljar {version}" if version else "an earlier version of belljar"


def unreadable(maker: str) -> SandboxUnavailable:
    """Return the error for what this version cannot read."""
    return SandboxUnavailable(f"it was made by {maker}, and this is belljar {own_version()}, which cannot read it")


def read(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a deposit as this version writes them; SandboxUnavailable for those it cannot read."""
    form = stored.get("form", 2)  # which was noted with kernels alone
    if form not in (_FORMER, FORM):
        raise unreadable(maker_of(stored))
    fields = {name: value for name, value in stored.items() if name not in _OWN}
    return _upgraded(fields) if form == _FORMER else fields


def _upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """Make the fields of form 3 of those of form 2, which had several names and fewer fields for a while."""
    fields = _renamed(fields)
    if "spec" in fields:  # a sandbox
        fields["spec"] = {**_ADDED_TO_SPEC, **fields["spec"]}
        fields["processes"] = [_renamed(process) for process in fields["processes"]]
    if "run" in fields:  # the control groups
        fields.setdefault("places", {})
    return fields


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in fields.items()}
