"""The console of a server: its engine, its ways in, and the links that it gives its user."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from belljar.console.app import PATHS, console_app
from belljar.console.middleware import ENTER
from belljar.engine.many import ManyEngine, Places, servers_of
from belljar.engine.models import ConsoleLink
from belljar.http.app import transport_security
from belljar.http.auth import build_auth
from belljar.http.auth.browser import BrowserSignIn
from belljar.http.auth.code_flow import CodeFlow
from belljar.http.health import HostCheckMiddleware, Operations, SpeakerRefusal, exact
from belljar.runtime import Runtime
from belljar.settings import Settings


@dataclass(slots=True)
class ServedConsole:
    """A console that is mounted in an app. `url` is set once the server listens."""

    sign_in: BrowserSignIn
    apps: dict[str, ASGIApp] = field(default_factory=dict[str, ASGIApp])
    """The same app at each of its paths."""
    url: str = ""
    public_url: str = ""
    """Where people reach it, if not at `url`: a name of its own keeps its cookies to itself."""

    def link(self) -> ConsoleLink:
        """Return where the console is, with a token that signs in once."""
        if not self.url:
            return ConsoleLink()
        address = self.public_url.rstrip("/") or self.url
        link = f"{address}{ENTER}#{self.sign_in.links.make()}" if self.sign_in.gives_links else ""
        return ConsoleLink(url=f"{address}/console", link=link)


def code_flow(settings: Settings) -> CodeFlow | None:
    """Return how people sign in at the issuer; None where the settings name no client for it."""
    if not (settings.oauth_issuer and settings.oauth_audience and settings.oauth_client_id):
        return None
    return CodeFlow(
        issuer=settings.oauth_issuer,
        audience=settings.oauth_audience,
        client_id=settings.oauth_client_id,
        scopes=settings.oauth_scopes,
    )


def browser_sign_in(settings: Settings, mark: str = "") -> BrowserSignIn:
    """Return the ways in that the settings allow."""
    auth = build_auth(settings)
    return BrowserSignIn(
        verifier=auth.verifier if auth else None,
        scopes=(auth.settings.required_scopes or []) if auth else [],
        operators=settings.console_operators,
        gives_links=settings.console_link,
        public_url=settings.public_url,
        mark=mark,
    )


@asynccontextmanager
async def open_console(
    runtime: Runtime, places: Places | None = None, mark: str = ""
) -> AsyncGenerator[ServedConsole | None]:
    """Open the console of a runtime; None where the settings turn it off.

    Where several servers share its address, it shows the sessions of all in `places`, and its links and cookies begin
    with `mark`, by which the others know that they are this one's.
    """
    settings = runtime.settings
    if not settings.console:
        yield None
        return
    engine = runtime.late_engine.get()
    engine.check = Operations(runtime).checks
    sign_in = browser_sign_in(settings, mark)
    shown = ManyEngine(places) if places is not None else engine
    app = console_app(shown, sign_in, settings, flow=code_flow(settings))
    console = ServedConsole(sign_in, dict.fromkeys(PATHS, app), public_url=settings.public_url)
    engine.make_console_link = console.link
    inbox = runtime.sessions.inbox
    before, inbox.console_url = inbox.console_url, lambda: settings.public_url or _usable_url(console.url)
    engine.start()
    try:
        yield console
    finally:
        engine.make_console_link = None
        inbox.console_url = before


def _usable_url(url: str) -> str:
    """Return the address that a server listens on if people can use it: a wildcard is none."""
    host = urlsplit(url).hostname or ""
    return url if host and host not in ("0.0.0.0", "::") else ""  # noqa: S104


def remote_console(settings: Settings) -> tuple[ServedConsole, Starlette]:
    """Return a console, and its app, for the servers of a data directory that have no address of their own."""
    sign_in = BrowserSignIn()
    app = console_app(servers_of(settings.data_directory), sign_in, settings, serves_mcp=False)
    console = ServedConsole(sign_in, dict.fromkeys(PATHS, app))
    # On loopback whatever the servers' own settings are, and for names of loopback only.
    security = transport_security(settings.model_copy(update={"http": "", "allowed_hosts": [], "trust_network": False}))
    routes = [exact(Route(path, HostCheckMiddleware(one, security))) for path, one in console.apps.items()]
    return console, Starlette(routes=routes, middleware=[Middleware(SpeakerRefusal)])
