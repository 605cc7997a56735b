"""`belljar env`: list, make, check, remove and lock the environments of sessions."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from belljar.cli.progress import Spinner, progress_bar
from belljar.cli.streams import indented, table, write_output
from belljar.control import ask_servers
from belljar.environments import Environment, known_names, list_conda, open_environment
from belljar.environments.base import describe, inspect_interpreter
from belljar.environments.catalogue import ListedEnvironment, examine, managed_folder, managed_names, unused_folders
from belljar.environments.conda.installs import WORK
from belljar.environments.conda.places import is_conda
from belljar.environments.installed_check import size_on_disk
from belljar.environments.lockfile import conda_lock, lock_of
from belljar.environments.managed import compile_packages
from belljar.environments.selection import check_name
from belljar.errors import BelljarError, InvalidArgument
from belljar.file_lock import open_lock
from belljar.files.fd_walk import remove_tree
from belljar.journal.archive import open_archive
from belljar.settings import EnvironmentEntry, Settings, config_files, load_command_settings
from belljar.settings.environments import KERNEL_PREFIX, checked_names
from belljar.supervisor import has_supervisor

_TITLES = ("environment", "kind", "python", "packages", "size", "state", "interpreter")
_MEGABYTE = 1_000_000


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, packages included.")] = False,
    has_found: Annotated[
        bool, typer.Option("--found", help="Also the environments of conda that the settings do not name.")
    ] = False,
) -> None:
    """List the environments that sessions can ask for: kind, Python, packages, size and state."""
    settings = load_command_settings()
    if has_found:
        settings = _with_found(settings)
    listed = _examine(settings, _names(settings))
    if as_json:
        print(json.dumps([asdict(each) for each in listed], indent=2))
    else:
        print(table([_TITLES, *map(_row, listed)], spare=("interpreter", "size")))
        _print_problems(listed)


def create_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Which ones; all without it.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Make a new one of this environment.yml, requirements.txt or pyproject.toml; with one NAME."),
    ] = None,
) -> None:
    """Make managed environments now rather than for the first session, and what others lack to run sessions.

    Nothing is installed into an environment that is not belljar's own. With --file, the table that lets sessions have
    the new one is printed, for belljar.toml.
    """
    settings = load_command_settings()
    raise typer.Exit(create_from(settings, names or [], file) if file else _create(settings, names or []))


def check_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Which ones; all without it.")] = None,
) -> None:
    """See whether environments are there and can run sessions; exits with 1 if one cannot. Makes nothing."""
    settings = load_command_settings()
    listed = _examine(settings, _chosen(settings, names or []))
    for each in listed:
        lines = {
            "ready": f"ok    {each.name}: {each.kind}, Python {each.version}, {each.python}",
            "not made": f"ok    {each.name}: {each.kind}, not made yet",
            "broken": f"fail  {each.name}",
        }
        print(lines[each.state])
    _print_problems(listed)
    raise typer.Exit(1 if any(each.state == "broken" for each in listed) else 0)


def remove_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Managed environments.")] = None,
    is_unused: Annotated[
        bool, typer.Option("--unused", help="Those that no setting names any more, of earlier versions too.")
    ] = False,
) -> None:
    """Remove managed environments from the disk; the next session that asks for one makes it again."""
    _remove(load_command_settings(), names or [], is_unused=is_unused)


def lock_command(
    session: Annotated[str, typer.Argument(help="The session's id, or enough of its beginning.")],
    data_directory: Annotated[Path | None, typer.Option(help="Where the server keeps its sessions.")] = None,
) -> None:
    """Print the packages of a session at their versions, its own included, to make the same environment again.

    What it prints is a requirements file: for `pip install -r`, `uv pip sync`, or the file of a managed environment.
    """
    raise typer.Exit(lock(load_command_settings({"data_directory": data_directory}), session))


def _create(settings: Settings, names: Sequence[str]) -> int:
    """Make the environments that are missing, one after the other; return the exit status."""
    chosen = _chosen(settings, names)
    failed = 0
    for name in chosen:
        spinner = Spinner(f"preparing {name}")
        try:
            environment = asyncio.run(_make(settings, name, spinner.update))
        except BelljarError as error:
            spinner.close()
            failed += 1
            print(f"error: {name}: {indented(error.message)}", file=sys.stderr)
            if error.hint:
                print(f"hint: {indented(error.hint)}", file=sys.stderr)
        else:
            spinner.close()
            support = f", with IPython from {environment.support}" if environment.support else ""
            print(f"{name} is ready: Python {environment.version}, {environment.python}{support}", file=sys.stderr)
    return 1 if failed else 0


async def _make(settings: Settings, name: str, on_progress: Callable[[str], None]) -> Environment:
    """Make an environment and compile its packages."""
    environment = await open_environment(settings, name, on_progress=on_progress)
    if environment.kind == "managed":
        await compile_packages(environment.prefix, on_progress=on_progress)
    return environment


def create_from(settings: Settings, names: Sequence[str], file: Path) -> int:
    """Make an environment from a file and print its table for the settings; return the exit status."""
    if len(names) != 1:
        raise InvalidArgument(f"{len(names)} names for {file}", hint="Give one: belljar env create NAME --file FILE")
    name = names[0]
    kind = "conda" if file.suffix in (".yml", ".yaml") else "managed"
    entry = EnvironmentEntry(kind=kind, file=str(file.expanduser().absolute()))
    known = name in settings.environments
    if known and settings.environments[name] != entry:
        raise InvalidArgument(f"environment {name} is in the settings already", hint="Give it another name")
    try:
        named = checked_names({**settings.environments, name: entry})
    except ValueError as error:
        raise InvalidArgument(str(error), hint="Give it another name") from error
    status = _create(settings.model_copy(update={"environments": named}), [name])
    if not status and not known:
        write_output(
            sys.stdout,
            f"\n[environments.{json.dumps(name)}]\nkind = {json.dumps(kind)}\nfile = {json.dumps(entry.file)}\n",
        )
        print(f"hint: Put these lines into {config_files()[-1]}, so that sessions can have it", file=sys.stderr)
    return status


def _remove(settings: Settings, names: Sequence[str], *, is_unused: bool) -> None:
    """Remove the folders of managed environments; refuse while a server that may use them runs."""
    if not names and not is_unused:
        raise InvalidArgument(
            "no environment is named", hint=f"Managed ones are {', '.join(managed_names(settings))}; or add --unused"
        )
    folders = {managed_folder(settings, name): name for name in names}
    _check_free(settings)
    folders |= dict.fromkeys(unused_folders(settings) if is_unused else [], "")
    for folder, name in folders.items():
        if not folder.is_dir():
            print(f"{name} is not there: {folder}", file=sys.stderr)
            continue
        spinner = Spinner(f"removing {folder.name}")
        size = size_on_disk([folder])
        asyncio.run(_remove_folder(folder))
        spinner.close()
        print(f"removed {folder}: {size / _MEGABYTE:,.0f} MB", file=sys.stderr)


def lock(settings: Settings, session: str) -> int:
    """Print the lock of a session's environment; return the exit status."""
    with open_archive(settings.data_directory) as archive:
        entry = archive.find(session)
    if entry.environment.startswith(KERNEL_PREFIX):
        raise InvalidArgument(
            f"session {entry.id} runs the Jupyter kernel {entry.environment.removeprefix(KERNEL_PREFIX)}",
            hint="Only sessions of environments can be locked",
        )
    check_name(settings, entry.environment)
    found = examine(settings, entry.environment)
    if found.state != "ready":
        raise InvalidArgument(
            f"environment {entry.environment} of session {entry.id} is {found.state}", hint=found.problem or found.hint
        )
    interpreter = inspect_interpreter(Path(found.python))
    layer = settings.data_directory / "sessions" / entry.id / "layer"
    if is_conda(interpreter.prefix):
        text = conda_lock(interpreter, entry.environment, settings.conda_channels, layer)
    else:
        text = lock_of(describe(entry.environment, interpreter), layer)
    write_output(sys.stdout, text)
    return 0


