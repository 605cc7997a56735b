"""All wiring, once: settings in, a running engine out. Surfaces, the CLI and the Python API start here."""

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from belljar.control import serve_control
from belljar.errors import BelljarError
from belljar.files.removal import remove_tree
from belljar.kernels.starting import KernelStarter
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import Provider
from belljar.sessions.journal import open_journal
from belljar.sessions.registry import Registry, open_registry
from belljar.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The engine."""

    settings: Settings
    provider: Provider
    sessions: Registry
    starter: KernelStarter


@asynccontextmanager
async def open_runtime(settings: Settings) -> AsyncGenerator[Runtime]:
    """Open the engine; everything it made is gone or released when it closes."""
    provider = open_provider(settings)
    if provider.warning:
        log.warning("%s", provider.warning)
    starter = KernelStarter(settings, provider)
    with run_folder(settings.data_directory) as folder, open_journal(folder / "journal.sqlite") as journal:
        async with (
            open_registry(settings, folder / "sessions", journal, starter) as registry,
            serve_control(folder / "control.sock", registry),
        ):
            # The default environment is made while the client is still shaking hands.
            warming = asyncio.get_running_loop().create_task(_prepare(starter, settings.environment))
            try:
                yield Runtime(settings, provider, registry, starter)
            finally:
                warming.cancel()
                await starter.aclose()


async def _prepare(starter: KernelStarter, name: str) -> None:
    if name.startswith("kernel:"):
        return
    try:
        await starter.environment(name)
    except BelljarError as error:
        # Told again, as its error, to every session that needs the environment.
        log.warning("environment %s: %s", name, error)


@contextmanager
def run_folder(data_directory: Path) -> Generator[Path]:
    """A folder for this server alone, locked while it lives; folders of servers that are gone are removed."""
    runs = data_directory / "runs"
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_abandoned(runs)
    folder = runs / f"{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    (folder / "sessions").mkdir()
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)
        remove_tree(folder)


def _remove_abandoned(runs: Path) -> None:
    for folder in runs.iterdir():
        try:
            descriptor = os.open(folder / "lock", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            remove_tree(folder)
        finally:
            os.close(descriptor)
