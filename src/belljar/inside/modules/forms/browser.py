"""Forms on pages that need a real browser: read, filled in and sent through a browser MCP server of the toolbox.

The server needs two tools: one that opens a page, and one that runs a function in it (`@playwright/mcp` and
`chrome-devtools-mcp` have them). The page's scripts run in that browser, never here; what they say is checked like any
other page. The browser has the operator's network, so the operator chooses to have one by configuring the server.
"""

# The server's own environment has none of the libraries that this file uses in sessions.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from .base import Form, Receipt, is_address
from .errors import FateUnknown, FormError
from .html import Control, PageForm, UploadedFile, origin
from .schema import Field, as_list, tidy

SETTLE_S = 15.0
"""How long a page may take to answer a form that was sent."""
_LARGEST_FILES_BYTES = 2 * 1024 * 1024
_POLL_S = 0.25
_MAX_ALERTS = 10
_LARGEST_CHARS = 4_000_000
# Names of the tools by server: open a page (tool, parameter), run a function (tool, parameter).
_DIALECTS = (
    (("browser_navigate", "url"), ("browser_evaluate", "function")),
    (("navigate_page", "url"), ("evaluate_script", "function")),
)
_DIALOG = re.compile(r'"(\w+)" dialog with message "(.*?)"(?=\]|$)', re.DOTALL)
_ANSWER = re.compile(r"\[\[forms:([A-Za-z0-9+/=]*)\]\]")

# Runs in the page. Results travel as base64, because servers wrap what a function returns in text of their own.
_ENVELOPE = """() => {
  const answer = (() => { %s })();
  const bytes = new TextEncoder().encode(JSON.stringify(answer));
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return '[[forms:' + btoa(text) + ']]';
}"""

_READ = """
  const tidy = (text) => (text || '').replace(/\\s+/g, ' ').trim().slice(0, 300);
  const label = (one) => {
    const byId = (one.getAttribute('aria-labelledby') || '').split(' ').map((id) => document.getElementById(id))
      .filter(Boolean).map((other) => other.textContent).join(' ');
    const own = [...(one.labels || [])].map((other) => {
      const copy = other.cloneNode(true);
      copy.querySelectorAll('select, textarea, button').forEach((inner) => inner.remove());
      return copy.textContent;
    }).join(' ');
    return tidy(own || byId || one.getAttribute('aria-label') || one.placeholder || one.title);
  };
  const visible = (one) => one.type === 'hidden' || one.getClientRects().length > 0 || (one.labels || []).length > 0;
  const control = (one, index) => ({
    index, tag: one.tagName.toLowerCase(), type: (one.type || '').toLowerCase(), name: one.name || one.id || '',
    value: one.type === 'file' ? '' : String(one.value ?? ''), checked: !!one.checked, multiple: !!one.multiple,
    required: !!one.required || one.getAttribute('aria-required') === 'true',
    fixed: one.type === 'hidden' || one.readOnly === true || !visible(one),
    disabled: one.matches(':disabled'), label: label(one),
    options: one.tagName === 'SELECT' ? [...one.options].filter((o) => !o.disabled)
      .map((o) => [o.value, tidy(o.textContent), o.selected]) : [],
    attributes: Object.fromEntries(['min', 'max', 'step', 'minlength', 'maxlength', 'pattern', 'accept', 'title']
      .filter((key) => one.hasAttribute(key)).map((key) => [key, one.getAttribute(key)])),
  });
  return {
    url: location.href, title: document.title,
    forms: [...document.forms].map((form, number) => ({
      number: number + 1, id: form.id, name: form.getAttribute('name') || '', action: form.action,
      method: form.method, encoding: form.enctype,
      controls: [...form.elements].map(control).filter((one) => !['fieldset', 'output', 'object'].includes(one.tag)),
    })),
  };
"""

