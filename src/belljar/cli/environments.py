"""Environments from the command line: looked at, made, removed and pinned. Data to stdout, the rest to stderr."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from belljar.cli.columns import columns
from belljar.cli.pipes import put_out
from belljar.cli.progress import Activity, Progress
from belljar.cli.streams import indented
from belljar.control import ask_servers
from belljar.environments import known_names, list_conda, open_environment
from belljar.environments.base import describe, inspect_interpreter
from belljar.environments.catalogue import (
    Listed,
    examine,
    managed_folder,
    managed_names,
    unused_folders,
)
from belljar.environments.conda_making import WORK
from belljar.environments.conda_pins import conda_lock, is_conda
from belljar.environments.description import size_on_disk
from belljar.environments.locks import open_lock
from belljar.environments.pins import lock_of
from belljar.environments.selection import KERNEL_PREFIX, check_name
from belljar.errors import BelljarError, InvalidArgument
from belljar.files.removal import remove_tree
from belljar.sessions.archive import open_archive
from belljar.settings import EnvironmentEntry, Settings, config_files
from belljar.settings.environments import checked_names
from belljar.supervisor import has_supervisor

_TITLES = ("environment", "kind", "python", "packages", "size", "state", "interpreter")
_MEGABYTE = 1_000_000


def show(settings: Settings, *, as_json: bool, has_found: bool) -> None:
    """Print what there is."""
    if has_found:
        settings = _with_found(settings)
    listed = _examined(settings, _names(settings))
    if as_json:
        print(json.dumps([asdict(each) for each in listed], indent=2))
    else:
        print(columns([_TITLES, *map(_row, listed)]))
        _tell_problems(listed)


def create(settings: Settings, names: Sequence[str]) -> int:
    """Make what is not there yet, one after the other; the exit status."""
    chosen = _chosen(settings, names)
    failed = 0
    for name in chosen:
        activity = Activity(f"preparing {name}")
        try:
            environment = asyncio.run(open_environment(settings, name, on_progress=activity.tell))
        except BelljarError as error:
            activity.close()
            failed += 1
            print(f"error: {name}: {indented(error.message)}", file=sys.stderr)
            if error.hint:
                print(f"hint: {indented(error.hint)}", file=sys.stderr)
        else:
            activity.close()
            support = f", with IPython from {environment.support}" if environment.support else ""
            print(f"{name} is ready: Python {environment.version}, {environment.python}{support}", file=sys.stderr)
    return 1 if failed else 0


def create_from(settings: Settings, names: Sequence[str], file: Path) -> int:
    """Make an environment of a file, and print the table that names it in the settings; the exit status."""
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
    status = create(settings.model_copy(update={"environments": named}), [name])
    if not status and not known:
        put_out(f"\n[environments.{json.dumps(name)}]\nkind = {json.dumps(kind)}\nfile = {json.dumps(entry.file)}\n")
        print(f"hint: Put these lines into {config_files()[-1]}, so that sessions can have it", file=sys.stderr)
    return status


def check(settings: Settings, names: Sequence[str]) -> int:
    """Look at each and say what is wrong; the exit status."""
    listed = _examined(settings, _chosen(settings, names))
    for each in listed:
        told = {"ready": f"ok    {each.name}: {each.kind}, Python {each.version}, {each.python}"}
        told |= {"not made": f"ok    {each.name}: {each.kind}, not made yet", "broken": f"fail  {each.name}"}
        print(told[each.state])
    _tell_problems(listed)
    return 1 if any(each.state == "broken" for each in listed) else 0


def remove(settings: Settings, names: Sequence[str], *, is_unused: bool) -> None:
    """Remove folders of managed environments, unless a server runs that may use them."""
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
        activity = Activity(f"removing {folder.name}")
        size = size_on_disk([folder])
        asyncio.run(_remove(folder))
        activity.close()
        print(f"removed {folder}: {size / _MEGABYTE:,.0f} MB", file=sys.stderr)


def lock(settings: Settings, session: str) -> int:
    """Print the lock of a session's environment; the exit status."""
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
        return put_out(conda_lock(interpreter, entry.environment, settings.conda_channels, layer))
    return put_out(lock_of(describe(entry.environment, interpreter), layer))


def _names(settings: Settings) -> list[str]:
    return [name for name in known_names(settings) if not name.startswith(KERNEL_PREFIX)]


def _chosen(settings: Settings, names: Sequence[str]) -> list[str]:
    for name in names:
        check_name(settings, name)
    return [*names] or _names(settings)


def _with_found(settings: Settings) -> Settings:
    """The settings as if they named every environment of conda that is on this host, too."""
    named = {entry.path for entry in settings.environments.values()}
    found = {
        f"conda:{place.name}": EnvironmentEntry(kind="conda", path=str(place.prefix))
        for place in list_conda()
        if place.name not in named and str(place.prefix) not in named
    }
    return settings.model_copy(update={"environments": {**settings.environments, **found}})


def _examined(settings: Settings, names: Sequence[str]) -> list[Listed]:
    """Some take seconds to measure."""
    progress = Progress(len(names))
    listed: list[Listed] = []
    try:
        for name in names:
            progress.step(f"looking at {name}")
            listed.append(examine(settings, name))
    finally:
        progress.close()
    return listed


def _row(each: Listed) -> tuple[str, ...]:
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


def _tell_problems(listed: Sequence[Listed]) -> None:
    for each in listed:
        if each.problem:
            print(f"{each.name}: {indented(each.problem)}", file=sys.stderr)
        if each.hint:
            print(f"hint: {each.hint}", file=sys.stderr)


def _check_free(settings: Settings) -> None:
    """Its sessions, and the process they are forked from, read from the folders as long as a server runs."""
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


async def _remove(folder: Path) -> None:
    # Whoever makes it at this moment holds the same lock.
    async with open_lock(folder.with_name(f".{folder.name.removeprefix(WORK)}.lock")):
        await asyncio.to_thread(remove_tree, folder)
