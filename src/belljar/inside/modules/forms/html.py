"""Forms in HTML: their controls as a browser would see them, the fields these make, and the entries that are sent.

Follows the HTML standard's "constructing the entry list": order of the document, no disabled controls, controls outside
of the form that name it, files, the button that was pressed. Runs no script.
"""

# The server's own environment has none of the libraries that this file uses in sessions.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from .errors import FormError
from .schema import MAX_FIELDS, MAX_OPTIONS, Field, as_list, one_of, some_of, tidy

LARGEST_FILE_BYTES = 50 * 1024 * 1024
_MAX_CONTROLS = 4 * MAX_FIELDS
_PATTERN_CHARS = 500
_BUTTONS = ("submit", "image", "button", "reset")
_BLOCKS = (
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dt", "fieldset", "footer", "form", "header"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "hr", "legend", "li", "main", "nav", "ol", "option", "p", "pre", "section"),
    *("table", "td", "th", "tr", "ul"),
)
"""Elements whose text is a line of its own."""
_FORMATS = {
    "month": (r"^\d{4}-(0[1-9]|1[0-2])$", "YYYY-MM"),
    "week": (r"^\d{4}-W\d{2}$", "YYYY-Www"),
    "time": (r"^\d{2}:\d{2}(:\d{2}(\.\d+)?)?$", "HH:MM"),
    "datetime-local": (r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d+)?)?$", "YYYY-MM-DDTHH:MM"),
    "color": (r"^#[0-9A-Fa-f]{6}$", "#rrggbb"),
}


@dataclass
class Control:
    """One element that may send something: its type, name and value, and for a select its options."""

    type: str
    name: str
    value: str = ""
    is_on: bool = False
    """Whether a checkbox or radio button is ticked."""
    options: list[tuple[str, str, bool]] = field(default_factory=list[tuple[str, str, bool]])
    """Of a select: value, title, and whether it is chosen."""
    is_multiple: bool = False
    is_fixed: bool = False
    """Whether a person could not change it: hidden or read-only."""
    is_required: bool = False
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    label: str = ""


@dataclass
class PageForm:
    """One form of a page: where and how it is sent, and its controls in the document's order."""

    action: str
    method: str
    encoding: str
    charset: str
    controls: list[Control]
    names: list[str]
    """What it can be asked for by: its id, name and number."""
    title: str = ""

    def fields(self) -> list[Field]:
        """Return the fields that a person could fill in; names are unique in the form."""
        made: dict[str, Field] = {}
        groups: dict[tuple[str, str], str] = {}
        for index, control in enumerate(self.controls):
            if control.is_fixed or control.type in _BUTTONS:
                continue
            is_group = control.type in ("radio", "checkbox")
            key = (control.type, control.name)
            if is_group and key in groups:
                _join(made[groups[key]], control, index)
                continue
            name = _unique(control.name, made)
            groups[key] = name
            made[name] = _field(name, control, index)
        for one in made.values():
            _finish(one, [self.controls[index] for index in one.native["controls"]])
        return [*made.values()]

    def entries(self, values: dict[str, Any], fields: list[Field], button: str = "") -> list[tuple[str, Any]]:
        """Return what is sent, in order: name and text, or name and `UploadedFile`."""
        filled: dict[int, Any] = {}
        for one in fields:
            for index in one.native["controls"]:
                filled[index] = values.get(one.name)
        pressed = self.button(button)
        sent: list[tuple[str, Any]] = []
        for index, control in enumerate(self.controls):
            if control.type in _BUTTONS:
                if control is pressed and control.type == "submit" and control.name:
                    sent.append((control.name, control.value))
                elif control is pressed and control.type == "image":
                    prefix = f"{control.name}." if control.name else ""
                    sent += [(f"{prefix}x", "0"), (f"{prefix}y", "0")]
                continue
            sent += [(control.name, value) for value in self._sent_by(control, filled.get(index))]
        return sent

    def _sent_by(self, control: Control, value: Any) -> list[Any]:
        if control.is_fixed:
            if control.type in ("radio", "checkbox"):
                return [control.value] if control.is_on else []
            return [self.charset if control.name == "_charset_" else control.value]
        if control.type == "checkbox":
            is_on = control.value in value if isinstance(value, list) else bool(value)
            return [control.value] if is_on else []
        if control.type == "radio":
            return [control.value] if value == control.value else []
        if control.type == "select":
            return [option for option, _, _ in control.options if option in as_list(value)]
        if control.type == "file":
            return [UploadedFile.of(path) for path in as_list(value)] or [UploadedFile("", b"")]
        text = "" if value is None else str(value)
        # The standard sends line ends as CR LF, whatever they were.
        return [re.sub(r"\r\n|\r|\n", "\r\n", text) if control.type == "textarea" else text]

    def button(self, wanted: str = "") -> Control | None:
        """Return the button that is pressed: the one of that name, value or label, else the first that sends."""
        buttons = [one for one in self.controls if one.type in ("submit", "image")]
        if not wanted:
            return buttons[0] if buttons else None
        for one in buttons:
            if wanted in (one.name, one.value) or wanted.lower() == one.label.lower():
                return one
        known = ", ".join(repr(one.label or one.value or one.name) for one in buttons) or "none"
        raise FormError(f"there is no button {wanted!r}; the form has {known}")

    def sending(self, button: str = "") -> tuple[str, str, str]:
        """Return action, method and encoding, which a button may override."""
        own = (pressed.attributes if (pressed := self.button(button)) else {}) or {}
        action = urljoin(self.action, own["formaction"]) if own.get("formaction") else self.action
        return (
            action,
            own.get("formmethod", self.method).lower(),
            own.get("formenctype", self.encoding).lower(),
        )


