"""A form in two calls that take and return JSON, for workflows: `read` what it asks for, later `fill` and send it.

Days may lie between the two, so the second reads the form anew and compares its fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Receipt
from .questions import asked_schema, sorted_out
from .targets import open


def read(source: Any, values: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return what a form asks for: `schema`, `fingerprint`, `values` so far, and `missing` with the reason for each.

    `asked` is the schema of what is missing as a question to a person can have it; a password is in none.
    """
    form = open(source, **options)
    proposed = {**form.values, **form._known(values or {})}  # pyright: ignore[reportPrivateUsage]
    found, faults = sorted_out([*form.fields.values()], proposed)
    return {
        "form": form.source,
        "kind": form.kind,
        "title": form.title,
        "fingerprint": form.fingerprint,
        "schema": form.schema,
        "values": found,
        "missing": faults,
        "asked": asked_schema([form.fields[name] for name in faults]),
        "notes": form.notes,
    }


def fill(
    source: Any,
    values: Mapping[str, Any],
    *,
    by: Mapping[str, str] | str = "code",
    save: str = "",
    dry_run: bool = False,
    button: str = "",
    **options: Any,
) -> Receipt:
    """Fill in a form and save it to a file (a PDF, with `save`) or send it; return the receipt.

    `by` says who gave the values, or for each name who did. Nothing is saved or sent unless all required values fit.
    """
    form = open(source, **options)
    # What the form had already was not given by anybody.
    new = {name: value for name, value in values.items() if form.values.get(name) != value}
    givers = {name: by if isinstance(by, str) else by.get(name, "code") for name in new}
    for giver in dict.fromkeys(givers.values()):
        form.fill({name: value for name, value in new.items() if givers[name] == giver}, giver)
    return form.save(save) if save and not dry_run else form.submit(dry_run=dry_run, button=button)
