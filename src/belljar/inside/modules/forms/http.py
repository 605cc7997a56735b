"""Forms on pages that are fetched over HTTP: cookies, hidden fields and tokens as a browser has them, no scripts.

A form is read again just before it is sent, because its token may have expired while a person was asked. If it asks for
something else by then, nothing is sent.
"""

from __future__ import annotations

import functools
import http.client
import http.cookiejar
import mimetypes
import secrets
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from .base import Form, Receipt, content_of, is_address, name_of
from .errors import FateUnknown, FormError, FormRefused
from .html import HtmlPage, PageForm, UploadedFile, needs_script, origin, page_forms, page_text
from .schema import Field, as_list, tidy

LARGEST_PAGE_BYTES = 10 * 1024 * 1024
TIMEOUT_S = 30.0
_MAX_REDIRECTS = 10
_MULTIPART = "multipart/form-data"
_AGENT = "Mozilla/5.0 (compatible; belljar-forms)"


@dataclass
class HttpAnswer:
    """A server's answer, after redirects."""

    status: int
    page: HtmlPage
    type: str
    redirects: list[str] = field(default_factory=list[str])


class Visitor:
    """Fetches pages and sends forms with the cookies it was given so far. It can be pickled."""

    def __init__(self) -> None:
        self._jar = http.cookiejar.CookieJar()

    def __getstate__(self) -> list[Any]:
        return [*self._jar]

    def __setstate__(self, cookies: list[Any]) -> None:
        self.__init__()
        for cookie in cookies:
            self._jar.set_cookie(cookie)

    def get(self, url: str, referrer: str = "") -> HttpAnswer:
        """Fetch a page."""
        return self._fetch(urllib.request.Request(url, headers=_headers(referrer)))

    def send(self, url: str, body: bytes | None, type: str, referrer: str) -> HttpAnswer:
        """Send a form: a body by POST, or None for a GET whose URL has the values."""
        headers = _headers(referrer)
        if body is None:
            return self._fetch(urllib.request.Request(url, headers=headers))
        headers["Content-Type"] = type
        if referrer:
            headers["Origin"] = origin(referrer)
        return self._fetch(urllib.request.Request(url, data=body, headers=headers, method="POST"))

    def _fetch(self, request: urllib.request.Request) -> HttpAnswer:
        _check_address(request.full_url)
        redirects = _Redirects()
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            _Https(),
            urllib.request.HTTPCookieProcessor(self._jar),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
            redirects,
        ):
            opener.add_handler(handler)
        try:
            response = opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            response = error  # an answer like any other
        with response:
            content = response.read(LARGEST_PAGE_BYTES + 1)
            if len(content) > LARGEST_PAGE_BYTES:
                raise FormError(f"{response.url} has more than {LARGEST_PAGE_BYTES:,} bytes")
            kind = response.headers.get_content_type()
            page = HtmlPage(response.url, content, response.headers.get_content_charset() or "")
            return HttpAnswer(response.status or 0, page, kind, redirects.followed)


@functools.lru_cache(maxsize=1)
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading all certificates takes a tenth of a second


