"""`belljar run`: a file or a line of Python, in a fresh session of its own."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    file: Annotated[str | None, typer.Argument(help="Python file to run; - reads the code from stdin.")] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="Run this code instead of a file.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New or empty folder for figures and files of the code; without it, a new one in download_directory."
        ),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Interrupt the code after this many seconds.")] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(help="namespace, container, gvisor, microvm, process, or one of an installed package."),
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Environment to run in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Run Python in a fresh session and save the figures it shows and the files it writes, apart from yours.

    The exit status is the code's: sys.exit(n) gives n, an exception 1, a timeout 124, Ctrl-C 130, a crash 137.
    """
    from belljar.cli.importing import at_once

    with at_once():
        from belljar.cli.running import Job, read_code, run, spared
        from belljar.settings import load_settings

    flags = {"sandbox": sandbox, "environment": environment, "execution_timeout_s": timeout}
    job = Job(read_code(file, code), out=out, as_json=as_json, is_stdin_free=file != "-")
    raise typer.Exit(run(spared(load_settings(flags)), job))
