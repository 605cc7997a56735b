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

from belljar import logs
from belljar.cli import uncollected_imports
from belljar.environments import prepare
from belljar.executions.admission import descriptor_limit, most_sessions
from belljar.http.jsonrpc import most_request_bytes
from belljar.http.server_socket import open_reachable_runtime
from belljar.mcp.executor import from_variables
from belljar.mcp.server import build_server
from belljar.mcp.stdio import serve_stdio
from belljar.runtime import Runtime
from belljar.servers import tell_address
from belljar.settings import Settings

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
    serve_clients = _serve_stdio
    if settings.http:
        # Imported here, because a server that speaks stdio needs none of it.
        with uncollected_imports():
            from belljar.cli.serve_http import check_address, serve_at_address

        check_address(settings, worker)
        if settings.environment == "default" and sys.stderr.isatty() and _needs_sessions(settings):
            await prepare(settings, show=True)
        serve_clients = partial(serve_at_address, worker=worker)
    with _stop_on_signals() as stop:
        try:
            await serve_clients(settings, stop)
        except asyncio.CancelledError:
            if not stop.asked.is_set():
                raise


async def _serve_stdio(settings: Settings, stop: StopRequest) -> None:
    if sys.stdin.isatty() and settings.log_format != "json":
        print(_TOLD_ON_A_TERMINAL, file=sys.stderr, flush=True)
    async with open_served_runtime(settings) as runtime:
        stop.has_started = True
        tell_address(settings.data_directory / "runs", runtime.name, "over stdio")
        server = build_server(runtime, settings.surfaces)
        await serve_stdio(server, stop.asked, line_bytes=most_request_bytes(settings))


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


def open_served_runtime(settings: Settings) -> AbstractAsyncContextManager[Runtime]:
    """Open the runtime of a server, which commands of its user reach."""
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
