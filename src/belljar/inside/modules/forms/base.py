"""What all forms share: fields, values and who gave each, what is missing, a preview, and receipts.

A target subclasses `Form` and implements `save` or `_send`. Forms hold plain data only, because sessions are saved,
forked and woken with them.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from .errors import FormChanged, FormError, InvalidValues
from .questions import ask_for, sorted_out
from .schema import MAX_FIELDS, Field, converted, expected_value, is_empty, object_schema, tidy

Receipt = dict[str, Any]
"""What was done with a form: JSON, so that a workflow or a file can keep it."""
_HIDDEN = "•••"
_MAX_SHOWN = 200
_LARGEST_BYTES = 100 * 1024 * 1024


class Preview(str):
    """A form with its values, as text; a cell whose last line it is shows it."""

    def __repr__(self) -> str:
        return str(self)


class Form:
    """A form that was read from a document or a page. Nothing leaves it before `save` or `submit`."""

    kind = "form"

    def __init__(self, source: str, fields: list[Field], title: str = "", notes: list[str] | None = None) -> None:
        if not fields:
            raise FormError(f"{source} has no field that could be filled in")
        if len(fields) > MAX_FIELDS:
            raise FormError(f"{source} has {len(fields):,} fields, the most is {MAX_FIELDS:,}")
        self.source = source
        self.title = title
        self.notes = list(notes or ())
        """What the form has that is not filled in here, such as a signature."""
        self.fields = {one.name: one for one in fields}
        self.values: dict[str, Any] = {one.name: one.value for one in fields if not is_empty(one.value)}
        self.given_by: dict[str, str] = dict.fromkeys(self.values, "the form")
        self._sent = ""

    # Reading

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values: types, options, limits, and which are required."""
        return object_schema([*self.fields.values()], self.title)

    @property
    def fingerprint(self) -> str:
        """Return a digest of what the form asks for; another one means that the form has changed."""
        asked = [
            (
                one.name,
                one.is_required,
                {key: value for key, value in one.schema.items() if key != "description"},
            )
            for one in self.fields.values()
        ]
        text = json.dumps([self.kind, asked, self._destination()], sort_keys=True, default=str)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]

    def _destination(self) -> str:
        """Return where the form goes, without what differs from one reading to the next."""
        return ""

    def missing(self, values: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Return why each field still needs a value, by name, if `values` were filled in; empty when all is there."""
        return sorted_out([*self.fields.values()], {**self.values, **self._known(values or {})})[1]

    # Filling in

    def fill(self, values: Mapping[str, Any], by: str = "code") -> Form:
        """Put values in; `by` says in the receipt who gave them. If one does not fit, none is put in."""
        found: dict[str, Any] = {}
        faults: dict[str, str] = {}
        for name, value in self._known(values).items():
            try:
                found[name] = None if is_empty(value) else converted(self.fields[name], value)
            except ValueError as error:
                faults[name] = str(error)
        if faults:
            lines = "; ".join(
                f"{name!r}: {why}; it takes {expected_value(self.fields[name])}" for name, why in faults.items()
            )
            raise InvalidValues(f"these values do not fit, and nothing was filled in: {lines}", faults)
        for name, value in found.items():
            self._check_value(self.fields[name], value)
        self.values.update(found)
        self.given_by.update(dict.fromkeys(found, by))
        return self

    def ask(self, values: Mapping[str, Any] | None = None, message: str = "", by: str = "code") -> Form:
        """Fill in what fits of `values`, and ask the person for what is required and missing or does not fit."""
        proposed = self._known(values or {})
        found, faults = sorted_out([*self.fields.values()], {**self.values, **proposed})
        answers = ask_for([self.fields[name] for name in faults], faults, message or self._question(len(faults)))
        self.fill({name: found[name] for name in proposed if name in found}, by)
        return self.fill(answers, "the person")

    def _question(self, count: int) -> str:
        return f"{self.title or self.source} needs {count} value{'s' if count > 1 else ''} from you."

    def _known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values by the names of their fields; a field's label does as well where only one has it."""
        by_label: dict[str, list[str]] = {}
        for one in self.fields.values():
            by_label.setdefault(one.label.lower(), []).append(one.name)
        known: dict[str, Any] = {}
        unknown: dict[str, str] = {}
        for name, value in values.items():
            meant = [name] if name in self.fields else by_label.get(str(name).lower(), [])
            if len(meant) == 1:
                known[meant[0]] = value
            else:
                unknown[str(name)] = "is not in the form" if not meant else f"is the label of {len(meant)} fields"
        if unknown:
            lines = "; ".join(f"{name!r} {why}" for name, why in unknown.items())
            names = ", ".join(map(repr, [*self.fields][:_MAX_SHOWN]))
            raise InvalidValues(f"{lines}. Its fields are {names}", unknown)
        return known

    def _check_value(self, field: Field, value: Any) -> None:
        """Raise FormError for a value that this target cannot take."""

    # Showing

    def preview(self) -> Preview:
        """Return the form as text: every field with its value and who gave it, and what is missing."""
        faults = self.missing()
        lines = [f"{self.title or self.source} ({self.kind})", *self._preview_lines()]
        for one in self.fields.values():
            value = self._shown(one)
            if one.name in faults:
                note = f"MISSING: {faults[one.name]}, takes {expected_value(one)}"
            else:
                note = f"by {self.given_by[one.name]}" if one.name in self.given_by else ""
            label = "" if one.label == one.name else f" [{tidy(one.label, 60)}]"
            lines.append(f"  {one.name}{label} = {value}{f'   ({note})' if note else ''}")
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(f"{len(faults)} missing" if faults else "complete")
        return Preview("\n".join(lines))

    def _preview_lines(self) -> list[str]:
        return []

    def _shown(self, field: Field) -> Any:
        """Return a field's value as a preview or a receipt may show it."""
        value = self.values.get(field.name)
        return _HIDDEN if field.schema.get("writeOnly") and not is_empty(value) else value

    def __repr__(self) -> str:
        faults = [*self.missing()]
        state = f"{len(faults)} missing: {', '.join(faults[:10])}" if faults else "complete"
        return f"<{self.kind} form {self.source}, {len(self.fields)} fields, {state}>"

    # Sending

    def save(self, path: str, *, is_draft: bool = False) -> Receipt:
        """Write the filled document to a file; without `is_draft` only when all required values are there."""
        raise FormError(f"a {self.kind} form is sent, not saved: use submit()")

    def submit(self, *, dry_run: bool = False, button: str = "", again: bool = False) -> Receipt:
        """Send the form, once, and return the receipt; `dry_run` returns what would be sent and sends nothing."""
        self._check_complete()
        if dry_run:
            return self._receipt("dry run", would_send=self._would_send(button))
        if self._sent and not again:
            raise FormError(f"it was already sent, at {self._sent}; pass again=True to send it once more")
        return self._send(button)

    def _would_send(self, button: str) -> Any:
        raise FormError(f"a {self.kind} form is saved, not sent: use save(path)")

    def _send(self, button: str) -> Receipt:
        raise FormError(f"a {self.kind} form is saved, not sent: use save(path)")

    def _check_complete(self) -> None:
        faults = self.missing()
        if faults:
            lines = "; ".join(
                f"{name!r} {why}, takes {expected_value(self.fields[name])}" for name, why in faults.items()
            )
            raise InvalidValues(f"nothing was sent or saved, because values are missing: {lines}", faults)

    def _check_same(self, fingerprint: str, other: Form) -> None:
        if other.fingerprint != fingerprint:
            raise FormChanged(
                f"{self.source} has changed since it was read ({_difference(self, other)}); nothing was sent. "
                "Open it again and fill it in anew"
            )

    def _note_sent(self) -> None:
        self._sent = now()

    def _receipt(self, outcome: str, **more: Any) -> Receipt:
        filled = {
            name: {"value": self._shown(one), "by": self.given_by.get(name, "code")}
            for name, one in self.fields.items()
            if not is_empty(self.values.get(name))
        }
        return {
            "form": self.source,
            "kind": self.kind,
            "title": self.title,
            "outcome": outcome,
            "at": now(),
            "fields": filled,
            **more,
        }


def now() -> str:
    """Return the time, in UTC and whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _difference(before: Form, after: Form) -> str:
    gone = [name for name in before.fields if name not in after.fields]
    new = [name for name in after.fields if name not in before.fields]
    changed = [
        name
        for name, one in after.fields.items()
        if name in before.fields
        and (one.schema, one.is_required) != (before.fields[name].schema, before.fields[name].is_required)
    ]
    parts = [
        f"{word} {', '.join(names[:10])}"
        for word, names in (("gone:", gone), ("new:", new), ("changed:", changed))
        if names
    ]
    return "; ".join(parts) or "it is sent elsewhere"


# What a form is read from: the path of a file, an address, HTML text, or bytes


def is_address(source: Any) -> bool:
    """Return whether a source is an address of a page or document."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def content_of(source: Any) -> bytes | None:
    """Return the bytes of a file, or of text that is HTML; None for an address."""
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    if isinstance(source, str) and source.lstrip().startswith("<"):
        return source.encode("utf-8", "replace")
    if isinstance(source, str) and "://" in source:
        return None
    if not isinstance(source, (str, os.PathLike)):
        raise FormError(f"a {type(source).__name__} is no form: pass a path, a URL, or HTML")
    file = Path(cast("str", source))
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise FormError(f"{file} has more than {_LARGEST_BYTES:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise FormError(f"{str(file)[:200]} cannot be read: {error.strerror}") from None
    except ValueError:
        raise FormError(f"{str(file)[:200]!r} is no path") from None


def name_of(source: Any) -> str:
    """Return what errors and receipts call a source."""
    if isinstance(source, (bytes, bytearray)):
        return "the document"
    text = str(source)
    return "the page" if text.lstrip().startswith("<") else text
