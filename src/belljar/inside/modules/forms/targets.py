"""Which kind of form a source is: the targets that are known, and those that the operator's plugins add.

A target is a module with `open_form(source, options)`, which returns None for a source that is none of its own.
Plugins' targets are asked first. They are files that the operator shows to sessions, and run like a session's code.

For workflows, a form is two calls that take and return JSON: `read` what it asks for, later `fill` and send it. Days
may lie between the two, so the second reads the form anew and compares its fingerprint.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .base import Form, Receipt
from .errors import FormChanged, FormError
from .questions import asked_schema, sorted_out

VARIABLE = "BELLJAR_FORM_TARGETS"
"""The folder of the files of plugins that bring targets; the host sets it."""
Target = Callable[[Any, Mapping[str, Any]], Any]
_own: dict[str, Target] = {}
_added: dict[str, Target] = {}


def register(name: str, target: Target) -> None:
    """Add a target for this session, or replace the one of that name that was added before."""
    _added[name] = target


def open(
    source: Any,
    *,
    form: str = "",
    url: str = "",
    browser: str = "",
    password: str = "",
    fingerprint: str = "",
    **options: Any,
) -> Form:
    """Read a form: the path of a PDF or HTML file, a URL, HTML text, or bytes of either.

    `form` chooses among the forms of a page by id, name or number; `url` is where HTML text came from; `browser` names
    a browser server of the toolbox; `fingerprint` is that of an earlier reading, and another form raises FormChanged.
    """
    known = {"form": form, "url": url, "browser": browser, "password": password, **options}
    _load()
    for target in (*_added.values(), *_own.values()):
        found = target(source, known)
        if found is not None:
            if fingerprint and found.fingerprint != fingerprint:
                raise FormChanged(f"{found.source} is not the form that was read before: read its schema again")
            return found
    raise FormError(f"{source!r:.200} is no form that is known here: pass a path, a URL, or HTML")


def targets() -> list[str]:
    """Return the names of the targets, those asked first in front."""
    _load()
    return [*_added, *_own]


def _load() -> None:
    """Load belljar's own targets and the plugins' files, each once; a file that fails is named."""
    if not _own:
        from . import browser, http, pdf

        _own.update(browser=browser.open_form, pdf=pdf.open_form, http=http.open_form)
    folder = os.environ.get(VARIABLE, "")
    for file in sorted(Path(folder).glob("*.py")) if folder else ():
        if file.stem in _added:
            continue
        name = f"forms_target_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        try:
            module: Any = importlib.util.module_from_spec(spec)  # pyright: ignore[reportArgumentType]
            sys.modules[name] = module  # so that its forms can be pickled with the session
            spec.loader.exec_module(module)  # pyright: ignore
            register(file.stem, module.open_form)
        except Exception as error:
            raise FormError(f"the form target {file.stem} of a plugin cannot be loaded: {error!r}") from error


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
