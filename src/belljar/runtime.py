"""All wiring, once: settings in, a running engine out. Surfaces, the CLI and the Python API start here."""

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from belljar.control import serve_control
from belljar.errors import BelljarError
from belljar.files.removal import remove_tree
from belljar.kernels.starting import KERNEL_PREFIX, KernelStarter
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import Provider
from belljar.sessions.journal import open_journal
from belljar.sessions.recovery import recover
from belljar.sessions.registry import Registry, open_registry
from belljar.sessions.roll import Roll
from belljar.settings import Settings

RETRY_S = 30.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Preparation:
    """How far the configured environment is."""

    environment: Literal["pending", "ready", "broken"] = "pending"
    zygote: Literal["pending", "warm", "none"] = "pending"
    """The process that sessions are forked from; none where there will not be any."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The engine."""

    settings: Settings
    provider: Provider
    sessions: Registry
    starter: KernelStarter
    preparation: Preparation


@asynccontextmanager
async def open_runtime(settings: Settings) -> AsyncGenerator[Runtime]:
    """Open the engine; everything it made is gone or released when it closes."""
    provider = open_provider(settings)
    if provider.warning:
        log.warning("%s", provider.warning)
    sessions = settings.data_directory / "sessions"
    with (
        run_folder(settings.data_directory) as run,
        open_journal(settings.data_directory / "journal.sqlite") as journal,
    ):
        sessions.mkdir(exist_ok=True)
        sessions.chmod(0o711)  # whatever the umask is: the users of sessions pass through it to their folders
        roll = Roll(journal, run.folder.name)
        recover(journal, roll, sessions, run.living, budget_chars=settings.output_budget_chars)
        starter = KernelStarter(settings, provider, sessions, run.folder.name)
        async with (
            aclosing(starter),
            open_registry(settings, sessions, journal, roll, starter) as registry,
            serve_control(run.folder / "control.sock", registry),
        ):
            # The default environment is made while the client is still shaking hands.
            preparation = Preparation()
            warming = asyncio.get_running_loop().create_task(_prepare(starter, settings.environment, preparation))
            try:
                yield Runtime(settings, provider, registry, starter, preparation)
            finally:
                warming.cancel()


async def _prepare(starter: KernelStarter, name: str, preparation: Preparation) -> None:
    """Until it is done: a server that is not ready gets no calls, which would else be what tries again."""
    told = ""
    while preparation.environment != "ready":
        try:
            if not name.startswith(KERNEL_PREFIX):
                await starter.environment(name)
            preparation.environment = "ready"
        except BelljarError as error:
            preparation.environment = "broken"
            # Told again, as its error, to every session that needs the environment.
            if str(error) != told:
                log.warning("environment %s: %s", name, error)
            told = str(error)
            await asyncio.sleep(RETRY_S)
    preparation.zygote = "warm" if await starter.is_warm(name) else "none"


@dataclass(frozen=True, slots=True)
class Run:
    """This server among those that share a data directory."""

    folder: Path
    living: frozenset[str]
    """The names of the servers that run, this one's included."""


@contextmanager
def run_folder(data_directory: Path) -> Generator[Run]:
    """A folder for this server alone, locked while it lives; folders of servers that are gone are removed."""
    runs = data_directory / "runs"
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = runs / f"{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Run(folder, frozenset({folder.name, *_living(runs, own=folder.name)}))
    finally:
        os.close(descriptor)
        remove_tree(folder)


def _living(runs: Path, *, own: str) -> list[str]:
    """The other servers' folders; those that nobody holds any more are removed."""
    living: list[str] = []
    for folder in runs.iterdir():
        if folder.name == own:
            continue
        try:
            descriptor = os.open(folder / "lock", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            living.append(folder.name)
        else:
            remove_tree(folder)
        finally:
            os.close(descriptor)
    return living
