"""The servers of one data directory: each has a folder below `runs/`, locked while it runs, that says where it is.

Its name is in the journal with each session, so that whoever finds a session open elsewhere can say where.
"""

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import SettingsError
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder

WORKERS = "workers"
"""The folder, in the data directory of a machine's first server, of those of the others."""
HTTP_SOCKET = "http.sock"
"""The socket in the folder of a server on which it answers the HTTP API."""
FLEET_SOCKET = "fleet.sock"
"""The socket beside it for the other servers of its machine, which pass requests on (`fleet/inner_app.py`)."""
_LOCK = "lock"
_ID = "id"
_ADDRESS = "address"
_ALIVE_S = 5.0
"""How exactly the next server knows until when one ran that was killed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """This server's folder among those of the servers that share a data directory."""

    folder: Path
    living: frozenset[str]
    """The names of the servers that run, this one included."""
    ended_at: Mapping[str, float]
    """When each server that is gone was last known to run."""


def machine_of(data_directory: Path) -> Path | None:
    """Return the data directory of the first of several servers of one machine; None where a server is alone."""
    above, machine = data_directory.parent, data_directory.parent.parent
    if above.name == WORKERS and data_directory.name.isdecimal() and (machine / "runs").is_dir():
        return machine
    return data_directory if (data_directory / WORKERS).is_dir() else None


def http_sockets(data_directory: Path, run: str = "*", name: str = HTTP_SOCKET) -> list[Path]:
    """Return the sockets of the servers of a machine: of a data directory, and of those of its workers."""
    paths = [f"runs/{run}/{name}", f"{WORKERS}/*/runs/{run}/{name}"]
    return sorted(found for path in paths for found in data_directory.glob(path))


def shared_folder(data_directory: Path) -> Path:
    """Return the data directory of what all servers of a machine share: environments, skills, people's workspaces."""
    return machine_of(data_directory) or data_directory


def directory_id(data_directory: Path) -> str:
    """Return what tells a data directory from those of other machines, drawn when somebody first asks."""
    path = data_directory / _ID
    try:
        with suppress(FileExistsError):
            # Linked when it is whole, because two may ask at once.
            made = path.with_name(f"{_ID}.{secrets.token_hex(8)}")
            made.write_text(secrets.token_hex(16))
            try:
                os.link(made, path)
            finally:
                made.unlink()
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} cannot be used: {error}", hint="Make room on its disk, or remove the file if it is damaged"
        ) from error


@contextmanager
def run_folder(data_directory: Path) -> Generator[Run]:
    """Create a folder for this server, locked while it runs; remove the folders of servers that are gone."""
    runs = data_directory / "runs"
    folder = runs / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        make_folder(runs)
        with _changing(runs):
            make_folder(folder)
            descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise SettingsError(
            f"data_directory {data_directory} cannot be used: {error.strerror}",
            hint="Make room there, or set data_directory to a folder that can be written",
        ) from error
    try:
        living, ended_at = other_servers(runs, own=folder.name)
        yield Run(folder, frozenset({folder.name, *living}), ended_at)
    finally:
        os.close(descriptor)
        remove_tree(folder)


@contextmanager
def _changing(runs: Path) -> Generator[None]:
    """Hold the folder of all servers while one of them adds its own, or removes those of servers that are gone.

    Otherwise a server that starts would find a folder that another one has made and not locked yet, and remove it.
    """
    descriptor = os.open(runs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_living(runs: Path, name: str) -> bool:
    """Return whether the server with this name runs: whether somebody holds the lock in its folder below `runs`."""
    if not name or "/" in name:
        return False
    try:
        descriptor = os.open(runs / name / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        # Shared, so that two that look at once do not take each other for that server.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def tell_address(runs: Path, name: str, address: str) -> None:
    """Let the other servers know how this one is reached: its URL, or that it speaks stdio."""
    with suppress(OSError):  # a full disk: then they name its process alone
        (runs / name / _ADDRESS).write_text(address)


def describe_server(runs: Path, name: str) -> str:
    """Return what an operator knows a server by: its process, and how it is reached."""
    address = _address(runs, name)
    return f"pid {name.partition('-')[0]}{', ' if address else ''}{address}"


def _names(runs: Path) -> set[str]:
    return {folder.name for folder in runs.iterdir()}


def _address(runs: Path, name: str) -> str:
    try:
        return (runs / name / _ADDRESS).read_text()
    except (OSError, ValueError):
        return ""


@asynccontextmanager
async def watching_servers(runs: Path, own: str, interval_s: float, *, is_told: bool) -> AsyncGenerator[None]:
    """Let the next server see until when this one ran; where it `is_told`, log every other one, now and later."""
    work = asyncio.get_running_loop().create_task(_watch_servers(runs, own, interval_s, is_told=is_told))
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _watch_servers(runs: Path, own: str, interval_s: float, *, is_told: bool) -> None:
    known = {own}
    while True:
        with suppress(OSError):
            os.utime(runs / own / _LOCK)
            for name in sorted(_names(runs) - known) if is_told else ():
                # What has no address is a command, such as `belljar run`, or does not serve yet.
                if _address(runs, name) and is_living(runs, name):
                    log.warning(
                        "another server uses %s as well: %s. A session is open in one of them at a time",
                        runs.parent,
                        describe_server(runs, name),
                    )
                    known.add(name)
        await asyncio.sleep(min(interval_s, _ALIVE_S))


def other_servers(runs: Path, *, own: str) -> tuple[list[str], dict[str, float]]:
    """Return the names of the other servers that run, and when those that are gone were last known to.

    The folders of the latter are removed.
    """
    living: list[str] = []
    ended_at: dict[str, float] = {}
    with _changing(runs):
        for folder in runs.iterdir():
            if folder.name == own:
                continue
            try:
                descriptor = os.open(folder / _LOCK, os.O_RDWR)
            except FileNotFoundError:
                remove_tree(folder)  # its server was killed before it had a lock, or while it removed its folder
                continue
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                living.append(folder.name)
            else:
                ended_at[folder.name] = os.fstat(descriptor).st_mtime
                remove_tree(folder)
            finally:
                os.close(descriptor)
    return living, ended_at