# Sets values as a person's input would: through the element's own setter, so that frameworks notice, and with events.
_FILL = """
  const form = document.forms[%(form)s], plan = %(plan)s, faults = [];
  if (!form) return {faults: ['the form is gone']};
  const setter = (one) => Object.getOwnPropertyDescriptor(Object.getPrototypeOf(one), 'value').set;
  for (const step of plan) {
    const one = form.elements[step.index];
    if (!one || (one.name || one.id || '') !== step.name) { faults.push(step.name + ' is gone'); continue; }
    one.focus({preventScroll: true});
    if (step.checked !== undefined) { if (one.checked !== step.checked) one.click(); }
    else if (step.chosen) { for (const o of one.options) o.selected = step.chosen.includes(o.value); }
    else if (step.files) {
      const held = new DataTransfer();
      for (const file of step.files) {
        held.items.add(new File([Uint8Array.from(atob(file.data), (c) => c.charCodeAt(0))], file.name));
      }
      one.files = held.files;
    } else { setter(one).call(one, step.value); }
    if (step.checked === undefined) {
      one.dispatchEvent(new Event('input', {bubbles: true}));
      one.dispatchEvent(new Event('change', {bubbles: true}));
    }
    one.blur();
    if (step.checked !== undefined && one.checked !== step.checked) faults.push(step.name + ' did not take its value');
    if (step.value !== undefined && one.value !== step.value) {
      faults.push(step.name + ' became ' + JSON.stringify(one.value));
    }
  }
  for (const one of form.elements) {
    if (one.willValidate && !one.checkValidity()) faults.push((one.name || one.id) + ': ' + one.validationMessage);
  }
  return {faults};
"""

_PRESS = """
  const form = document.forms[%(form)s], index = %(button)s;
  window.__forms_mark = %(mark)s;
  const button = index === null ? null : form.elements[index];
  setTimeout(() => button ? button.click() : form.requestSubmit(), 0);
  return {};
"""

_LOOK = """
  return {
    mark: window.__forms_mark || '', ready: document.readyState, url: location.href, title: document.title,
    text: (document.body ? document.body.innerText : '').slice(0, 2000),
    names: [...document.forms].map((form) => [...form.elements].map((one) => one.name || one.id || '')),
  };
"""


