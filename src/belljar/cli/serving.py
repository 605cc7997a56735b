"""A runtime behind its surfaces, until the client or the operator ends it. Everything it says goes to stderr."""

import asyncio
import logging
import sys

from belljar import logs
from belljar.cli.signals import Stop, stop_signals
from belljar.environments import prepare
from belljar.runtime import open_runtime
from belljar.settings import Settings
from belljar.surfaces.http import check_bind, most_request_bytes, parse_bind, serve_http
from belljar.surfaces.server import build_http_app, build_server
from belljar.surfaces.stdio import serve_stdio

log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Serve over HTTP where the settings name an address, else over stdio."""
    logs.configure(settings.log_level, settings.log_format)
    if settings.http:
        check_bind(settings)
        if settings.environment == "default" and sys.stderr.isatty():
            await prepare(settings, show=True)
    with stop_signals() as stop:
        try:
            await (_serve_http(settings, stop) if settings.http else _serve_stdio(settings, stop))
        except asyncio.CancelledError:
            if not stop.asked.is_set():
                raise


async def _serve_stdio(settings: Settings, stop: Stop) -> None:
    async with open_runtime(settings) as runtime:
        stop.has_started = True
        server = build_server(runtime, settings.surfaces)
        await serve_stdio(server, stop.asked, line_bytes=most_request_bytes(settings))


async def _serve_http(settings: Settings, stop: Stop) -> None:
    host, port = parse_bind(settings.http)
    async with open_runtime(settings) as runtime:
        stop.has_started = True
        if stop.asked.is_set():
            return
        say = _log_ready if settings.log_format == "json" else _say_ready
        await serve_http(
            build_http_app(runtime),
            host,
            port,
            on_ready=say,
            log_level=settings.log_level,
            max_connections=settings.max_connections,
        )


def _say_ready(url: str) -> None:
    print(f"belljar serves MCP at {url}/mcp", file=sys.stderr, flush=True)


def _log_ready(url: str) -> None:
    # Whoever reads JSON reads nothing else.
    log.info("belljar serves MCP at %s/mcp", url)
