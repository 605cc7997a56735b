"""PDF forms (AcroForm): fields read with pypdf, values and appearances written, and the written file read again.

XFA forms, which only Adobe's programs can show, and signed documents are refused. A document that has both XFA and an
AcroForm is filled in as AcroForm, and its XFA is left out, because viewers would show that instead.
"""

# The server's own environment has none of the libraries that this file uses in sessions.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .base import Form, Receipt, content_of, is_address, name_of
from .errors import FormError
from .schema import MAX_FIELDS, Field, as_list, is_empty, one_of, some_of, tidy

LARGEST_BYTES = 100 * 1024 * 1024
_DEEPEST = 30
# Flags of fields (ISO 32000, 12.7.4), by their bit positions.
_READ_ONLY, _REQUIRED = 1 << 0, 1 << 1
_MULTILINE, _PASSWORD = 1 << 12, 1 << 13
_RADIO, _PUSH_BUTTON = 1 << 15, 1 << 16
_COMBO, _EDITABLE, _MULTIPLE = 1 << 17, 1 << 18, 1 << 21
_INHERITED = ("/FT", "/Ff", "/V", "/DA", "/Q", "/MaxLen", "/Opt")
_OFF = "Off"
_DATE_SCRIPT = re.compile(r"AFDate_(?:Format|Keystroke)Ex\(\s*[\"']([^\"']{1,40})[\"']")
_NO_PYPDF = "PDF forms take the package pypdf: %pip install pypdf, then open the form again"


class PdfForm(Form):
    """A PDF with form fields. It is saved to a file; PDFs are not sent from here."""

    kind = "pdf"

    def __init__(self, content: bytes, source: str, password: str = "") -> None:
        if len(content) > LARGEST_BYTES:
            raise FormError(f"{source} has {len(content):,} bytes, the most is {LARGEST_BYTES:,}")
        self._content = content
        self._password = password
        with _reading(source):
            reader = _reader(content, source, password)
            acro_form = _acro_form(reader, source)
            pages = _pages_of_widgets(reader)
            found = [*_terminal_fields(acro_form)]
            fields = [field for name, one in found if (field := _field(name, one, pages)) is not None]
            notes = _notes(acro_form, found)
            title = tidy((reader.metadata or {}).get("/Title") or "")
        super().__init__(source, fields, title, notes)

    def save(self, path: str, *, is_draft: bool = False) -> Receipt:
        """Write the filled document, read it again and compare; without `is_draft` only when it is complete."""
        if not is_draft:
            self._check_complete()
        with _reading(self.source):
            content = self._write()
            self._check_written(content)
        _replace(Path(path), content)
        digest = hashlib.sha256(content).hexdigest()
        return self._receipt(
            "saved as a draft" if is_draft and self.missing() else "saved",
            file={"path": str(path), "size": len(content), "sha256": digest},
        )

    def _would_send(self, button: str) -> None:
        """Return nothing: a document is not sent, and the receipt of a dry run has its values."""

    def _write(self) -> bytes:
        pypdf = _pypdf()
        writer = pypdf.PdfWriter(clone_from=_reader(self._content, self.source, self._password))
        root = writer.root_object
        acro_form = root["/AcroForm"].get_object()
        acro_form.pop("/XFA", None)
        root.pop("/Perms", None)  # usage rights are a signature over the file as it was
        texts: dict[str, Any] = {}
        for name, one in _terminal_fields(acro_form):
            field = self.fields.get(name)
            if field is None or self.given_by.get(name) in (None, "the form"):
                continue  # untouched, so its appearance stays as it is
            # pypdf looks at the field itself only, and these may stand in one of its parents.
            for key in _INHERITED:
                if key not in one.raw and key != "/V" and (value := one.get(key)) is not None:
                    one.raw[pypdf.generic.NameObject(key)] = value
            value = self.values.get(name)
            if field.native["type"] == "button":
                _set_button(one, _state_of(field, value), pypdf)
            else:
                texts[name] = [str(each) for each in value] if isinstance(value, list) else _text_of(value)
        if texts:
            # Viewers draw the texts themselves where the form's own font may lack characters.
            needs_viewer = any(not _is_latin(text) for text in texts.values())
            writer.update_page_form_field_values(None, texts, auto_regenerate=needs_viewer)
        file = io.BytesIO()
        writer.write(file)
        return file.getvalue()

    def _check_written(self, content: bytes) -> None:
        written = PdfForm(content, self.source, self._password)
        for name, value in self.values.items():
            got = written.values.get(name)
            if (is_empty(value) or value is False) and (is_empty(got) or got is False):
                continue
            if got != value:
                raise FormError(
                    f"the field {name!r} does not keep its value: {value!r} became {got!r}; nothing was saved"
                )