@dataclass
class UploadedFile:
    """A file that is sent with a form; an empty name stands for none."""

    name: str
    content: bytes
    digest: str = ""

    @classmethod
    def of(cls, path: str) -> UploadedFile:
        """Read a file of the session."""
        file = Path(path)
        try:
            size = file.stat().st_size
            if size > LARGEST_FILE_BYTES:
                raise FormError(f"{path} has {size:,} bytes, the most that is sent is {LARGEST_FILE_BYTES:,}")
            return cls(file.name, file.read_bytes())
        except OSError as error:
            raise FormError(f"{path} cannot be read: {error.strerror}") from None


@dataclass
class HtmlPage:
    """A page as it was fetched: its bytes, and the character set that came with it, if one did."""

    url: str
    content: bytes
    charset: str = ""


def page_forms(page: HtmlPage) -> tuple[list[PageForm], str]:
    """Return the forms of a page and its title. Raises FormError for what lxml cannot read."""
    document = _parsed(page)
    base = document.find(".//base[@href]")
    url = urljoin(page.url, base.get("href")) if base is not None else page.url
    charset = document.getroottree().docinfo.encoding or "utf-8"
    title = document.findtext(".//title") or ""
    found = [_form(element, number, document, url, charset) for number, element in enumerate(document.iter("form"), 1)]
    return found, tidy(title)


def page_text(page: HtmlPage, most: int = 2_000) -> str:
    """Return the text of a page that a person would see, as far as that can be said without its styles."""
    document = _parsed(page)
    for element in [*document.iter("script", "style", "noscript", "template", "head")]:
        element.drop_tree()
    for element in document.iter(*_BLOCKS):
        element.tail = f"\n{element.tail or ''}"
        element.text = f"\n{element.text or ''}"
    lines = (" ".join(line.split()) for line in document.text_content().splitlines())
    text = "\n".join(line for line in lines if line)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def needs_script(page: HtmlPage) -> bool:
    """Return whether a page has scripts, which may make the form that its HTML lacks."""
    return next(_parsed(page).iter("script"), None) is not None


def _parsed(page: HtmlPage) -> Any:
    etree, reader = lxml()
    try:
        "".encode(page.charset or "utf-8")
        charset = page.charset or None
    except LookupError:
        charset = None  # the page or the server made it up
    try:
        parser = reader.HTMLParser(encoding=charset, no_network=True, huge_tree=False)
        return reader.document_fromstring(page.content.strip() or b"<html></html>", parser=parser)
    except (etree.LxmlError, ValueError) as error:
        raise FormError(f"{page.url} cannot be read as HTML: {error}") from None


def lxml() -> tuple[Any, Any]:
    """Return lxml's modules; FormError says what to install where it is missing."""
    try:
        from lxml import etree
        from lxml import html as reader
    except ImportError:
        raise FormError("forms in HTML take the package lxml: %pip install lxml, then open the form again") from None
    return etree, reader


