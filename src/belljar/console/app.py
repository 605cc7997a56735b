"""The routes of the console and of its API, behind one guard."""

import gzip
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from belljar.console.archive import Archives
from belljar.console.forms import SessionActions
from belljar.console.frames import Frames
from belljar.console.middleware import ENTER, ConsoleMiddleware, is_own_path
from belljar.console.pages import FilePages, Pages
from belljar.console.stream import PageStreams
from belljar.console.templating import render, static_files, static_version
from belljar.console.variables import VariablePages
from belljar.engine.contract import Engine
from belljar.engine.operations import PREFIX
from belljar.errors import BelljarError, InvalidArgument, Unauthorized
from belljar.http.api import RestApi
from belljar.http.api_operations import problem
from belljar.http.auth.browser import SIGNED_IN_S, BrowserSignIn
from belljar.http.auth.code_flow import CALLBACK, FLOW_S, CodeFlow
from belljar.http.health import exact
from belljar.products import products
from belljar.settings import Settings

PATHS: Final = ("/console", "/console/{path:path}", f"{PREFIX}/{{path:path}}", "/frames/{path:path}")
_MAX_FORM_BYTES: Final = 64 * 1024
# Shorter pages fit into a packet or two as they are.
_LEAST_COMPRESSED_BYTES: Final = 1_400
_YEAR: Final = "public, max-age=31536000, immutable"
Endpoint = Callable[[Request], Awaitable[Response]]


def console_app(
    engine: Engine,
    sign_in: BrowserSignIn,
    settings: Settings,
    *,
    serves_mcp: bool = True,
    flow: CodeFlow | None = None,
) -> ASGIApp:
    """Return the app for all of `PATHS`; it asks for credentials itself. `serves_mcp`: whether clients connect here."""
    pages = Pages(
        engine,
        address=settings.public_url.rstrip("/"),
        serves_mcp=serves_mcp,
        allows_scripts=settings.console_scripts == "ask",
    )
    variables = VariablePages(engine, pages.page)
    frames = Frames(engine, allows_scripts=settings.console_scripts == "ask")
    more = [found for product in products() if (found := product.pages(engine, pages.page)) is not None]
    streams = PageStreams(engine, pages, {name: part for each in more for name, part in each.parts.items()})
    actions = SessionActions(engine, max_upload_bytes=settings.max_upload_bytes)
    files = FilePages(engine, pages)
    sign_in_pages = SignInPages(sign_in, flow)
    routes = [
        Route("/console", _shown(pages.sessions), methods=["GET"]),
        Route("/console/search", _shown(pages.search), methods=["GET"]),
        Route("/console/sessions/{session_id}", _shown(pages.session), methods=["GET"]),
        Route("/console/sessions/new", _shown(actions.create), methods=["POST"]),
        Route("/console/sessions/{session_id}/files", _shown(files.folder), methods=["GET"]),
        Route("/console/sessions/{session_id}/archive", _shown(Archives(engine).serve), methods=["GET"]),
        Route("/console/sessions/{session_id}/view", _shown(files.file), methods=["GET"]),
        Route("/console/sessions/{session_id}/picture", _answered(files.picture), methods=["GET"]),
        Route("/console/sessions/{session_id}/calls", _shown(pages.calls), methods=["GET"]),
        Route("/console/sessions/{session_id}/variables", _shown(variables.variables), methods=["GET"]),
        Route("/console/sessions/{session_id}/variables/{name:path}", _shown(variables.rows), methods=["GET"]),
        Route("/console/sessions/{session_id}/packages", _shown(variables.packages), methods=["GET"]),
        Route("/console/sessions/{session_id}/packages", _shown(variables.install), methods=["POST"]),
        Route("/console/sessions/{session_id}/timeline", _shown(pages.timeline), methods=["GET"]),
        Route("/console/sessions/{session_id}/cells", _shown(pages.older_cells), methods=["GET"]),
        Route("/console/sessions/{session_id}/{act}", _shown(actions.serve), methods=["POST"]),
        Route("/console/executions/{execution_id}", _shown(pages.execution), methods=["GET"]),
        Route("/console/executions/{execution_id}/output", _shown(pages.execution), methods=["GET"]),
        Route("/console/executions/{execution_id}/lines", _answered(pages.lines), methods=["GET"]),
        Route("/console/executions/{execution_id}/whole", _compressed(_answered(pages.whole_output)), methods=["GET"]),
        Route("/console/inbox", _shown(pages.inbox), methods=["GET"]),
        Route("/console/inbox", _shown(actions.answer_several), methods=["POST"]),
        Route("/console/inbox/{question_id:path}", _shown(pages.one_question), methods=["GET"]),
        Route("/console/inbox/{question_id:path}", _shown(actions.answer), methods=["POST"]),
        Route("/console/decisions", _shown(pages.decisions), methods=["GET"]),
        Route("/console/health", _shown(pages.health), methods=["GET"]),
        Route("/console/stream", _answered(streams.serve), methods=["GET"]),
        Route(ENTER, sign_in_pages.show, methods=["GET"]),
        Route(ENTER, sign_in_pages.sign_in, methods=["POST"]),
        *(
            [
                Route("/console/oauth/begin", _shown(sign_in_pages.begin), methods=["GET"]),
                Route(CALLBACK, _shown(sign_in_pages.finish), methods=["GET"]),
            ]
            if flow is not None
            else []
        ),
        Route("/console/leave", sign_in_pages.sign_out, methods=["POST"]),
        Route("/console/static/{version}/{name}", _static, methods=["GET"]),
        Route("/frames/{execution_id}/{name}", _compressed(frames.serve), methods=["GET"]),
        *(
            Route(route.path, _shown(route.endpoint), methods=sorted(route.methods or ()))
            for each in more
            for route in each.routes
        ),
        *RestApi(engine, max_upload_bytes=settings.max_upload_bytes).routes(),
    ]
    app = Starlette(routes=[exact(route) for route in routes], exception_handlers={404: _missing})
    # A path with a slash too many is no path of ours, and a redirect would be one more answer to guard.
    app.router.redirect_slashes = False
    return ConsoleMiddleware(app, sign_in)