class _AcroField:
    """A terminal field: its dictionary, its parents for what it inherits, and its widgets."""

    def __init__(self, raw: Any, parents: list[Any]) -> None:
        self.raw = raw
        self._parents = parents
        kids = [kid.get_object() for kid in raw.get("/Kids", ())]
        self.widgets = [kid for kid in kids if hasattr(kid, "get")] or [raw]

    def get(self, key: str) -> Any:
        """Return an entry of the field or of the nearest parent that has it."""
        for one in (self.raw, *reversed(self._parents)):
            if key in one:
                value = one[key]
                return value.get_object() if hasattr(value, "get_object") else value
        return None

    @property
    def flags(self) -> int:
        flags = self.get("/Ff")
        return int(flags) if isinstance(flags, (int, float)) else 0

    def states(self) -> list[str]:
        """Return the names of the states of a checkbox or radio button, without `Off`, in the order of widgets."""
        found: dict[str, None] = {}
        for widget in self.widgets:
            for state in _widget_states(widget):
                found.setdefault(state)
        return [*found]


def _terminal_fields(acro_form: Any) -> Iterator[tuple[str, _AcroField]]:
    """Yield every field that has a value, with its full name; a name that comes twice is yielded once."""
    seen: set[int] = set()
    names: set[str] = set()
    stack: list[tuple[Any, str, list[Any]]] = [(kid, "", []) for kid in reversed(list(acro_form.get("/Fields", ())))]
    while stack:
        reference, prefix, parents = stack.pop()
        one = reference.get_object()
        if not hasattr(one, "get") or id(one) in seen or len(parents) > _DEEPEST or len(seen) > 4 * MAX_FIELDS:
            continue
        seen.add(id(one))
        own = one.get("/T")
        name = f"{prefix}.{own}" if prefix and own is not None else str(own) if own is not None else prefix
        kids = [kid.get_object() for kid in one.get("/Kids", ())]
        if any(hasattr(kid, "get") and "/T" in kid for kid in kids):
            stack += [(kid, name, [*parents, one]) for kid in reversed(list(one["/Kids"]))]
        elif name and name not in names:
            names.add(name)
            yield name, _AcroField(one, parents)


def _field(name: str, one: _AcroField, pages: dict[int, int]) -> Field | None:
    """Return the field as a form has it; None for buttons, signatures and what nobody may change."""
    kind, flags = one.get("/FT"), one.flags
    if flags & _READ_ONLY or kind not in ("/Tx", "/Btn", "/Ch") or (kind == "/Btn" and flags & _PUSH_BUTTON):
        return None
    schema: dict[str, Any] = {"type": "string"}
    label = tidy(one.get("/TU") or "")
    if label:
        schema["title"] = label
    field = Field(name, schema, bool(flags & _REQUIRED), native={"type": "text"})
    {"/Tx": _describe_text, "/Btn": _describe_button, "/Ch": _describe_choice}[kind](field, one)
    places = sorted({pages[id(widget)] for widget in one.widgets if id(widget) in pages})
    if places:
        field.native["pages"] = places
    return field


def _describe_text(field: Field, one: _AcroField) -> None:
    most = one.get("/MaxLen")
    if isinstance(most, int) and 0 < most < 10**7:
        field.schema["maxLength"] = int(most)
    if one.flags & _PASSWORD:
        field.schema["writeOnly"] = True
    hint = "may have several lines" if one.flags & _MULTILINE else ""
    if written := _date_format(one):
        hint = f"a date written as {written}"
    if hint:
        field.schema["description"] = hint
    field.value = _string(one.get("/V")) or None


def _describe_button(field: Field, one: _AcroField) -> None:
    field.native["type"] = "button"
    states = one.states() or ["Yes"]
    current = _string(one.get("/V")).lstrip("/")
    titles = [_string(each) for each in one.get("/Opt") or ()]
    if one.flags & _RADIO or len(states) > 1:
        # With /Opt, the states are numbers of the texts there.
        options = [
            (state, titles[int(state)] if state.isdecimal() and int(state) < len(titles) else "") for state in states
        ]
        field.schema.update(one_of([(state, tidy(title)) for state, title in options]))
        field.value = current if current in states else None
        return
    field.schema.update({"type": "boolean", "states": [_OFF, *states]})
    if field.is_required:
        field.schema["const"] = True
    field.value = current in states


def _describe_choice(field: Field, one: _AcroField) -> None:
    options: list[tuple[str, str]] = []
    for each in one.get("/Opt") or ():
        each = each.get_object() if hasattr(each, "get_object") else each
        pair = [_string(part) for part in each] if isinstance(each, list) else [_string(each)]
        options.append((pair[0], tidy(pair[-1])))
    current = one.get("/V")
    if one.flags & _MULTIPLE and not one.flags & _COMBO:
        field.schema.update(some_of(options))
        field.value = [text for each in as_list(current) if (text := _string(each))]
    elif one.flags & _COMBO and one.flags & _EDITABLE:
        field.schema["examples"] = [value for value, _ in options]
        field.value = _string(current) or None
    else:
        field.schema.update(one_of(options))
        field.value = _string(current[0] if isinstance(current, list) and current else current) or None