def _form(element: Any, number: int, document: Any, url: str, charset: str) -> PageForm:
    own = element.get("id")
    outside = [
        control
        for control in (document.xpath("//*[@form=$id]", id=own) if own else [])
        if next((one for one in control.iterancestors("form")), None) is not element
    ]
    inside = [
        control
        for control in element.iter("input", "select", "textarea", "button")
        if control.get("form") in (None, own)
    ]
    order = {control: place for place, control in enumerate(document.iter())} if outside else {}
    elements = sorted([*inside, *outside], key=lambda one: order[one]) if outside else inside
    if len(elements) > _MAX_CONTROLS:
        raise FormError(f"a form of {url} has {len(elements):,} controls, the most is {_MAX_CONTROLS:,}")
    labels = _labels(document)
    controls = [control for one in elements if (control := _control(one, labels)) is not None]
    action = urljoin(url, (element.get("action") or "").strip()) or url
    legend = element.findtext(".//legend") or element.get("aria-label") or ""
    return PageForm(
        action=action,
        method=(element.get("method") or "get").lower(),
        encoding=(element.get("enctype") or "application/x-www-form-urlencoded").lower(),
        charset=(element.get("accept-charset") or charset).split()[0],
        controls=controls,
        names=[name for name in (own, element.get("name"), str(number)) if name],
        title=tidy(legend),
    )


def _labels(document: Any) -> dict[str, str]:
    return {label.get("for"): tidy(label.text_content()) for label in document.iter("label") if label.get("for")}


def _control(element: Any, labels: dict[str, str]) -> Control | None:
    """Return the control of an element; None for one that sends nothing, whatever a person does."""
    tag = element.tag
    kind = tag if tag in ("select", "textarea") else (element.get("type") or "").lower()
    kind = kind or ("submit" if tag == "button" else "text")
    name = element.get("name") or ""
    is_button = tag == "button" or kind in _BUTTONS
    if _is_disabled(element) or (not name and not is_button):
        return None
    control = Control(
        type=kind,
        name=name,
        is_multiple=element.get("multiple") is not None,
        is_required=element.get("required") is not None,
        attributes={key: str(value)[:_PATTERN_CHARS] for key, value in element.attrib.items()},
        label=_label(element, labels, is_button=is_button),
    )
    if tag == "select":
        _read_options(element, control)
    elif tag == "textarea":
        control.value = (element.text_content() or "").removeprefix("\n")
    else:
        control.value = element.get("value") or ("on" if kind in ("checkbox", "radio") else "")
        control.is_on = element.get("checked") is not None
    is_free = kind not in ("checkbox", "radio", "file", "select", "range", "color")
    control.is_fixed = kind == "hidden" or (is_free and element.get("readonly") is not None)
    return control


def _is_disabled(element: Any) -> bool:
    if element.get("disabled") is not None:
        return True
    for ancestor in element.iterancestors():
        if ancestor.tag == "datalist":
            return True
        if ancestor.tag == "fieldset" and ancestor.get("disabled") is not None:
            legend = next((child for child in ancestor if child.tag == "legend"), None)
            return legend is None or element not in legend.iter()
    return False


def _label(element: Any, labels: dict[str, str], *, is_button: bool) -> str:
    if is_button:
        return tidy(element.text_content() or element.get("value") or element.get("alt") or "")
    around = next((one for one in element.iterancestors("label")), None)
    said = labels.get(element.get("id") or "") or (_own_text(around) if around is not None else "")
    return said or tidy(element.get("aria-label") or element.get("placeholder") or element.get("title") or "")


def _own_text(label: Any) -> str:
    """Return a label's text without that of the options and texts in it."""
    inner = {id(one) for child in label.iter("select", "textarea", "button") for one in child.iter()}
    parts = [label.text or ""]
    for one in label.iterdescendants():
        if id(one) not in inner and isinstance(one.tag, str):
            parts.append(one.text or "")
        if id(one.getparent()) not in inner:
            parts.append(one.tail or "")
    return tidy(" ".join(parts))


def _read_options(element: Any, control: Control) -> None:
    for option in element.iter("option"):
        parent = option.getparent()
        if option.get("disabled") is not None or (parent.tag == "optgroup" and parent.get("disabled") is not None):
            continue
        text = tidy(option.text_content())
        value = option.get("value")
        control.options.append((text if value is None else value, text, option.get("selected") is not None))
        if len(control.options) >= MAX_OPTIONS:
            break


