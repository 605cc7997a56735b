"""`belljar jupyter`: add belljar to the kernels of Jupyter's front ends, or remove it."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from belljar.errors import InvalidArgument
from belljar.jupyter import require_ipykernel, specs
from belljar.settings import load_command_settings


def command(
    action: Annotated[Literal["install", "remove"], typer.Argument(help="What to do with the kernelspec.")],
    name: Annotated[str, typer.Option(help="What Jupyter calls the kernel.")] = "belljar",
    user: Annotated[bool, typer.Option("--user", help="For this user; so without any of the three.")] = False,
    sys_prefix: Annotated[
        bool, typer.Option("--sys-prefix", help="Into the environment that belljar is installed in.")
    ] = False,
    prefix: Annotated[Path | None, typer.Option(help="Into PREFIX/share/jupyter/kernels.")] = None,
    display_name: Annotated[str, typer.Option(help="What people see.")] = "Python (belljar)",
    environment: Annotated[str | None, typer.Option(help="Environment that its sessions run in.")] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(help="namespace, container, gvisor, microvm, process, or one of an installed package."),
    ] = None,
    on_server: Annotated[
        bool, typer.Option("--on-server", help="Open sessions on a running server, where there is one.")
    ] = False,
) -> None:
    """Add belljar to the kernels of JupyterLab, VS Code, papermill and nbclient, or remove it.

    Every notebook then runs in a sealed session of its own, which ends with its kernel.
    """
    if user + sys_prefix + (prefix is not None) > 1:
        raise InvalidArgument("--user, --sys-prefix and --prefix exclude each other", hint="Give one of them")
    place = str(prefix.expanduser().absolute()) if prefix else sys.prefix if sys_prefix else None
    if action == "remove":
        print(f"removed {specs.remove(name, user=user, prefix=place)}", file=sys.stderr)
        return
    require_ipykernel()
    chosen = {key: value for key, value in (("environment", environment), ("sandbox", sandbox)) if value is not None}
    # Loading the settings refuses a wrong value now rather than when a notebook opens, and makes paths absolute.
    settings = load_command_settings(chosen)
    values = {key: str(getattr(settings, key)) for key in chosen}
    content = specs.kernel_file(display_name, settings=values, on_server=on_server)
    print(f"installed {specs.install(name, content, user=place is None, prefix=place)}", file=sys.stderr)