class _Https(urllib.request.AbstractHTTPHandler):
    """Opens https addresses."""

    def https_open(self, req: Any) -> Any:
        return self.do_open(http.client.HTTPSConnection, req, context=_trust())

    https_request = urllib.request.AbstractHTTPHandler.do_request_


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects as browsers do; a form goes on to another site by no 307 or 308."""

    max_redirections = _MAX_REDIRECTS

    def __init__(self) -> None:
        self.followed: list[str] = []

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_address(newurl)
        self.followed.append(f"{code} {newurl}")
        if code in (307, 308) and req.data is not None:
            if origin(newurl) != origin(req.full_url):
                raise FormError(f"{req.full_url} wants the form sent on to {origin(newurl)}; it was not")
            return urllib.request.Request(newurl, data=req.data, headers=req.headers, method="POST")
        # `headers` are those that we set; urllib adds cookies, host and length to each request anew.
        kept = {key: value for key, value in req.headers.items() if key.lower() not in ("content-type", "origin")}
        return urllib.request.Request(newurl, headers=kept)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


class HttpForm(Form):
    """A form of an HTML page that is sent over HTTP."""

    kind = "http"

    def __init__(
        self, page: HtmlPage, form: PageForm, visitor: Visitor, choice: str, title: str, *, can_reread: bool
    ) -> None:
        super().__init__(page.url, form.fields(), form.title or title, _notes(form, page))
        self._form = form
        self._visitor = visitor
        self._choice = choice
        self._can_reread = can_reread

    def _destination(self) -> str:
        # Without the query, which often has a token.
        return f"{self._form.method} {self._form.action.partition('?')[0]}"

    def _preview_lines(self) -> list[str]:
        action, method, _ = self._form.sending()
        return [f"  is sent by {method.upper()} to {action.partition('?')[0]}"]

    def _check_value(self, field: Field, value: Any) -> None:
        if field.native["type"] == "file":
            for path in as_list(value):
                UploadedFile.of(path)

    def _would_send(self, button: str) -> dict[str, Any]:
        action, method, encoding = self._form.sending(button)
        hidden = {field.name for field in self.fields.values() if field.schema.get("writeOnly")}
        shown: list[list[Any]] = []
        for name, value in self._entries(button):
            if isinstance(value, UploadedFile):
                shown.append(
                    [name, f"file {value.name!r} of {len(value.content):,} bytes" if value.name else "no file"]
                )
            else:
                shown.append([name, "•••" if name in hidden and value else value])
        return {"method": method.upper(), "url": action, "encoding": encoding, "entries": shown}

    def _entries(self, button: str) -> list[tuple[str, Any]]:
        return self._form.entries(self.values, [*self.fields.values()], button)

    def _send(self, button: str) -> Receipt:
        if self._can_reread:
            self._reread()
        action, method, encoding = self._form.sending(button)
        if method not in ("get", "post"):
            raise FormError(f"the form is sent by {method!r}, which is no method of HTTP")
        _check_address(action)
        url, body, kind = _encoded(self._entries(button), action, method, encoding, self._form.charset)
        self._note_sent()
        try:
            answer = self._visitor.send(url, body, kind, self.source)
        except FormError:
            raise
        except (OSError, http.client.HTTPException) as error:
            if _never_arrived(error):
                self._sent = ""
                raise FormError(f"{origin(action)} cannot be reached, so nothing was sent: {_reason(error)}") from None
            raise FateUnknown(
                f"the connection to {origin(action)} broke after the form was sent: {_reason(error)}. Whether it was "
                "taken is not known: look there before you send it again"
            ) from None
        return self._read_answer(answer)

    def _reread(self) -> None:
        """Read the page again and take its hidden values, because tokens expire."""
        fresh = from_answer(_visit(self._visitor, self.source), self._visitor, self._choice)
        self._check_same(self.fingerprint, fresh)
        self._form = fresh._form
        for name, one in fresh.fields.items():
            self.fields[name].native = one.native

    def _read_answer(self, answer: HttpAnswer) -> Receipt:
        is_html = answer.type in ("text/html", "application/xhtml+xml")
        forms, title = page_forms(answer.page) if is_html else ([], "")
        text = (
            page_text(answer.page) if is_html else tidy(answer.page.content[:8_000].decode("utf-8", "replace"), 2_000)
        )
        is_shown_again = any(_is_like(one, self._form) for one in forms)
        said: dict[str, Any] = {
            "status": answer.status,
            "url": answer.page.url,
            "redirects": answer.redirects,
            "title": title,
            "text": text,
        }
        outcome = "refused" if answer.status >= 400 else "shown again" if is_shown_again else "sent"
        receipt = self._receipt(outcome, answer=said)
        if answer.status >= 400:
            raise FormRefused(f"{origin(answer.page.url)} answered {answer.status}: {text[:500]}", receipt)
        if is_shown_again:
            # A page that shows the same form again most often found something wrong with it.
            receipt["note"] = "the answer has the same form again: read answer.text for what it says about the values"
        self._next = (answer, [one for one in forms if one.controls])
        return receipt

    def next(self, form: str = "") -> Form:
        """Return the form on the page that answered this one, for forms of several steps."""
        answered = getattr(self, "_next", None)
        if answered is None:
            raise FormError("the form was not sent yet: submit() comes first")
        return from_answer(answered[0], self._visitor, form, can_reread=bool(answered[0].redirects))


def open_url(url: str, form: str = "") -> Form:
    """Fetch a page and return its form."""
    visitor = Visitor()
    return from_answer(_visit(visitor, url), visitor, form)


def from_html(content: bytes, url: str, form: str = "") -> HttpForm:
    """Return the form of HTML that was not fetched; `url` is what its addresses count from."""
    page = HtmlPage(url, content, "utf-8")
    return _chosen(page, Visitor(), form, can_reread=False)


def from_answer(answer: HttpAnswer, visitor: Visitor, form: str, *, can_reread: bool = True) -> Any:
    """Return the form in a server's answer."""
    if answer.status >= 400:
        raise FormError(f"{answer.page.url} answered {answer.status}: {page_text(answer.page)[:300]}")
    if answer.page.content[:1024].lstrip().startswith(b"%PDF-"):
        from .pdf import PdfForm

        return PdfForm(answer.page.content, answer.page.url)
    return _chosen(answer.page, visitor, form, can_reread=can_reread)


