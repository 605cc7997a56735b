"""The runtime: opens everything that the settings call for, in order, and closes it again.

The surfaces, the CLI and the Python API start here.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from belljar import hooks
from belljar.environments import check_configured
from belljar.errors import BelljarError, SettingsError
from belljar.files.private import make_folder, open_data_directory, way_mode
from belljar.journal.damage import open_checks
from belljar.journal.journal import Journal, last_written, open_journal, usable
from belljar.journal.retention import open_trimming
from belljar.journal.session_records import SessionRecords
from belljar.plugins import Plugins, load_plugins
from belljar.policy.guardrails import Guardrails, read_guardrails
from belljar.privacy.redaction import SECTION, Redactors
from belljar.privacy.rules import PrivacyRules
from belljar.products import products
from belljar.provisioning.environments import is_remote
from belljar.provisioning.form_targets import BuiltinTargets
from belljar.provisioning.handover import Handover
from belljar.provisioning.host_folders import open_host_folders
from belljar.provisioning.kept_kernels import KernelHandover
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes import BuiltinProviders, open_provider
from belljar.sandboxes.base import HandoverProvider, HostPathProvider, Provider
from belljar.sandboxes.limits.host_memory import memory_shortage
from belljar.servers import Run, other_servers, run_folder, watching_servers
from belljar.sessions.identified import IdentifiedSessions
from belljar.sessions.registry import Registry
from belljar.sessions.takeover import Takeover, recover
from belljar.settings import Settings
from belljar.settings.azure import AZURE
from belljar.skills.library import SkillLibrary, open_library
from belljar.skills.session_view import shown_skills
from belljar.supervisor import has_supervisor, open_supervisor
from belljar.toolbox.server_config import load_servers
from belljar.toolbox.toolbox import Toolbox, open_toolbox
from belljar.toolbox.tree import TreeDirectory

if TYPE_CHECKING:
    from belljar.engine.local import LocalEngine
    from belljar.engine.runs import RunSource
    from belljar.sessions.stored import StoredSessions

RETRY_S = 30.0
KEEP_ALIVE_HINT = "Set keep_alive to false, or sandbox to namespace"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EnvironmentState:
    """The state of the configured environment while it is prepared."""

    environment: Literal["pending", "ready", "broken"] = "pending"
    zygote: Literal["pending", "warm", "none"] = "pending"
    """The state of the process that sessions are forked from; `none` where there will not be one."""


class LateEngine:
    """What people see of a runtime's sessions, made when somebody first looks: most servers are never looked at."""

    def __init__(self, registry: Registry, data_directory: Path, name: str) -> None:
        self._made: LocalEngine | None = None
        self._find_runs: Callable[[], RunSource] | None = None
        self._registry = registry
        self._data_directory = data_directory
        self._name = name

    def get(self) -> "LocalEngine":
        """Return the engine, made at the first call."""
        from belljar.engine.local import LocalEngine

        if self._made is None:
            self._made = LocalEngine(self._registry, self._data_directory, self._name)
            self._made.find_runs = self._find_runs
        return self._made

    def show_runs(self, find_runs: "Callable[[], RunSource]") -> None:
        """Have the engine show the runs of workflows, from the source that `find_runs` returns."""
        self._find_runs = find_runs
        if self._made is not None:
            self._made.find_runs = find_runs

    async def aclose(self) -> None:
        """End its threads; may be called twice."""
        if self._made is not None:
            await self._made.aclose()


