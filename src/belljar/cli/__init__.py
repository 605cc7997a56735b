"""The `belljar` command: its table of commands, and how errors become exit codes.

One file a command; each has a `command` function that imports what it needs when it is called, so that starting
`belljar serve` does not pay for the others. Data goes to stdout, everything else to stderr.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from belljar.cli import (
    attach,
    config,
    doctor,
    env,
    export,
    install,
    jupyter,
    kernel,
    key,
    policy,
    reference,
    replay,
    run,
    serve,
    sessions,
    toolbox,
    top,
    trust,
)
from belljar.cli.streams import guard_streams, indented, reset_colours
from belljar.errors import BelljarError, UsageError

# A new command is a file here and a line in this table.
COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve.command,
    "run": run.command,
    "sessions": sessions.command,
    "top": top.command,
    "export": export.command,
    "replay": replay.command,
    "attach": attach.command,
    "jupyter": jupyter.command,
    "kernel": kernel.command,
    "config": config.command,
    "trust": trust.command,
    "doctor": doctor.command,
    "install": install.command,
    "key": key.command,
    "reference": reference.command,
}
# Commands with commands of their own: what the group is for, and its table.
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "env": (env.ABOUT, env.COMMANDS),
    "toolbox": (toolbox.ABOUT, toolbox.COMMANDS),
    "policy": (policy.ABOUT, policy.COMMANDS),
}
HIDDEN = {"kernel", "reference"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 2 when the caller can mend it, with 1 when not."""
    guard_streams()
    try:
        application()(arguments, prog_name="belljar")
    except BelljarError as error:
        print(f"error: {indented(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {indented(error.hint)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        reset_colours()


def application() -> typer.Typer:
    """The command as typer sees it."""
    application = _table_of_commands(COMMANDS)
    application.callback()(_belljar)
    for name, (about, commands) in GROUPS.items():
        application.add_typer(_table_of_commands(commands), name=name, help=about)
    return application


def _table_of_commands(commands: dict[str, Callable[..., None]]) -> typer.Typer:
    # No markup mode: with one, typer imports rich to draw boxes around its help and its errors.
    table = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    for name, command in commands.items():
        table.command(name, hidden=name in HIDDEN)(command)
    return table


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"belljar {version('belljar')}")
        raise typer.Exit


def _belljar(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run the Python that AI agents write: stateful, sealed off, in plain view."""