def _unique(name: str, made: dict[str, Field]) -> str:
    """Return the name, with a number where another control of the form has it."""
    if name not in made:
        return name
    number = 2
    while f"{name}#{number}" in made:
        number += 1
    return f"{name}#{number}"


def _join(one: Field, control: Control, index: int) -> None:
    one.native["controls"].append(index)
    one.is_required = one.is_required or control.is_required


def _field(name: str, control: Control, index: int) -> Field:
    own = control.attributes
    schema: dict[str, Any] = {"type": "string"}
    if control.label and control.label != name:
        schema["title"] = control.label
    if own.get("title") and own["title"] != control.label:
        schema["description"] = tidy(own["title"])
    return Field(name, schema, control.is_required, native={"controls": [index], "type": control.type})


def _finish(one: Field, controls: list[Control]) -> None:
    """Complete a field's schema and value, now that all controls of its name are known."""
    first = controls[0]
    describe = {"checkbox": _describe_checkbox, "radio": _describe_radio, "select": _describe_select}.get(first.type)
    if describe is not None:
        describe(one, controls)
    elif first.type == "file":
        one.schema["description"] = "the path of a file in the session"
        if first.is_multiple:
            one.schema["type"] = "array"
        if first.attributes.get("accept"):
            one.schema["description"] += f"; it takes {tidy(first.attributes['accept'])}"
    elif first.type in ("number", "range"):
        _describe_number(one, first)
    else:
        _describe_text(one, first)


def _describe_checkbox(one: Field, controls: list[Control]) -> None:
    if len(controls) == 1:
        one.schema["type"] = "boolean"
        if one.is_required:
            one.schema["const"] = True
        one.value = controls[0].is_on
        return
    one.schema.pop("title", None)
    one.schema.update(some_of([(control.value, control.label) for control in controls]))
    one.value = [control.value for control in controls if control.is_on]


def _describe_radio(one: Field, controls: list[Control]) -> None:
    one.schema.pop("title", None)  # the label of the first button, not of the group
    one.schema.update(one_of([(control.value, control.label) for control in controls]))
    one.value = next((control.value for control in controls if control.is_on), None)


def _describe_select(one: Field, controls: list[Control]) -> None:
    options = controls[0].options
    if controls[0].is_multiple:
        one.schema.update(some_of([(value, title) for value, title, _ in options]))
        one.value = [value for value, _, is_on in options if is_on]
        return
    # An empty first option is the standard's placeholder: choosing it chooses nothing.
    one.schema.update(one_of([(value, title) for value, title, _ in options if value != ""]))
    one.value = next((value for value, _, is_on in reversed(options) if is_on), options[0][0] if options else None)


def _describe_number(one: Field, control: Control) -> None:
    own = control.attributes
    numbers = {key: _number(own.get(key)) for key in ("min", "max", "step")}
    parts = [1.0 if numbers["step"] is None else numbers["step"], numbers["min"] or 0.0]
    is_whole = own.get("step", "").lower() != "any" and all(part == int(part) for part in parts)
    one.schema["type"] = "integer" if is_whole else "number"
    for key, keyword in (("min", "minimum"), ("max", "maximum")):
        if (limit := numbers[key]) is not None:
            one.schema[keyword] = int(limit) if limit == int(limit) else limit
    value = _number(control.value)
    one.value = None if value is None else int(value) if is_whole and value == int(value) else value


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None


def _describe_text(one: Field, control: Control) -> None:
    own, schema = control.attributes, one.schema
    for key, keyword in (("minlength", "minLength"), ("maxlength", "maxLength")):
        if own.get(key, "").isdecimal() and int(own[key]) < 10**7:
            schema[keyword] = int(own[key])
    if control.type == "email" and not control.is_multiple:
        schema["format"] = "email"
    elif control.type == "url":
        schema["format"] = "uri"
    elif control.type == "date":
        schema["format"] = "date"
    elif control.type == "password":
        schema["writeOnly"] = True
    elif control.type in _FORMATS:
        schema["pattern"], schema["x-hint"] = _FORMATS[control.type]
        schema.setdefault("description", f"as {schema['x-hint']}")
    if own.get("pattern") and len(own["pattern"]) < _PATTERN_CHARS:
        schema["pattern"] = f"^(?:{own['pattern']})$"
        schema["x-hint"] = own.get("title") or own["pattern"]
    one.value = control.value or None


def origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