def _answered(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with its errors as the API answers them."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BelljarError as error:
            return problem(error)

    return answer


def _shown(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with its errors as a page."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BelljarError as error:
            status = problem(error).status_code
            return HTMLResponse(_error_page(request, error.message, error.hint), status_code=status)

    return _compressed(answer)


def _compressed(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with its pages compressed: fifty cells shrink to a tenth.

    The length of a compressed page tells something of its text. Nobody elsewhere can make a browser ask for it, because
    the cookie is strict, and no secret of ours is in it.
    """

    async def answer(request: Request) -> Response:
        response = await endpoint(request)
        if not isinstance(response, HTMLResponse):
            return response
        response.headers["Vary"] = "Accept-Encoding"
        if len(response.body) >= _LEAST_COMPRESSED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
            response.body = gzip.compress(response.body, 5, mtime=0)
            response.headers["Content-Encoding"] = "gzip"
            response.headers["Content-Length"] = str(len(response.body))
        return response

    return answer


async def _missing(request: Request, _: Exception) -> Response:
    if request.url.path.startswith("/console"):
        return HTMLResponse(_error_page(request, "There is no such page", ""), status_code=404)
    return JSONResponse(
        {"error": {"code": "not-found", "message": "There is no such path", "hint": f"See {PREFIX}/openapi.json"}},
        status_code=404,
    )


def _error_page(request: Request, message: str, hint: str) -> str:
    access = getattr(request.state, "access", None)
    return render("error.html", access=access, path=request.url.path, waiting=0, message=message, hint=hint)


async def _static(request: Request) -> Response:
    file = static_files().get(str(request.path_params["name"]))
    if file is None or request.path_params["version"] != static_version():
        return Response(status_code=404)
    headers = {"Cache-Control": _YEAR, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(file.compressed, media_type=file.media_type, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


class SignInPages:
    """The sign-in page, and signing in and out."""

    def __init__(self, sign_in: BrowserSignIn, flow: CodeFlow | None = None) -> None:
        self._sign_in = sign_in
        self._flow = flow

    async def show(self, request: Request) -> Response:
        """Answer `GET /console/enter`. A link's token is behind `#`, which only the page itself sees."""
        return HTMLResponse(self._page(request))

    async def sign_in(self, request: Request) -> Response:
        """Answer `POST /console/enter`: sign in with the token of a link, or with a key."""
        address = request.client.host if request.client else ""
        # A form without a length could go on for ever, and nobody has shown who they are yet.
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MAX_FORM_BYTES:
            return HTMLResponse(self._page(request, "That is too long for a key"), status_code=413)
        async with request.form(max_files=0, max_fields=10) as form:
            token, key = str(form.get("token", "")), str(form.get("key", "")).strip()
            wanted = str(form.get("next", ""))
        # Links cannot be guessed, so nobody can keep their owner out by guessing keys from the same address.
        if not token and (wait_s := self._sign_in.failures.wait_s(address)) > 0:
            response = HTMLResponse(self._page(request, "Too many wrong keys; wait a minute"), status_code=429)
            response.headers["Retry-After"] = str(int(wait_s) + 1)
            return response
        cookie = self._sign_in.with_link(token) if token else await self._sign_in.with_key(key)
        if cookie is None:
            if not token:
                self._sign_in.failures.add(address)
            error = (
                "This link has been used, or is older than ten minutes"
                if token
                else "This key is not one of the server's"
            )
            return HTMLResponse(self._page(request, error), status_code=401)
        response = RedirectResponse(wanted if is_own_path(wanted) else "/console", status_code=303)
        return self._with_cookie(response, request, cookie)

    async def begin(self, request: Request) -> Response:
        """Answer `/console/oauth/begin`: send the browser to the issuer."""
        if self._flow is None:
            raise InvalidArgument("this server has no issuer to sign in at")
        address, cookie = await self._flow.begin(request.query_params.get("next", ""))
        response = RedirectResponse(address, status_code=303)
        # Lax, because the issuer's page sends the browser back.
        response.set_cookie(
            self._flow_cookie(request),
            cookie,
            max_age=int(FLOW_S),
            path=CALLBACK,
            secure=self._sign_in.is_secure(request),
            httponly=True,
            samesite="lax",
        )
        return response

    async def finish(self, request: Request) -> Response:
        """Answer the callback: verify the token that the issuer gives for the code, forget it, and sign in."""
        if self._flow is None:
            raise InvalidArgument("this server has no issuer to sign in at")
        cookie = request.cookies.get(self._flow_cookie(request), "")
        token, wanted = await self._flow.finish(dict(request.query_params), cookie)
        signed_in = await self._sign_in.with_key(token)
        if signed_in is None:
            raise Unauthorized("the issuer's token is not meant for this server", hint="Ask who set up oauth_client_id")
        # A page that goes on by itself, not a redirect: a browser that comes from the issuer sends no strict cookie
        # along with a redirect.
        page = render(
            "entered.html", access=None, path=CALLBACK, waiting=0, next=wanted if is_own_path(wanted) else "/console"
        )
        response = self._with_cookie(HTMLResponse(page), request, signed_in)
        response.delete_cookie(self._flow_cookie(request), path=CALLBACK)
        return response

    async def sign_out(self, request: Request) -> Response:
        """Answer `POST /console/leave`: sign out, in every browser that is signed in as the same person."""
        name = self._sign_in.cookie_name(request)
        self._sign_in.browsers.sign_out(request.cookies.get(name, ""))
        response = RedirectResponse(ENTER, status_code=303)
        is_secure = self._sign_in.is_secure(request)
        response.delete_cookie(name, path="/", secure=is_secure, httponly=True, samesite="strict")
        return response

    def _page(self, request: Request, error: str = "") -> str:
        wanted = request.query_params.get("next", "")
        return render(
            "enter.html",
            waiting=0,
            access=None,
            path=ENTER,
            error=error,
            next=wanted if is_own_path(wanted) else "",
            takes_keys=self._sign_in.takes_keys,
            gives_links=self._sign_in.gives_links,
            has_issuer=self._flow is not None,
        )

    def _flow_cookie(self, request: Request) -> str:
        # Without `__Host-`, which does not allow a path.
        return f"{self._sign_in.cookie_name(request).removeprefix('__Host-')}-flow"

    def _with_cookie(self, response: Response, request: Request, cookie: str) -> Response:
        response.set_cookie(
            self._sign_in.cookie_name(request),
            cookie,
            max_age=int(SIGNED_IN_S),
            path="/",
            secure=self._sign_in.is_secure(request),
            httponly=True,
            samesite="strict",
        )
        return response
