"""`belljar serve --http`: one server at an address, with the console, and what people are told of where it is."""

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from belljar.cli.serve import StopRequest, is_in_fleet, open_served_runtime
from belljar.console.server import ServedConsole, open_console
from belljar.http.app import check_bind, parse_bind, serve_http, told_address
from belljar.http.forwarded import PROXY_HINT, proxy_warning
from belljar.http.tls import tls_context
from belljar.mcp.server import build_http_app
from belljar.runtime import Runtime
from belljar.sandboxes.data_path import is_in_image
from belljar.servers import machine_of, tell_address
from belljar.settings import Settings
from belljar.toolbox.server_config import stdio_servers

if TYPE_CHECKING:
    from belljar.fleet.routing import Fleet

log = logging.getLogger(__name__)


def check_address(settings: Settings, worker: int) -> None:
    """Raise SettingsError where nobody should be served at that address; `worker` is as in `serve`."""
    check_bind(settings)
    if worker <= 1 and (warning := proxy_warning(settings)):
        log.warning("%s. %s", warning, PROXY_HINT)


async def serve_at_address(settings: Settings, stop: StopRequest, worker: int) -> None:
    """Serve MCP, the HTTP API and the console until somebody stops it; `worker` is as in `serve`."""
    host, port = parse_bind(settings.http)
    async with open_served_runtime(settings) as runtime:
        stop.has_started = True
        if stop.asked.is_set():
            return
        fleet = _fleet(runtime)
        if worker == 1 and (own := stdio_servers(settings)):
            log.warning(
                "each worker starts a process of its own of %s, so what one of them remembers the others do not know: "
                "name servers that keep state by a URL",
                ", ".join(own),
            )
        opening = open_console(runtime) if fleet is None else open_console(runtime, fleet.engines, fleet.mark)
        async with opening as console:
            await serve_http(
                build_http_app(runtime, console.apps if console is not None else None, fleet),
                host,
                port,
                on_ready=partial(_tell_ready, runtime, console, is_silent=worker > 1),
                log_level=settings.log_level,
                max_connections=settings.max_connections,
                tls=tls_context(settings),
                shares_port=worker > 0,
                # Sessions that outlive this server need not leave it.
                before_exit=runtime.sessions.drain if settings.store and not settings.keep_alive else None,
            )


def _fleet(runtime: Runtime) -> "Fleet | None":
    """Return this server as one of several of its machine, or of a fleet; None where it is alone."""
    settings = runtime.settings
    machine = machine_of(settings.data_directory)
    if machine is None and not is_in_fleet(settings):
        return None
    # Imported here, because most servers are alone.
    from belljar.fleet.routing import Fleet

    return Fleet(runtime, machine or settings.data_directory)


def _tell_ready(runtime: Runtime, console: ServedConsole | None, listening: str, *, is_silent: bool) -> None:
    url = told_address(runtime.settings, listening)
    tell_address(runtime.settings.data_directory / "runs", runtime.name, url)
    if console is not None:
        console.url, console.public_url = listening, url
    if is_silent:
        return
    if runtime.settings.log_format == "json":
        # With JSON logs a program reads stderr, and every line has to be JSON. A log that is kept gets no link.
        log.info("belljar serves MCP at %s/mcp", url)
        return
    note = _about_address(runtime.settings, url, listening)
    print(f"belljar serves MCP at {url}/mcp{note}", file=sys.stderr, flush=True)
    if console is not None:
        # A link is for whoever started the server and looks at it; a file or a service's log gets none.
        link = console.link().link if sys.stderr.isatty() else ""
        command = "docker exec CONTAINER belljar console" if is_in_image() else "belljar console"
        how = "opens once, within 10 minutes" if link else f"`{command}` opens it"
        print(f"the console is at {link or url + '/console'} ({how})", file=sys.stderr, flush=True)


def _about_address(settings: Settings, url: str, listening: str) -> str:
    """Return what is to be said with the address that people are told, where it is not the one we listen at."""
    if url == listening:
        return ""
    if settings.public_url or not is_in_image():
        return f" (it listens at {listening})"
    return f" (with `-p PORT:{urlsplit(listening).port}` it is that PORT outside: name it with BELLJAR_PUBLIC_URL)"
