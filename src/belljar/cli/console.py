"""`belljar console`: opens the console of a running server, or serves one for servers that have no address.

The link that it prints signs in once. Works without a browser: the link can be opened in another one.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from belljar import ipc
from belljar.attachments.messages import ConsoleLink, ConsoleRequest
from belljar.control import MAX_MESSAGE_BYTES, PATIENCE_S, server_sockets
from belljar.errors import EngineError
from belljar.settings import Settings, load_settings

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def command(
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open the link in a browser.")] = True,
    data_directory: Annotated[Path | None, typer.Option(help="Where the server keeps its sessions.")] = None,
) -> None:
    """Open the console: sessions, cells and their output, live, in a browser.

    Prints a link that signs in once, within ten minutes. Whoever can run this command as the server's user sees all
    sessions, and so does an agent with a shell of that user.
    """
    settings = load_settings({"data_directory": data_directory})
    asyncio.run(_open(settings, opens=opens))


async def _open(settings: Settings, *, opens: bool) -> None:
    paths = await asyncio.to_thread(server_sockets, settings.data_directory)
    links = [found for found in await asyncio.gather(*map(_ask, paths)) if found is not None]
    served = next((found for found in links if found.url), None)
    if served is not None:
        if not served.link:
            print("this server gives no links (console_link = false): sign in with a key", file=sys.stderr)
        _show(served.link or served.url, opens=opens)
        return
    if not links:
        raise EngineError(
            f"no running server uses {settings.data_directory}",
            hint="Start one with `belljar serve`, or name its data directory with --data-directory",
        )
    raise EngineError(
        f"{len(links)} server{'s' if len(links) > 1 else ''} of {settings.data_directory} "
        f"{'have' if len(links) > 1 else 'has'} no console",
        hint="Start one with `belljar serve --http 127.0.0.1:8000` on the same data directory",
    )


async def _ask(path: Path) -> ConsoleLink | None:
    """Return a server's link; empty where it has no console, None where it does not answer."""
    with contextlib.suppress(TimeoutError, OSError, ipc.Malformed):
        async with asyncio.timeout(PATIENCE_S):
            stream = await ipc.open_stream(path, limit_bytes=MAX_MESSAGE_BYTES)
            try:
                await stream.send(ConsoleRequest().model_dump())
                return await stream.receive(ConsoleLink.model_validate_json)
            finally:
                stream.close()
    return None


def _show(link: str, *, opens: bool) -> None:
    print(link, flush=True)
    if opens and sys.stdout.isatty():
        open_in_browser(link)


def open_in_browser(link: str) -> None:
    """Open a link, where this machine has a screen; nothing is said where it has none, because the link is printed."""
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, _DISPLAYS))
    opener = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if has_screen and opener:
        with contextlib.suppress(OSError):
            subprocess.Popen(
                [opener, link], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