@dataclass(frozen=True, slots=True)
class Runtime:
    """What is open while a server runs, as surfaces use it."""

    settings: Settings
    provider: Provider
    sessions: Registry
    starter: KernelStarter
    preparation: EnvironmentState
    handover: Handover
    """Hands its sessions to the next server; one that does nothing where they end with this one."""
    identified: IdentifiedSessions
    """The sessions by the names that their owners chose."""
    plugins: Plugins
    """belljar's own and the operator's."""
    name: str
    """The name of this server among those of its data directory."""
    late_engine: "LateEngine"
    toolbox: Toolbox | None = None
    """The tools of other servers; None where none are configured."""
    skills: SkillLibrary | None = None
    """The operator's skills and what agents saved; None where there are neither."""
    parts: dict[str, Any] = field(default_factory=dict[str, Any])
    """What products have open while it is, by their names."""

    @property
    def isolates(self) -> bool:
        """Return whether sessions are sealed off. If not, no text for clients may say so."""
        return self.settings.environment == AZURE or self.provider.isolates

    @property
    def shows_workspace(self) -> bool:
        """Return whether sessions see their folder at /mnt/data. If not, no text for clients may name that path."""
        is_remote = self.settings.environment == AZURE
        return is_remote or not isinstance(self.provider, HostPathProvider) or self.provider.shows_workspace


@asynccontextmanager
async def open_runtime(
    settings: Settings,
    *,
    prepares: bool = True,
    takes_runs: bool = False,
    on_prepared: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Runtime]:
    """Open a runtime; when it closes, everything it created is removed or released.

    Without `prepares` the configured environment is made ready only when something needs it. With `takes_runs`, as
    servers have it, products go on with what other servers have left, and it looks out for other servers.
    `on_prepared` is called when sessions start quickly.
    """
    # Fail now, not in a session later, if the settings name an environment that this host does not have.
    await check_configured(settings)
    plugins = open_plugins(settings)
    guardrails = configured_guardrails(settings, plugins)
    settings = guardrails.settings
    redactors = Redactors(guardrails.sections, settings.secrets_file)
    provider = open_provider(settings, plugins)
    for warning in filter(None, (provider.warning, memory_shortage())):
        log.warning("%s", warning)
    host_folders = open_host_folders(settings, provider)
    open_data_directory(settings.data_directory)
    sessions = settings.data_directory / "sessions"
    path = settings.data_directory / "journal.sqlite"
    last_write = last_written(path)
    with (
        run_folder(settings.data_directory) as run,
        open_journal(path) as journal,
        _open_handover(settings, provider) as handover,
    ):
        # The sessions' users must be able to pass through this folder to their own.
        make_folder(sessions, way_mode())
        records = SessionRecords(journal, run.folder.name)
        name, outlives_server = run.folder.name, handover.is_on
        # Likewise for a folder of skills that is not there.
        library = open_library(settings, has_tools=bool(load_servers(settings)))
        async with (
            aclosing(plugins),
            open_toolbox(settings, _tree_directory(run, handover), plugins) as toolbox,
            aclosing(
                KernelStarter(
                    settings,
                    provider,
                    sessions,
                    name,
                    toolbox,
                    outlives_server=outlives_server,
                    plugins=plugins,
                    skills=shown_skills(library),
                    host_folders=host_folders,
                    remote={name: kernels for product in products() for name, kernels in product.kernels.items()},
                )
            ) as starter,
            open_trimming(journal, sessions, settings.journal_mb),
            open_checks(journal),
        ):
            if toolbox is not None and library is not None:
                toolbox.find_skills = library.found_in_session
            await asyncio.to_thread(starter.gpus.warn)
            # Likewise for a Jupyter kernel that the settings name and this host does not have.
            starter.environments.check(settings.environment)
            takeover, left = Takeover(handover, starter, sessions), handover.left()
            clean_up = partial(
                recover,
                journal,
                records,
                sessions,
                living=run.living,
                budget_chars=settings.output_budget_chars,
                why_lost=takeover.why_lost,
                # Beside other servers the last write may be theirs.
                ended_at={
                    name: max(at, last_write) if len(run.living) == 1 else at for name, at in run.ended_at.items()
                },
            )
            # Not beside another server that has the supervisor, because it may be taking over what looks abandoned.
            is_left = not settings.keep_alive and _has_left_sessions(settings.data_directory, run.living)
            if is_left:
                log.warning(
                    "keep_alive is off, and sessions of an earlier server are kept alive in %s: they are left to a "
                    "server with keep_alive; one that starts after they have ended recovers their files",
                    settings.data_directory,
                )
            if handover.is_on or not (settings.keep_alive or is_left):
                with usable(journal.path):
                    clean_up(spared=left)
            async with (
                _kept_up(
                    Registry(
                        guardrails,
                        redactors,
                        sessions,
                        journal,
                        records,
                        starter,
                        handover,
                        plugins,
                        library,
                        _open_stored(settings, sessions, journal, name),
                    ),
                    fills_pool=prepares,
                ) as registry,
                aclosing(LateEngine(registry, settings.data_directory, name)) as late_engine,
            ):
                await takeover.take_over_all(registry, run.living)
                if left:  # record what could not be taken over as lost
                    clean_up()
                if unrecorded := records.unrecorded(sessions):
                    log.warning(
                        "the journal has no record of %d session folders in %s: `belljar sessions --all` lists them, "
                        "`belljar journal salvage --owner NAME` gives them to somebody, and after keep_days they are "
                        "removed",
                        len(unrecorded),
                        sessions,
                    )
                runs = settings.data_directory / "runs"
                registry.recover_others = partial(_recover_others, clean_up, runs, name, is_kept=settings.keep_alive)
                # Prepare the default environment while the client still initializes its connection.
                preparation = EnvironmentState()
                preparing = asyncio.get_running_loop().create_task(
                    _prepare(starter, settings.environment if prepares else "", preparation, on_prepared)
                )
                try:
                    runtime = Runtime(
                        settings,
                        provider,
                        registry,
                        starter,
                        preparation,
                        handover,
                        IdentifiedSessions(registry),
                        plugins,
                        name,
                        late_engine,
                        toolbox,
                        library,
                    )
                    async with AsyncExitStack() as stack:
                        if settings.inbox_webhook.get_secret_value():
                            # Imported here, because few have one.
                            from belljar.questions.webhook import open_webhook

                            name_of = partial(_session_name, registry)
                            await stack.enter_async_context(open_webhook(settings, registry.inbox, name_of))
                        for product in products():
                            part = product.open(runtime, preparing if takes_runs else None)
                            runtime.parts[product.name] = await stack.enter_async_context(part)
                        async with watching_servers(runs, name, settings.sweep_interval_s, is_told=takes_runs):
                            yield runtime
                finally:
                    preparing.cancel()