class BrowserForm(Form):
    """A form on a page that is open in a browser behind an MCP server."""

    kind = "browser"

    def __init__(self, server: str, url: str, choice: str, *, is_open: bool = False) -> None:
        self._page = _BrowserPage(server)
        if not is_open:
            self._page.open(url)
        read = self._page.run(_READ)
        self._number, self._form = _chosen(read, choice)
        self._choice = choice
        super().__init__(tidy(read["url"], 2_000), self._form.fields(), tidy(read["title"]), _notes(self._form, read))

    def _destination(self) -> str:
        return f"{self._form.method} {self._form.action.partition('?')[0]}"

    def _preview_lines(self) -> list[str]:
        return [f"  in the browser of {self._page.server}, is sent to {self._form.action.partition('?')[0]}"]

    def _check_value(self, field: Field, value: Any) -> None:
        if field.native["type"] == "file":
            size = sum(len(UploadedFile.of(path).content) for path in as_list(value))
            if size > _LARGEST_FILES_BYTES:
                raise FormError(f"{size:,} bytes of files; through a browser it can be {_LARGEST_FILES_BYTES:,}")

    def _would_send(self, button: str) -> dict[str, Any]:
        return {"url": self._form.action, "method": self._form.method.upper(), "fields": self._shown_plan()}

    def _shown_plan(self) -> list[str]:
        return [f"{one.name} = {self._shown(one)}" for one in self.fields.values() if one.name in self.values]

    def _send(self, button: str) -> Receipt:
        pressed = self._form.button(button)
        place = {"form": self._number}
        read = self._page.run(_READ)
        _, fresh = _chosen(read, self._choice)
        other = object.__new__(BrowserForm)
        other._form = fresh
        Form.__init__(other, self.source, fresh.fields())
        self._check_same(self.fingerprint, other)
        faults = self._page.run(_FILL % {**place, "plan": json.dumps(self._plan())})["faults"]
        if faults:
            said = "; ".join(tidy(fault) for fault in faults[:20])
            raise FormError(f"the page did not take the values, and nothing was sent: {said}")
        mark = f"forms-{time.monotonic_ns()}"
        before = self._page.run(_LOOK)
        index = None if pressed is None else int(pressed.attributes["index"])
        self._note_sent()
        self._page.run(_PRESS % {**place, "button": json.dumps(index), "mark": json.dumps(mark)})
        return self._wait_for_answer(mark, before)

    def _plan(self) -> list[dict[str, Any]]:
        """Return what is done to each control of the page."""
        plan: list[dict[str, Any]] = []
        for one in self.fields.values():
            value = self.values.get(one.name)
            if one.name not in self.given_by or self.given_by[one.name] == "the form":
                continue
            for place in one.native["controls"]:
                control = self._form.controls[place]
                step: dict[str, Any] = {"index": int(control.attributes["index"]), "name": control.name}
                if control.type == "checkbox":
                    step["checked"] = control.value in value if isinstance(value, list) else bool(value)
                elif control.type == "radio":
                    if value != control.value:
                        continue
                    step["checked"] = True
                elif control.type == "select":
                    step["chosen"] = as_list(value)
                elif control.type == "file":
                    uploads = [UploadedFile.of(path) for path in as_list(value)]
                    step["files"] = [
                        {"name": each.name, "data": base64.b64encode(each.content).decode()} for each in uploads
                    ]
                else:
                    step["value"] = "" if value is None else str(value)
                plan.append(step)
        return plan

    def _wait_for_answer(self, mark: str, before: dict[str, Any]) -> Receipt:
        """Wait until the page has changed and loaded, and say what it shows."""
        deadline = time.monotonic() + SETTLE_S
        look = before
        while time.monotonic() < deadline:
            try:
                look = self._page.run(_LOOK)
            except _Asks:
                raise
            except FormError:
                look = before  # the page is on its way to the next one
            has_left = look.get("mark") != mark and look.get("ready") == "complete" and look is not before
            has_changed = look.get("mark") == mark and (look["text"], look["url"]) != (before["text"], before["url"])
            if has_left or has_changed:
                break
            time.sleep(_POLL_S)
        else:
            raise FateUnknown(
                f"the page has not changed {SETTLE_S:g} s after the form was sent; whether it was taken is not known: "
                f"look at it with the tools of {self._page.server}"
            )
        names = [one.name for one in self._form.controls]
        is_shown_again = any(set(names) <= set(shown) for shown in look["names"])
        answer: dict[str, Any] = {"url": tidy(look["url"], 2_000), "title": tidy(look["title"]), "text": look["text"]}
        if self._page.alerts:
            answer["alerts"] = self._page.alerts
        receipt = self._receipt("shown again" if is_shown_again else "sent", answer=answer)
        if is_shown_again:
            receipt["note"] = "the page has the same form again: read answer.text for what it says about the values"
        return receipt

    def next(self, form: str = "") -> Form:
        """Return the form on the page that is shown now, for forms of several steps."""
        return BrowserForm(self._page.server, self.source, form, is_open=True)


