"""`belljar replay`: a notebook run again in a fresh session, and what came out differently."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    file: Annotated[Path, typer.Argument(help="Notebook to run, .ipynb of version 4.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the notebook with its new output here.")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Run the cells after one that failed, too.")] = False,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Text that does not count as a difference; repeatable.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Interrupt each cell after this many seconds.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="namespace or process.")] = None,
    environment: Annotated[str | None, typer.Option(help="Environment to run in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,
) -> None:
    """Run a notebook in a fresh session and compare what it says with what is stored in it.

    Exits with 0 when nothing differs, with 1 when something does, with 2 for a file that is no notebook.
    """
    from belljar.cli.replaying import Replay, replay
    from belljar.cli.running import spared
    from belljar.settings import load_settings

    flags = {"sandbox": sandbox, "environment": environment, "execution_timeout_s": timeout}
    chosen = Replay(file, output, ignore=ignore or [], keep_going=keep_going, as_json=as_json, force=force)
    raise typer.Exit(replay(spared(load_settings(flags)), chosen))
