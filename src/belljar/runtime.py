"""All wiring, once: settings in, a running engine out. Surfaces, the CLI and the Python API start here."""

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from belljar.attachments import serve_operators
from belljar.environments import check_configured
from belljar.environments.selection import KERNEL_PREFIX
from belljar.errors import BelljarError, SettingsError
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, open_data_directory, way_mode
from belljar.journal.journal import open_journal, usable
from belljar.journal.retention import open_trimming
from belljar.journal.session_records import SessionRecords
from belljar.policy.guardrails import Guardrails, read_guardrails
from belljar.privacy.redactors import SECTION, Redactors
from belljar.privacy.rules import PrivacyRules
from belljar.provisioning.handover import Handover, NoHandover
from belljar.provisioning.kept_kernels import KernelHandover
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import Provider
from belljar.sandboxes.handover import HandoverProvider
from belljar.sessions.recovery import recover
from belljar.sessions.registry import Registry, open_registry
from belljar.sessions.takeover import Takeover
from belljar.settings import Settings
from belljar.supervisor import open_supervisor
from belljar.toolbox.toolbox import Toolbox, open_toolbox
from belljar.toolbox.tree import TreeDirectory

RETRY_S = 30.0
KEEPING_HINT = "Set keep_alive to false, or sandbox to namespace"

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
    handover: Handover
    """How its sessions are handed to the next server, if they are."""
    toolbox: Toolbox | None = None
    """The tools of other servers; None where none are configured."""


@asynccontextmanager
async def open_runtime(settings: Settings) -> AsyncGenerator[Runtime]:
    """Open the engine; everything it made is gone or released when it closes."""
    # An environment that the settings name and this host does not have is said now, not to a session later.
    await check_configured(settings)
    guardrails = configured_guardrails(settings)
    settings = guardrails.settings
    veils = Redactors(guardrails.sections, settings.secrets_file)
    provider = open_provider(settings)
    if provider.warning:
        log.warning("%s", provider.warning)
    open_data_directory(settings.data_directory)
    sessions = settings.data_directory / "sessions"
    with (
        run_folder(settings.data_directory) as run,
        open_journal(settings.data_directory / "journal.sqlite") as journal,
        _open_handover(settings, provider) as handover,
    ):
        # Users of sessions pass through it to their folders.
        make_folder(sessions, way_mode())
        roll = SessionRecords(journal, run.folder.name)
        name, outlives = run.folder.name, handover.is_on
        async with (
            open_toolbox(settings, _plot(run, handover)) as toolbox,
            aclosing(KernelStarter(settings, provider, sessions, name, toolbox, outlives_server=outlives)) as starter,
            open_trimming(journal, sessions, settings.journal_mb),
        ):
            # A Jupyter kernel that the settings name and this host does not have, likewise.
            starter.environments.check(settings.environment)
            inheritance, left = Takeover(handover, starter, sessions), handover.left()
            clean_up = partial(
                recover,
                journal,
                roll,
                sessions,
                run.living,
                budget_chars=settings.output_budget_chars,
                why_lost=inheritance.why_lost,
            )
            # Beside a server that has the supervisor: what is abandoned here may be what that one is taking over.
            if handover.is_on or not settings.keep_alive:
                with usable(journal.path):
                    clean_up(spared=left)
            async with (
                open_registry(guardrails, veils, sessions, journal, roll, starter, handover) as registry,
                serve_operators(run.folder, registry),
            ):
                await inheritance.take_over_all(registry, run.living)
                if left:  # what could not be taken over is recorded as lost
                    clean_up()
                # The default environment is made while the client is still shaking hands.
                preparation = Preparation()
                warming = asyncio.get_running_loop().create_task(_prepare(starter, settings.environment, preparation))
                try:
                    yield Runtime(settings, provider, registry, starter, preparation, handover, toolbox)
                finally:
                    warming.cancel()


def configured_guardrails(settings: Settings) -> Guardrails:
    """What the policy of the settings says, privacy included."""
    return read_guardrails(settings, {SECTION: PrivacyRules})


@contextmanager
def _open_handover(settings: Settings, provider: Provider) -> Generator[Handover]:
    """How sessions outlive this server, where `keep_alive` is on and no other server has the supervisor."""
    if not settings.keep_alive:
        yield NoHandover()
        return
    if (gap := keeping_gap(provider)) or not isinstance(provider, HandoverProvider):
        raise SettingsError(f"keep_alive cannot be used: {gap}", hint=KEEPING_HINT)
    with open_supervisor(settings.data_directory, settings.keep_alive_s) as supervisor:
        if supervisor is None:
            log.warning("keep_alive: another server keeps its sessions here, so this one's sessions end with it")
            yield NoHandover()
        else:
            yield KernelHandover(supervisor, provider.hand_over_with(supervisor))


def _plot(run: "Run", handover: Handover) -> TreeDirectory:
    """Where the toolbox's tree stands: sessions that outlive this server have it mounted."""
    if not handover.is_on:
        return TreeDirectory(run.folder.name, run.living)
    return TreeDirectory(run.folder.name, run.living, handover.deposit_tree, handover.has_any)


def keeping_gap(provider: Provider) -> str:
    """Why sandboxes cannot outlive the server; empty when they can."""
    if not isinstance(provider, HandoverProvider):
        return f"a sandbox of {provider.name} cannot be handed on from one server to the next, only one of namespaces"
    return "" if hasattr(os, "pidfd_open") else "this Python or Linux has no descriptors of processes (pidfd_open)"


async def _prepare(starter: KernelStarter, name: str, preparation: Preparation) -> None:
    """Until it is done: a server that is not ready gets no calls, which would else be what tries again."""
    told = ""
    while preparation.environment != "ready":
        try:
            if not name.startswith(KERNEL_PREFIX):
                await starter.environments.get(name)
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
    folder = runs / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        make_folder(runs)
        make_folder(folder)
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise SettingsError(
            f"data_directory {data_directory} cannot be used: {error.strerror}",
            hint="Make room there, or set data_directory to a folder that can be written",
        ) from error
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
