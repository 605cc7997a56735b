"""`belljar kernel`: the process that Jupyter starts for a notebook; not for people."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    connection_file: Annotated[Path, typer.Option("-f", help="Connection file that the front end wrote.")],
    on_server: Annotated[bool, typer.Option("--on-server", help="Open the session on a running server.")] = False,
) -> None:
    """Be a Jupyter kernel with a session of its own."""
    from belljar.jupyter import require_ipykernel

    require_ipykernel()
    import os

    from belljar import logs
    from belljar.jupyter.application import serve
    from belljar.jupyter.sessions import open_own, open_somewhere
    from belljar.settings import load_settings

    connection_file = connection_file.absolute()
    # It is started in the notebook's folder, whose belljar.toml is whoever's the notebook is.
    os.chdir("/")
    settings = load_settings({})
    logs.configure("WARNING", settings.log_format)
    open_session = open_somewhere if on_server else open_own
    serve(["-f", str(connection_file)], lambda: open_session(settings))
