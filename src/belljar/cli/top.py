"""`belljar top`: the sessions of every server that uses this data directory, live in the terminal."""

import sys
from typing import Annotated

import typer


def command(
    once: Annotated[bool, typer.Option("--once", help="Print one frame as plain text and end.")] = False,
) -> None:
    """Watch the sessions of all running servers of this data directory; q or Ctrl-C ends.

    CPU is the share of one processor that a session's kernel used since the last look.
    """
    import asyncio
    import contextlib

    from belljar.cli.watching import print_once, watch
    from belljar.settings import load_settings

    folder = load_settings().data_directory
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch(folder) if sys.stdout.isatty() and not once else print_once(folder))
