"""`belljar kernel`: the process that Jupyter starts for a notebook. People do not call it, so it is hidden."""

import os
from pathlib import Path
from typing import Annotated

import typer

from belljar import logs
from belljar.jupyter import require_ipykernel
from belljar.settings import load_command_settings


def command(
    connection_file: Annotated[Path, typer.Option("-f", help="Connection file that the front end wrote.")],
    on_server: Annotated[bool, typer.Option("--on-server", help="Open the session on a running server.")] = False,
) -> None:
    """Be a Jupyter kernel with a session of its own."""
    require_ipykernel()
    # Both import ipykernel, which is optional: without it the line above says what to install.
    from belljar.jupyter.application import serve
    from belljar.jupyter.sessions import open_own, open_somewhere

    connection_file = connection_file.absolute()
    # Jupyter starts us in the notebook's folder; its belljar.toml may come from whoever wrote the notebook.
    os.chdir("/")
    settings = load_command_settings({})
    logs.configure("WARNING", settings.log_format)
    open_session = open_somewhere if on_server else open_own
    serve(["-f", str(connection_file)], lambda: open_session(settings))