class _BrowserPage:
    """The page that a browser server has open, reached through the toolbox."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.alerts: list[str] = []
        """What the page has said in dialogs that were closed."""
        self._dialect = 0

    def open(self, url: str) -> None:
        toolbox, missing = _toolbox(), ""
        for number, ((tool, parameter), _) in enumerate(_DIALECTS):
            try:
                toolbox.get(self.server, tool)(**{parameter: url})
            except toolbox.ToolMissing as error:
                missing = error.message
                continue
            except toolbox.ToolError as error:
                raise FormError(f"{self.server} cannot open {url}: {error.message}") from None
            self._dialect = number
            return
        raise FormError(
            f"{self.server} is no browser server that is known here: it needs the tools browser_navigate and "
            f"browser_evaluate, like @playwright/mcp. {missing}"
        )

    def run(self, script: str) -> dict[str, Any]:
        """Run a function in the page and return its answer."""
        toolbox = _toolbox()
        tool, parameter = _DIALECTS[self._dialect][1]
        try:
            said = toolbox.get(self.server, tool)(**{parameter: _ENVELOPE % script})
        except toolbox.ToolError as error:
            if self._has_closed_dialog(error.message):
                return self.run(script)
            raise FormError(f"{self.server} cannot look at the page: {error.message[:500]}") from None
        text = said if isinstance(said, str) else json.dumps(said, default=str)
        found = _ANSWER.search(text[:_LARGEST_CHARS])
        try:
            answer = json.loads(base64.b64decode(found[1])) if found else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise FormError(f"{self.server} did not answer with what the page returned: {tidy(text, 200)}")
        return answer

    def _has_closed_dialog(self, message: str) -> bool:
        """Close a dialog that only tells something, and return whether there was one; others are for a person."""
        found = _DIALOG.search(message)
        if found is None:
            return False
        kind, said = found[1], tidy(found[2])
        if kind != "alert" or len(self.alerts) >= _MAX_ALERTS:
            raise _Asks(
                f"the page asks {said!r} in a {kind} dialog. Answer it with browser_handle_dialog of {self.server}, "
                "and look at the page before anything is sent again"
            )
        self.alerts.append(said)
        _toolbox().get(self.server, "browser_handle_dialog")(accept=True)
        return True


class _Asks(FateUnknown):
    """A dialog of the page waits for an answer."""


def _toolbox() -> Any:
    try:
        import toolbox
    except ImportError:
        raise FormError("a browser is reached through the toolbox, and this session has none") from None
    return toolbox


def _chosen(read: dict[str, Any], choice: str) -> tuple[int, PageForm]:
    """Return the number and the form that was asked for, made from what the page says about itself."""
    try:
        forms = [(int(one["number"]) - 1, _page_form(one)) for one in read["forms"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FormError("the page says things about its forms that make no sense") from None
    fillable = [(number, one) for number, one in forms if one.fields()]
    found = [(number, one) for number, one in fillable if choice in one.names] if choice else fillable
    if len(found) != 1:
        listed = "; ".join(
            f"form={one.names[0]!r} with {', '.join(f.name for f in one.fields()[:8])}" for _, one in fillable
        )
        why = "no form to fill in" if not fillable else f"no form {choice!r}" if choice else f"{len(fillable)} forms"
        raise FormError(f"{tidy(read.get('url'), 500)} has {why}{f': choose one by {listed}' if listed else ''}")
    return found[0]


def _page_form(said: dict[str, Any]) -> PageForm:
    return PageForm(
        action=str(said["action"])[:2_000],
        method=str(said["method"]),
        encoding=str(said["encoding"]),
        charset="utf-8",
        controls=[_control(one) for one in said["controls"] if not one["disabled"]],
        names=[str(name) for name in (said["id"], said["name"], said["number"]) if name],
    )


def _control(said: dict[str, Any]) -> Control:
    kind = {"select-one": "select", "select-multiple": "select"}.get(said["type"], str(said["type"]))
    attributes = {str(key): str(value)[:500] for key, value in said["attributes"].items()}
    return Control(
        type=kind,
        name=str(said["name"])[:500],
        value=str(said["value"]),
        is_on=bool(said["checked"]),
        options=[(str(value), tidy(title), bool(is_on)) for value, title, is_on in said["options"]],
        is_multiple=bool(said["multiple"]),
        is_fixed=bool(said["fixed"]) or (not said["name"] and kind not in ("submit", "image", "button", "reset")),
        is_required=bool(said["required"]),
        attributes={**attributes, "index": str(int(said["index"]))},
        label=tidy(said["label"]) or (tidy(said["value"]) if kind == "submit" else ""),
    )


def _notes(form: PageForm, read: dict[str, Any]) -> list[str]:
    is_other_site = origin(form.action) != origin(str(read["url"]))
    return [f"it is sent to another site, {origin(form.action)}"] if is_other_site else []


def open_form(source: Any, options: Mapping[str, Any]) -> BrowserForm | None:
    """Return the form of a page that a browser opens; None where no browser is named."""
    if not options["browser"]:
        return None
    if not is_address(source):
        raise FormError(f"a browser opens http and https addresses, not {source!r:.200}")
    return BrowserForm(options["browser"], source, options["form"])