def _names(settings: Settings) -> list[str]:
    return [name for name in known_names(settings) if not name.startswith(KERNEL_PREFIX)]


def _chosen(settings: Settings, names: Sequence[str]) -> list[str]:
    for name in names:
        check_name(settings, name)
    return [*names] or _names(settings)


def _with_found(settings: Settings) -> Settings:
    """Return the settings with an entry for every conda environment of this host that they do not name."""
    named = {entry.path for entry in settings.environments.values()}
    found = {
        f"conda:{place.name}": EnvironmentEntry(kind="conda", path=str(place.prefix))
        for place in list_conda()
        if place.name not in named and str(place.prefix) not in named
    }
    return settings.model_copy(update={"environments": {**settings.environments, **found}})


def _examine(settings: Settings, names: Sequence[str]) -> list[ListedEnvironment]:
    """Examine the environments with a progress bar, because measuring a large one takes seconds."""
    listed: list[ListedEnvironment] = []
    with progress_bar(len(names)) as begin:
        for name in names:
            begin(f"looking at {name}")
            listed.append(examine(settings, name))
    return listed


def _row(each: ListedEnvironment) -> tuple[str, ...]:
    is_there = each.state == "ready"
    return (
        f"{each.name}{' *' if each.is_default else ''}",
        each.kind,
        each.version or "-",
        str(len(each.packages)) if is_there else "-",
        f"{each.size_bytes / _MEGABYTE:,.0f} MB" if is_there else "-",
        each.state,
        each.python or "-",
    )


def _print_problems(listed: Sequence[ListedEnvironment]) -> None:
    for each in listed:
        if each.problem:
            print(f"{each.name}: {indented(each.problem)}", file=sys.stderr)
        if each.hint:
            print(f"hint: {each.hint}", file=sys.stderr)


def _check_free(settings: Settings) -> None:
    """Refuse while a server runs, because its sessions and the process that they are forked from read the folders."""
    servers = asyncio.run(ask_servers(settings.data_directory))
    if servers:
        raise InvalidArgument(
            f"a server that may use it is running: pid {servers[0].pid}", hint="Stop it first, then remove"
        )
    if has_supervisor(settings.data_directory):
        raise InvalidArgument(
            "sessions that may use it are kept alive for the next server",
            hint="Start a server and clear them, or wait until keep_alive_s is over",
        )


async def _remove_folder(folder: Path) -> None:
    # A process that makes the environment at this moment holds the same lock.
    async with open_lock(folder.with_name(f".{folder.name.removeprefix(WORK)}.lock")):
        await asyncio.to_thread(remove_tree, folder)
