"""The one guard before the console, its API and the outputs: who asks, and whether a page of ours made the request.

Denies by default, on loopback as well: only the sign-in page and our own static files need no credentials. Adds the
headers that every answer carries.
"""

from typing import Final
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar.engine.contract import Access
from belljar.engine.operations import PREFIX
from belljar.http.api_operations import refused
from belljar.http.auth.browser import BrowserSignIn, is_foreign, is_same_origin
from belljar.http.auth.code_flow import CALLBACK

ENTER: Final = "/console/enter"
STATIC: Final = "/console/static/"
OAUTH: Final = ("/console/oauth/begin", CALLBACK)
PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: with it browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), usb=(), serial=(), clipboard-read=()",
    "X-DNS-Prefetch-Control": "off",
    "Cache-Control": "no-store",
}
_SAFE: Final = ("GET", "HEAD")
_BEARER: Final = "bearer "


class ConsoleMiddleware:
    """Middleware that lets only callers through whom it knows, and tells `app` who they are."""

    def __init__(self, app: ASGIApp, sign_in: BrowserSignIn) -> None:
        self._app = app
        self._sign_in = sign_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with `request.state.access` set."""
        if scope["type"] != "http":  # there is no WebSocket
            return
        request = Request(scope)
        refusal, access = await self._judge(request)
        answer = _with_headers(send)
        if refusal is not None:
            await refusal(scope, receive, answer)
            return
        scope.setdefault("state", {})["access"] = access
        await self._app(scope, receive, answer)

    async def _judge(self, request: Request) -> tuple[Response | None, Access | None]:
        path, is_safe = request.url.path, request.method in _SAFE
        if path.startswith(STATIC) and is_safe:
            return None, None
        if path in OAUTH and is_safe:
            # The issuer sends the browser back here: the flow's own state and cookie are checked instead.
            return None, None
        if path == ENTER:
            is_ours = is_safe or is_same_origin(request)
            return (None if is_ours else _cross_site()), None
        if (token := _bearer(request)) is not None:
            access = await self._sign_in.with_bearer(token)
            return (None if access else _unauthorized()), access
        access = self._sign_in.browsers.find(request.cookies.get(self._sign_in.cookie_name(request), ""))
        is_page = path.startswith("/console") and is_safe and path != "/console/stream"
        if access is None:
            return (_to_sign_in(request) if is_page else _unauthorized()), None
        # A page of another port of this host is of the same site, so it could use the cookie.
        if (not is_safe and not is_same_origin(request)) or (not is_page and is_foreign(request)):
            return _cross_site(), None
        return None, access


def _bearer(request: Request) -> str | None:
    header = request.headers.get("authorization", "")
    if header.lower().startswith(_BEARER):
        return header[len(_BEARER) :].strip()
    return request.headers.get("x-ms-apikey") or ("" if header else None)


def _to_sign_in(request: Request) -> Response:
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{ENTER}?next={quote(wanted, safe='')}", status_code=303)


def _unauthorized() -> Response:
    return refused(
        401,
        "unauthorized",
        "There are no credentials, or none that are accepted",
        f"Send a key as `Authorization: Bearer KEY`, or sign in at {ENTER}; `belljar console` makes a link for it",
        WWW_Authenticate="Bearer",
    )


def _cross_site() -> Response:
    return refused(403, "cross-site", "A page of another origin made this request", f"Use {PREFIX} with a key instead")


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


def is_own_path(path: str) -> bool:
    """Return whether a path to go to after signing in is one of the console's pages."""
    is_plain = path.isascii() and path.isprintable() and "\\" not in path and "//" not in path
    return is_plain and (path == "/console" or path.startswith(("/console/", "/console?"))) and path != ENTER
