"""`belljar export`: everything a session ran, as a notebook, a page, a script or a text."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    session: Annotated[str, typer.Argument(help="The session's id, or enough of its beginning.")],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="File to write, .ipynb, .html, .py or .md; - for stdout."),
    ],
    form: Annotated[
        Literal["ipynb", "html", "py", "md"] | None,
        typer.Option("--format", help="Its format, where the name does not say."),
    ] = None,
    has_outputs: Annotated[
        bool | None,
        typer.Option("--outputs/--no-outputs", help="With what cells said, or the code alone; .py has it as comments."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Characters of text kept of one execution, from both ends; 0 for all.")
    ] = 1_000_000,
    runs_scripts: Annotated[
        bool, typer.Option("--scripts", help="Let scripts of what cells showed run in the page, sealed off.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    data_directory: Annotated[Path | None, typer.Option(help="Where the server keeps its sessions.")] = None,
) -> None:
    """Save everything a session ran, with its output.

    Works for sessions of running servers, for sleeping ones, and for those of a server that died. Outputs are on in
    every format but .py.
    """
    from belljar.cli.exporting import Export, export
    from belljar.settings import load_settings

    chosen = Export(
        session=session,
        output=output,
        form=form,
        has_outputs=has_outputs,
        limit_chars=limit,
        runs_scripts=runs_scripts,
        force=force,
    )
    raise typer.Exit(export(load_settings({"data_directory": data_directory}).data_directory, chosen))
