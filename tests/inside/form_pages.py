"""Pages with forms on loopback, as sites have them: a session cookie, tokens that expire, and a redirect after POST."""

import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager
from email.message import Message
from email.parser import BytesParser
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

SIGN_UP = """<!doctype html><html><head><title>Sign up</title></head><body>
<form action="/search"><input name="q" aria-label="Search"></form>
<form id="signup" method="post" action="/signup?step=1" enctype="multipart/form-data">
  <input type="hidden" name="token" value="{token}">
  <label for="n">Full name</label> <input id="n" name="name" required minlength="2" maxlength="40">
  <label>E-mail <input type="email" name="mail" required></label>
  <label>Age <input type="number" name="age" min="18" max="120"></label>
  <label>Born <input type="date" name="born"></label>
  <input type="password" name="secret" aria-label="Password">
  <select name="country" required><option value="">Choose</option><option value="NO">Norway</option>
    <option value="IT">Italy</option><option disabled value="XX">Nowhere</option></select>
  <select name="langs" multiple><option>no</option><option selected>en</option><option>it</option></select>
  <label><input type="radio" name="plan" value="basic" checked> Basic</label>
  <label><input type="radio" name="plan" value="pro"> Pro</label>
  <label><input type="checkbox" name="news" value="daily"> Daily</label>
  <label><input type="checkbox" name="news" value="weekly"> Weekly</label>
  <label><input type="checkbox" name="terms" required> I agree</label>
  <label>About <textarea name="about">
first line</textarea></label>
  <input type="file" name="cv" accept=".txt">
  <input name="code" pattern="[A-Z]{{3}}" title="three capitals">
  <input name="fixed" value="stays" readonly>
  <fieldset disabled><input name="off" value="never"></fieldset>
  {more}
  <button name="do" value="save">Save draft</button> <button name="do" value="send">Send</button>
</form>
<input name="outside" form="signup" value="here"></body></html>"""


class Site:
    """What the server got, and what it should do next."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[str, Any]]] = []
        self.headers: list[Message] = []
        self.reads = 0
        self.more = ""
        """HTML that the page has more than before."""
        self.answer = "redirect"
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    site: Site
    tokens: dict[str, str]

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        if place.path == "/moved":
            return self._redirect("/signup")
        if place.path == "/done":
            said = "Thank you" if self._visitor() in self.tokens else "Who are you?"
            return self._page(f"<title>Done</title><script>alert(1)</script><h1>{said}</h1><p>Number 17</p>")
        if place.path == "/found":
            self.site.sent.append(parse_qsl(place.query, keep_blank_values=True))
            return self._page("<p>found</p>")
        if place.path == "/find":
            return self._page('<form action="/found?old=1"><input name="q"></form>')
        if place.path == "/steps":
            return self._page('<form method="post" action="/steps"><input name="one" required></form>')
        if place.path == "/scripted":
            return self._page("<div id=app></div><script>render()</script>")
        if place.path == "/signup":
            self.site.reads += 1
            visitor = self._visitor() or secrets.token_hex(4)
            self.tokens[visitor] = secrets.token_hex(4)  # each reading has a new one, and the old one is void
            page = SIGN_UP.format(token=self.tokens[visitor], more=self.site.more)
            return self._page(page, cookie=f"visitor={visitor}; Path=/; HttpOnly")
        return self._page("not here", status=404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        entries = _entries(self.headers, body)
        self.site.sent.append(entries)
        self.site.headers.append(self.headers)
        if self.site.answer == "hang up":
            self.connection.close()
            return None
        if self.path == "/steps":
            name = "two" if entries[0][0] == "one" else ""
            form = f'<form method="post" action="/steps"><input name="{name}" required></form>'
            return self._page(form if name else "<p>all done</p>")
        if self.site.answer == "elsewhere":
            return self._redirect("http://127.0.0.2:9/steal", status=307)
        if dict(entries).get("token") != self.tokens.get(self._visitor()):
            return self._page("<h1>Forbidden</h1><p>CSRF token missing or wrong</p>", status=403)
        if self.site.answer == "again":
            return self._page(SIGN_UP.format(token="x", more="<p>That name is taken</p>"))
        return self._redirect("/done", status=303)

    def _visitor(self) -> str:
        morsel = SimpleCookie(self.headers.get("Cookie", "")).get("visitor")
        return morsel.value if morsel else ""

    def _page(self, html: str, status: int = 200, cookie: str = "") -> None:
        content = html.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(content)

    def _redirect(self, place: str, status: int = 302) -> None:
        self.send_response(status)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _entries(headers: Message, body: bytes) -> list[tuple[str, Any]]:
    if headers.get_content_type() != "multipart/form-data":
        return parse_qsl(body.decode(), keep_blank_values=True)
    whole = BytesParser().parsebytes(f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body)
    found: list[tuple[str, Any]] = []
    for part in whole.get_payload():
        assert isinstance(part, Message)
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        name, file = str(part.get_param("name", header="content-disposition")), part.get_filename()
        found.append((name, content.decode() if file is None else [file, content.decode()]))
    return found


@contextmanager
def served() -> Generator[Site]:
    site = Site()
    handler = type("Handler", (_Handler,), {"site": site, "tokens": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