def _chosen(page: HtmlPage, visitor: Visitor, choice: str, *, can_reread: bool) -> HttpForm:
    forms, title = page_forms(page)
    fillable = [one for one in forms if one.fields()]
    if not fillable:
        script = " It has scripts, which may make one: open it with browser=SERVER, a browser server of the toolbox"
        raise FormError(f"{page.url} has no form to fill in.{script if needs_script(page) else ''}")
    found = [one for one in fillable if choice in one.names] if choice else fillable
    if len(found) != 1:
        listed = "; ".join(f"form={one.names[0]!r} with {_first_names(one)}" for one in fillable[:20])
        why = f"no form {choice!r}" if choice else f"{len(fillable)} forms"
        raise FormError(f"{page.url} has {why}: choose one by {listed}")
    return HttpForm(page, found[0], visitor, choice, title, can_reread=can_reread)


def _first_names(form: PageForm) -> str:
    return ", ".join(field.name for field in form.fields()[:8])


def _visit(visitor: Visitor, url: str) -> HttpAnswer:
    try:
        return visitor.get(url)
    except (OSError, http.client.HTTPException) as error:
        raise FormError(f"{url} cannot be fetched: {_reason(error)}") from None


def _is_like(one: PageForm, other: PageForm) -> bool:
    return {field.name for field in one.fields()} == {field.name for field in other.fields()}


def _notes(form: PageForm, page: HtmlPage) -> list[str]:
    notes: list[str] = []
    if origin(form.action) != origin(page.url):
        notes.append(f"it is sent to another site, {origin(form.action)}")
    if urlsplit(page.url).scheme == "https" and urlsplit(form.action).scheme == "http":
        notes.append("it is sent without encryption")
    return notes


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FormError(f"{url!r} is no http or https address; pass url= where the form comes from a file or text")


def _headers(referrer: str) -> dict[str, str]:
    headers = {"User-Agent": _AGENT, "Accept": "text/html,application/xhtml+xml,application/pdf;q=0.9,*/*;q=0.5"}
    return {**headers, "Referer": referrer.partition("#")[0]} if referrer else headers


def _never_arrived(error: BaseException) -> bool:
    """Return whether a failed request cannot have reached the server: its name or port did not answer."""
    reason = getattr(error, "reason", error)
    return isinstance(reason, (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)) or (
        "Tunnel connection failed" in str(reason)
    )


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", "") or error) or type(error).__name__


def _encoded(
    entries: list[tuple[str, Any]], action: str, method: str, encoding: str, charset: str
) -> tuple[str, bytes | None, str]:
    """Return URL, body and content type of a request that sends these entries."""
    try:
        "".encode(charset)
    except LookupError:
        charset = "utf-8"
    named = [(name, value.name if isinstance(value, UploadedFile) else value) for name, value in entries]
    if method == "get":
        parts = urlsplit(action)
        query = urlencode(named, encoding=charset, errors="xmlcharrefreplace")
        return urlunsplit(parts._replace(query=query, fragment="")), None, ""
    if encoding == _MULTIPART:
        boundary = f"----belljar{secrets.token_hex(16)}"
        return action, _multipart(entries, boundary, charset), f"{_MULTIPART}; boundary={boundary}"
    if encoding == "text/plain":
        return action, "".join(f"{name}={value}\r\n" for name, value in named).encode(charset, "replace"), "text/plain"
    body = urlencode(named, encoding=charset, errors="xmlcharrefreplace").encode("ascii")
    return action, body, "application/x-www-form-urlencoded"


def _multipart(entries: list[tuple[str, Any]], boundary: str, charset: str) -> bytes:
    parts: list[bytes] = []
    for name, value in entries:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(name)}"'
        if isinstance(value, UploadedFile):
            kind = mimetypes.guess_type(value.name)[0] or "application/octet-stream"
            head += f'; filename="{_quoted(value.name)}"\r\nContent-Type: {kind}'
        content = value.content if isinstance(value, UploadedFile) else str(value).encode(charset, "xmlcharrefreplace")
        parts += [head.encode(charset, "xmlcharrefreplace"), b"\r\n\r\n", content, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()])


def _quoted(name: str) -> str:
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def open_form(source: Any, options: Mapping[str, Any]) -> Form | None:
    """Return the form of a page: an address, a file, text or bytes; None for what is no HTML."""
    if is_address(source):
        return open_url(source, options["form"])
    content = content_of(source)
    if content is None or b"<" not in content:
        return None
    return from_html(content, options["url"] or name_of(source), options["form"])
