"""One server of `belljar serve`: MCP over stdio or HTTP, until its client or its operator ends it.

Everything that it prints goes to stderr, because stdout carries the protocol.
"""

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from belljar import logs
from belljar.environments import prepare
from belljar.executions.admission import descriptor_limit, most_sessions
from belljar.http.app import check_bind, most_request_bytes, parse_bind, serve_http, told_address
from belljar.http.forwarded import PROXY_HINT, proxy_warning
from belljar.http.server_socket import open_reachable_runtime
from belljar.http.tls import tls_context
from belljar.mcp.executor import from_variables
from belljar.mcp.server import build_http_app, build_server
from belljar.mcp.stdio import serve_stdio
from belljar.runtime import Runtime
from belljar.sandboxes.data_path import is_in_image
from belljar.servers import machine_of, tell_address
from belljar.settings import Settings
from belljar.toolbox.server_config import stdio_servers

if TYPE_CHECKING:
    from belljar.console.server import ServedConsole
    from belljar.fleet.routing import Fleet

MOST_DESCRIPTORS = 65_536
_TOLD_ON_A_TERMINAL = """\
belljar serves MCP over stdin and stdout here, which is for programs: an MCP client starts this command by itself.
  belljar install claude-desktop      shows what to put into a client's configuration
  belljar serve --http 127.0.0.1:8000 serves clients at an address, and people in a browser
  belljar run -c 'print(6 * 7)'       runs code without a client
Ctrl-C ends it."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


class StopRequest:
    """Whether the operator told the server to stop: the first signal ends it in order, later ones change nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.has_started = False
        """Set once the runtime is open; from then on the serving code waits for `asked`."""
        self._main = asyncio.current_task()

    def on_signal(self) -> None:
        """Set `asked`; on a second signal while the server is still starting, cancel the start."""
        if self.asked.is_set() and not self.has_started and self._main is not None:
            self._main.cancel()
        self.asked.set()


async def serve(settings: Settings, env_file: str = "", worker: int = 0) -> None:
    """Serve over HTTP where the settings name an address, else over stdio; `env_file` says what was read of a .env.

    `worker` is its number where it is one of several at that address; the first speaks for all.
    """
    logs.configure(settings.log_level, settings.log_format, worker=worker)
    _raise_descriptor_limit(settings)
    if env_file:
        log.info("%s", env_file)
    is_in_fleet(settings)
    if settings.http:
        check_bind(settings)
        if worker <= 1 and (warning := proxy_warning(settings)):
            log.warning("%s. %s", warning, PROXY_HINT)
        if settings.environment == "default" and sys.stderr.isatty() and _needs_sessions(settings):
            await prepare(settings, show=True)
    with _stop_on_signals() as stop:
        try:
            await (_serve_http(settings, stop, worker) if settings.http else _serve_stdio(settings, stop))
        except asyncio.CancelledError:
            if not stop.asked.is_set():
                raise


async def _serve_stdio(settings: Settings, stop: StopRequest) -> None:
    if sys.stdin.isatty() and settings.log_format != "json":
        print(_TOLD_ON_A_TERMINAL, file=sys.stderr, flush=True)
    async with _open(settings) as runtime:
        stop.has_started = True
        tell_address(settings.data_directory / "runs", runtime.name, "over stdio")
        server = build_server(runtime, settings.surfaces)
        await serve_stdio(server, stop.asked, line_bytes=most_request_bytes(settings))


async def _serve_http(settings: Settings, stop: StopRequest, worker: int) -> None:
    # Imported here, because a server that speaks stdio has no console of its own.
    from belljar.console.server import open_console

    host, port = parse_bind(settings.http)
    async with _open(settings) as runtime:
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


def is_in_fleet(settings: Settings) -> bool:
    """Return whether other machines share their sessions with this one; raise SettingsError where they cannot."""
    if not (settings.fleet_peers or settings.fleet_address or settings.fleet_key.get_secret_value()):
        return False
    # Imported here, because few servers are of a fleet.
    from belljar.fleet.addresses import check_fleet

    return check_fleet(settings)


def _raise_descriptor_limit(settings: Settings) -> None:
    """Raise the limit on open files as far as we may: a session takes twenty here, and most systems start with 1024.

    Warn where it is too low for `max_sessions` all the same.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if (most := most_sessions(settings)) < settings.max_sessions:
        log.warning(
            "%s file descriptors are enough for %d sessions, not for max_sessions = %d: raise LimitNOFILE= of the "
            "service, or ulimit -n",
            descriptor_limit(),
            most,
            settings.max_sessions,
        )


def _open(settings: Settings) -> AbstractAsyncContextManager[Runtime]:
    return open_reachable_runtime(
        settings, prepares=_needs_sessions(settings), takes_runs=True, on_prepared=_exclude_from_collections
    )


def _exclude_from_collections() -> None:
    """Exclude the objects of now from garbage collections, because nearly all of them stay, and collect more often.

    A call that comes during a collection waits for it: 40 to 70 ms, where it visits 40,000 objects for as much garbage
    as 600 calls leave behind.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2)


def _needs_sessions(settings: Settings) -> bool:
    """Tell whether code runs in the configured environment, and not only in one that the executor's variables name."""
    return settings.surfaces != ["executor"] or from_variables().kind is None


def _tell_ready(runtime: Runtime, console: "ServedConsole | None", listening: str, *, is_silent: bool) -> None:
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


@contextmanager
def _stop_on_signals() -> Generator[StopRequest]:
    """Handle stop signals until the runtime is closed.

    Clients send SIGTERM after they close stdin. Unhandled, it would kill the process while it writes variables to disk.
    """
    loop, stop = asyncio.get_running_loop(), StopRequest()
    # A signal that the parent had ignored stays ignored, because nohup does that with SIGHUP.
    numbers = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, stop.on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