def _date_format(one: _AcroField) -> str:
    """Return the date format that a field's script asks for; the script itself is never run."""
    actions = one.get("/AA")
    if not hasattr(actions, "get"):
        return ""
    for key in ("/F", "/K"):
        entry = actions.get(key)
        action: Any = entry.get_object() if entry is not None else None
        script = action.get("/JS") if hasattr(action, "get") else None
        if script is not None and (found := _DATE_SCRIPT.search(str(script.get_object())[:2_000])):
            return tidy(found[1], 40)
    return ""


def _notes(acro_form: Any, found: list[tuple[str, _AcroField]]) -> list[str]:
    notes = ["its XFA part is left out of the saved file"] if "/XFA" in acro_form else []
    signatures = [name for name, one in found if one.get("/FT") == "/Sig"]
    if signatures:
        notes.append(f"to be signed elsewhere: {', '.join(signatures[:10])}")
    fixed = [name for name, one in found if one.flags & _READ_ONLY]
    if fixed:
        notes.append(f"not to be changed: {', '.join(fixed[:10])}")
    return notes


def _set_button(one: _AcroField, state: str, pypdf: Any) -> None:
    name = pypdf.generic.NameObject
    one.raw[name("/V")] = name(f"/{state}")
    for widget in one.widgets:
        states = _widget_states(widget) or (["Yes"] if len(one.widgets) == 1 else [])
        widget[name("/AS")] = name(f"/{state if state in states else _OFF}")


def _widget_states(widget: Any) -> list[str]:
    appearance = widget.get("/AP")
    entry = appearance.get_object().get("/N") if appearance is not None else None
    normal: Any = entry.get_object() if entry is not None else None
    # A push button has a stream here; its keys are no states.
    if not hasattr(normal, "keys") or hasattr(normal, "get_data"):
        return []
    return [key.lstrip("/") for key in normal if key != f"/{_OFF}"]


def _state_of(field: Field, value: Any) -> str:
    if isinstance(value, bool):
        return field.schema["states"][-1] if value else _OFF
    return str(value) if not is_empty(value) else _OFF


def _string(value: Any) -> str:
    value = value.get_object() if hasattr(value, "get_object") else value
    if value is None or type(value).__name__ == "NullObject":
        return ""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value)


def _text_of(value: Any) -> str:
    return "" if value is None else str(value)


def _is_latin(text: Any) -> bool:
    try:
        "".join(text).encode("cp1252")
    except UnicodeEncodeError:
        return False
    return True


def _pages_of_widgets(reader: Any) -> dict[int, int]:
    pages: dict[int, int] = {}
    for number, page in enumerate(reader.pages, 1):
        annotations: Any = page.get("/Annots")
        for one in annotations.get_object() if annotations is not None else ():
            pages[id(one.get_object())] = number
    return pages


def _acro_form(reader: Any, source: str) -> Any:
    root = reader.root_object
    acro_form = root["/AcroForm"].get_object() if "/AcroForm" in root else None
    if acro_form is None:
        raise FormError(
            f"{source} is a PDF without form fields, such as a print or a scan: there is nothing to fill in"
        )
    has_fields = bool(acro_form.get("/Fields"))
    if "/XFA" in acro_form and (not has_fields or bool(root.get("/NeedsRendering", False))):
        raise FormError(
            f"{source} is an XFA form, which only Adobe's programs can show and fill in; ask whoever issued it for a "
            "PDF with AcroForm fields, or fill it in by hand"
        )
    for name, one in _terminal_fields(acro_form):
        if one.get("/FT") == "/Sig" and one.get("/V") is not None:
            raise FormError(f"{source} is signed ({name}): filling it in would break the signature")
    return acro_form


def _reader(content: bytes, source: str, password: str) -> Any:
    reader = _pypdf().PdfReader(io.BytesIO(content), strict=False)
    if reader.is_encrypted and not reader.decrypt(password):
        raise FormError(f"{source} is encrypted, and {'the password is wrong' if password else 'needs a password'}")
    return reader


def _pypdf() -> Any:
    try:
        import pypdf
    except ImportError:
        raise FormError(_NO_PYPDF) from None
    return pypdf


@contextmanager
def _reading(source: str) -> Generator[None, None, None]:
    """Turn whatever pypdf raises about a broken or hostile file into one error, and its log into silence."""
    logger = logging.getLogger("pypdf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except (FormError, MemoryError):
        raise
    except Exception as error:
        raise FormError(f"{source} cannot be read as a PDF form: {type(error).__name__}: {error}") from error
    finally:
        logger.setLevel(level)


def _replace(path: Path, content: bytes) -> None:
    """Write a file in one step, so that no reader sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(prefix=".", suffix=".pdf", dir=str(path.parent))
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(draft).chmod(0o644)
        Path(draft).replace(path)
    except OSError as error:
        raise FormError(f"{path} cannot be written: {error.strerror}") from None


def open_form(source: Any, options: Mapping[str, Any]) -> PdfForm | None:
    """Return the form of a PDF that is a file or bytes; None for any other source."""
    if is_address(source):
        return None
    content = content_of(source)
    if content is None or not content[:1024].lstrip().startswith(b"%PDF-"):
        return None
    return PdfForm(content, name_of(source), options["password"])
