"""`belljar env`: the environments that sessions can have, what they hold, and making those that are ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

ABOUT = "The environments of sessions: list, create, check, remove, lock."


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, packages included.")] = False,
    has_found: Annotated[
        bool, typer.Option("--found", help="Also the environments of conda that the settings do not name.")
    ] = False,
) -> None:
    """List the environments that sessions can ask for: kind, Python, packages, size and state."""
    from belljar.cli.environments import show
    from belljar.settings import load_settings

    show(load_settings(), as_json=as_json, has_found=has_found)


def create_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; all without it.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Make a new one of this environment.yml, requirements.txt or pyproject.toml; with one NAME."),
    ] = None,
) -> None:
    """Make managed environments now rather than for the first session, and what others lack to run sessions.

    Nothing is installed into an environment that is not belljar's own. With --file, the table that lets sessions have
    the new one is printed, for belljar.toml.
    """
    from belljar.cli.environments import create, create_from
    from belljar.settings import load_settings

    settings = load_settings()
    raise typer.Exit(create_from(settings, names or [], file) if file else create(settings, names or []))


def check_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; all without it.")] = None,
) -> None:
    """See whether environments are there and can run sessions; exits with 1 if one cannot. Makes nothing."""
    from belljar.cli.environments import check
    from belljar.settings import load_settings

    raise typer.Exit(check(load_settings(), names or []))


def remove_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Managed environments.")] = None,
    is_unused: Annotated[
        bool, typer.Option("--unused", help="Those that no setting names any more, of earlier versions too.")
    ] = False,
) -> None:
    """Remove managed environments from the disk; the next session that asks for one makes it again."""
    from belljar.cli.environments import remove
    from belljar.settings import load_settings

    remove(load_settings(), names or [], is_unused=is_unused)


def lock_command(
    session: Annotated[str, typer.Argument(help="The session's id, or enough of its beginning.")],
    data_directory: Annotated[Path | None, typer.Option(help="Where the server keeps its sessions.")] = None,
) -> None:
    """Print the packages of a session at their versions, its own included, to make the same environment again.

    What it prints is a requirements file: for `pip install -r`, `uv pip sync`, or the file of a managed environment.
    """
    from belljar.cli.environments import lock
    from belljar.settings import load_settings

    raise typer.Exit(lock(load_settings({"data_directory": data_directory}), session))


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_command,
    "create": create_command,
    "check": check_command,
    "remove": remove_command,
    "lock": lock_command,
}
