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

from belljar.control import ask_each
from belljar.errors import EngineError, SettingsError
from belljar.sandboxes.data_path import is_in_image
from belljar.settings import Settings, load_command_settings

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def command(
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open the link in a browser.")] = True,
    data_directory: Annotated[Path | None, typer.Option(help="Where the server keeps its sessions.")] = None,
) -> None:
    """Open the console: sessions, cells and their output, live, in a browser.

    Prints a link that signs in once, within ten minutes. Whoever can run this command as the server's user sees all
    sessions, and so does an agent with a shell of that user.
    """
    settings = load_command_settings({"data_directory": data_directory})
    asyncio.run(_open(settings, opens=opens))


async def _open(settings: Settings, *, opens: bool) -> None:
    answers = await ask_each(settings.data_directory, "POST", "/console-link")
    links: list[dict[str, str]] = [found for _, found in answers if found is not None]
    served = next((found for found in links if found["url"]), None)
    if served is not None:
        if not served["link"]:
            print("this server gives no links (console_link = false): sign in with a key", file=sys.stderr)
        _show(served["link"] or served["url"], opens=opens)
        return
    if not links:
        raise EngineError(
            f"no running server uses {settings.data_directory}",
            hint="Start one with `belljar serve`, or name its data directory with --data-directory",
        )
    if not settings.console_link:
        raise SettingsError(
            "the setting console_link is off, and without links nobody can sign in to a console of servers on stdio",
            hint="Serve with `belljar serve --http ADDRESS` and api_keys, and sign in with a key",
        )
    await _serve(settings, opens=opens)


async def _serve(settings: Settings, *, opens: bool) -> None:
    """Serve a console here, over the sockets of all servers of the data directory, until it is ended."""
    from belljar.console.server import remote_console
    from belljar.http.app import serve_http

    console, app = remote_console(settings)

    def on_ready(url: str) -> None:
        console.url = url
        print("serving the console until Ctrl-C; the link opens once, within 10 minutes", file=sys.stderr)
        if is_in_image():
            print("it is reached in this container only; a server over HTTP has one for outside", file=sys.stderr)
        _show(console.link().link, opens=opens)

    await serve_http(app, "127.0.0.1", 0, on_ready=on_ready, log_level="WARNING")


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
