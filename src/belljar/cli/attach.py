"""`belljar attach`: a person shares the live session of an agent, in this terminal or from a Jupyter front end."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from belljar.cli.attached_console import run_console
from belljar.cli.sessions import live_sessions
from belljar.jupyter import require_ipykernel
from belljar.settings import load_command_settings


def command(
    session: Annotated[
        str,
        typer.Argument(
            help="Id of a live session, or how it begins; may be the only one.", autocompletion=live_sessions
        ),
    ] = "",
    connection: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve the session to Jupyter front ends; FILE tells them how to connect."),
    ] = None,
    transport: Annotated[
        Literal["ipc", "tcp"], typer.Option(help="With --connection: sockets in the file system, or on the loopback.")
    ] = "ipc",
    data_directory: Annotated[Path | None, typer.Option(help="Data directory of the server.")] = None,
) -> None:
    """Share a live session: its variables and files, and what others run in it while you look on.

    Your cells take their turn like everyone's, and are on record as yours. The session goes on when you leave. On a
    terminal, lines can be edited, names are completed by the session, what you typed is there the next time, and
    figures are saved in the download directory, with their path shown. In a pipe, the cells are what is piped in.
    """
    settings = load_command_settings({"data_directory": data_directory})
    folder = settings.data_directory
    if connection is None:
        raise typer.Exit(run_console(folder, session, settings.download_directory))
    require_ipykernel()
    # Imports ipykernel, which is optional and which the console does not need.
    from belljar.jupyter.application import serve_existing

    serve_existing(folder, session, connection.expanduser().absolute(), transport)