@asynccontextmanager
async def _kept_up(registry: Registry, *, fills_pool: bool = True) -> AsyncGenerator[Registry]:
    """Sweep idle sessions in the background, and close the registry in the end; `fills_pool` makes some ahead."""
    if fills_pool:
        registry.pool.fill()
    loop = asyncio.get_running_loop()
    working = [loop.create_task(_sweep_periodically(registry))]
    if registry.stored is not None:
        from belljar.sessions.store import keep_sessions_away

        working.append(loop.create_task(registry.stored.run()))
        working.append(loop.create_task(keep_sessions_away(registry.settings.store)))
    try:
        yield registry
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await registry.aclose()


async def _sweep_periodically(registry: Registry) -> None:
    while True:
        await asyncio.sleep(registry.settings.sweep_interval_s)
        try:
            await registry.sweep()
        except Exception:
            # A session that cannot be ended must not keep the others from being swept.
            log.exception("sweep failed")


def _session_name(registry: Registry, session_id: str) -> str:
    session = registry.find_open(session_id)
    return session.reason if session is not None else ""


def _open_stored(settings: Settings, sessions: Path, journal: Journal, run: str) -> "StoredSessions | None":
    """Return the sessions in the store that the settings name; None where they name none."""
    if not settings.store:
        return None
    # Imported here, because few have a store.
    from belljar.sessions.stored import open_stored

    return open_stored(settings, sessions, journal, run)


def open_plugins(settings: Settings) -> Plugins:
    """Return the operator's plugins and belljar's own."""
    plugins = load_plugins(hooks, settings.plugins_directory)
    plugins.note("policy", "judge_tool_call", "judge_code", "screen_output")
    plugins.note("privacy", "screen_output")
    plugins.add("sandboxes", BuiltinProviders())
    for product in products():
        if (plugin := product.plugin()) is not None:
            plugins.add(product.name, plugin)
    plugins.add("forms", BuiltinTargets())
    return plugins


def configured_guardrails(settings: Settings, plugins: Plugins | None = None) -> Guardrails:
    """Return the rules of the policy that the settings name, privacy included."""
    judges = plugins is not None and ("judge_tool_call" in plugins.used_hooks or "judge_code" in plugins.used_hooks)
    return read_guardrails(settings, {SECTION: PrivacyRules}, is_logged=judges)


@contextmanager
def _open_handover(settings: Settings, provider: Provider) -> Generator[Handover]:
    """Open the handover by which sessions outlive this server.

    It does nothing where `keep_alive` is off or another server has the supervisor.
    """
    if not settings.keep_alive:
        yield Handover()
        return
    if (problem := keep_alive_problem(provider)) or not isinstance(provider, HandoverProvider):
        raise SettingsError(f"keep_alive cannot be used: {problem}", hint=KEEP_ALIVE_HINT)
    with open_supervisor(settings.data_directory, settings.keep_alive_s) as supervisor:
        if supervisor is None:
            log.warning("keep_alive: another server keeps its sessions here, so this one's sessions end with it")
            yield Handover()
        else:
            yield KernelHandover(supervisor, provider.hand_over_with(supervisor))


def _tree_directory(run: Run, handover: Handover) -> TreeDirectory:
    """Return the directory of the toolbox's modules; it is deposited if sessions that mount it outlive this server."""
    if not handover.is_on:
        return TreeDirectory(run.folder.name, run.living)
    return TreeDirectory(run.folder.name, run.living, handover.deposit_tree, handover.has_any)


def keep_alive_problem(provider: Provider) -> str:
    """Return why sandboxes cannot outlive the server; empty when they can."""
    if not isinstance(provider, HandoverProvider):
        return f"a sandbox of {provider.name} cannot be handed on from one server to the next, only one of namespaces"
    return "" if hasattr(os, "pidfd_open") else "this Python or Linux has no descriptors of processes (pidfd_open)"


async def _prepare(
    starter: KernelStarter, name: str, preparation: EnvironmentState, on_prepared: Callable[[], None]
) -> None:
    """Prepare the environment, and retry until it is ready.

    Calls do not retry it, because a server that is not ready gets none. Without a name there is nothing to prepare.
    """
    if not name:
        preparation.environment, preparation.zygote = "ready", "none"
        return
    logged = ""
    while preparation.environment != "ready":
        try:
            if not is_remote(name):
                await starter.environments.get(name)
            preparation.environment = "ready"
        except BelljarError as error:
            preparation.environment = "broken"
            # Log each error once; every session that needs the environment gets it as an error anyway.
            if str(error) != logged:
                log.warning("environment %s: %s", name, error)
            logged = str(error)
            await asyncio.sleep(RETRY_S)
    preparation.zygote = "warm" if await starter.wait_until_warm(name) else "none"
    on_prepared()


def _recover_others(clean_up: Callable[..., None], runs: Path, own: str, *, is_kept: bool) -> None:
    """Record the sessions of servers that died since this one started as asleep, so that they can be woken here.

    Not where sessions outlive their server, because the next server that starts takes those over.
    """
    others, ended_at = other_servers(runs, own=own)
    living = frozenset({own, *others})
    if not is_kept and not _has_left_sessions(runs.parent, living):
        clean_up(living=living, ended_at=ended_at)


def _has_left_sessions(data_directory: Path, living: Collection[str]) -> bool:
    """Return whether a supervisor keeps sessions alive whose server is gone: it runs, and no other server does."""
    return len(living) == 1 and has_supervisor(data_directory)
