"""`belljar doctor`: report what this host can do, line by line, and what to do about the rest.

A check that is not passed fails if the configured settings need it, and warns if they do not. The checks of sandboxes
and environments are in their own packages; this module runs them and prints the results. To see whether sessions are
forked, it starts a zygote with the configured sandbox and environment, forks one session from it, and asks that session
which modules are imported. It changes nothing: an environment that does not exist yet is not made for it.
"""

import asyncio
import contextlib
import logging
import os
import platform
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from belljar.cli.findings import HostFinding, print_findings
from belljar.distribution import DISTRIBUTION, foreign_belljar
from belljar.environments import check_environments
from belljar.environments.managed import DEFAULT, is_ready, recipe_folder
from belljar.environments.package_index import check_index
from belljar.environments.selection import is_prepared
from belljar.errors import BelljarError, SandboxUnavailable
from belljar.http.forwarded import PROXY_HINT, proxy_warning
from belljar.http.tls import certificate_end, days_left, tls_context
from belljar.journal.damage import SALVAGE_HINT, FileCheck
from belljar.journal.journal import new_id
from belljar.kernels.base import Kernel
from belljar.outputs.events import Stream
from belljar.products import Product, products
from belljar.provisioning.gpus import SessionGpus
from belljar.provisioning.host_folders import folder_faults, require_folder_provider
from belljar.provisioning.starter import KernelStarter
from belljar.runtime import KEEP_ALIVE_HINT, configured_guardrails, keep_alive_problem, open_plugins
from belljar.sandboxes import ask_checks, providers
from belljar.sandboxes.base import ForkableProvider, HostCheck, Provider
from belljar.sandboxes.data_path import is_in_image
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.limits.host_memory import memory_allowance_mb, memory_shortage
from belljar.sandboxes.limits.systemd_scope import request_scope
from belljar.sandboxes.limits.table import CONTROLLERS, GroupedLimit
from belljar.sandboxes.limits.trials import try_limits
from belljar.sessions.pool import new_folders
from belljar.settings import Settings, load_command_settings, parse_key, unread_files
from belljar.settings.azure import AZURE
from belljar.settings.environments import KERNEL_PREFIX
from belljar.settings.keys import LOCAL_PRINCIPAL
from belljar.settings.sandboxes import PLUGIN_PREFIX, installed_sandboxes
from belljar.toolbox.server_config import load_servers

_MEMORY_HINT = "Lower memory_mb, or raise the limit of the service or container"
_OLDEST_NODE = 22
_JOURNAL_S = 5.0
_SOON_DAYS = 21
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""The names under which kaleido, which draws Plotly's figures in sessions, looks for a browser."""
_LIMITED_BY_US = ("namespace", "process", "gvisor")
"""The sandboxes whose limits are a section of their own, in which each is proved."""
_NO_SESSIONS = "no session can start with these settings"
_ELSEWHERE = {"container": "the engine", "microvm": "the virtual machine"}
_NAME = "sessions"
_COLD = "they start cold, which takes about half a second and the imports of each"
_PRELOAD_HINT = "Take what does not import out of preload, or install it into the environment"
_WARM_HINT = "See whether it does with fewer modules in preload"
_ASK = "import sys; print(*[name for name in {names!r} if name not in sys.modules], sep='\\n')"


def command(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check what this host can do.

    Looks at the sandbox, environments, an Azure pool, the toolbox's servers and the policy, hits every limit of a
    session, and forks one; exits with 1 if something that the settings need fails.
    """
    settings = load_command_settings()
    if is_in_image():
        # Imported here, because it brings the whole server along.
        from belljar.cli.container import choose_sandbox

        # Its start chooses the sandbox; where it would refuse to, the checks of the one that is set say why.
        with contextlib.suppress(SandboxUnavailable):
            settings = load_command_settings({"sandbox": choose_sandbox(settings)})
    findings = list(examine(settings))
    raise typer.Exit(print_findings(findings, as_json=as_json))


def examine(settings: Settings) -> Iterator[HostFinding]:
    """Yield every finding, section by section; an error in a section is a finding too."""
    sections: dict[str, Callable[[Settings], Iterator[HostFinding]]] = {
        "host": _check_host,
        "sandbox": _check_sandboxes,
        "limits": _check_limits,
        "gpus": _check_gpus,
        "folders": check_folders,
        "store": check_store,
        "environments": _check_environments,
        **{product.name: partial(_check_product, product) for product in products()},
        "forks": _check_forks,
        "toolbox": _check_toolbox,
        "guardrails": _check_guardrails,
        "http": check_http,
        "webhook": check_webhook,
        "tls": _check_tls,
        "browser": _check_browser,
        "node": _check_node,
    }
    for name, check in sections.items():
        try:
            yield from check(settings)
        except BelljarError as error:
            yield HostFinding(name, "fail", name, error.message, error.hint)


def _check_host(settings: Settings) -> Iterator[HostFinding]:
    yield HostFinding("host", "ok", "system", f"{_system_name()}, {platform.machine()}, {os.cpu_count()} CPUs")
    yield HostFinding("host", "ok", "kernel", platform.release())
    yield HostFinding("host", "ok", "python", f"{platform.python_version()} at {sys.executable}")
    yield from _check_distribution()
    yield from _check_unread_files(settings)
    yield _check_memory(settings)
    yield _check_data_directory(settings.data_directory)
    yield from check_journal(settings.data_directory / "journal.sqlite")


def _check_distribution() -> Iterator[HostFinding]:
    if other := foreign_belljar():
        detail = f"the package belljar {other.version} is another project, and has put its files among ours"
        hint = f"pip uninstall belljar; pip install --force-reinstall {DISTRIBUTION}"
        yield HostFinding(
            "host", "fail", "packages", detail, hint, "which files are whose depends on what was installed last"
        )


def _check_unread_files(settings: Settings) -> Iterator[HostFinding]:
    for file in unread_files(settings):
        hint = f"If you have read it: belljar trust {shlex.quote(str(file))}"
        yield HostFinding("host", "warn", file.name, f"{file} is not trusted", hint, "it is not read")


def _check_memory(settings: Settings) -> HostFinding:
    if shortage := memory_shortage():
        return HostFinding("host", "warn", "memory", shortage, cost="the server may be killed, and its variables lost")
    allowed, wanted = memory_allowance_mb(), settings.memory_mb
    detail = f"{allowed:,} MB for the server and its sessions"
    if wanted is not None and 0 < allowed < wanted:
        detail = f"{detail}, and one session may want memory_mb = {wanted:,} MB"
        return HostFinding("host", "warn", "memory", detail, _MEMORY_HINT, "sessions are killed before their own limit")
    return HostFinding("host", "ok", "memory", detail)


def _check_data_directory(folder: Path) -> HostFinding:
    nearest = next(path for path in (folder, *folder.parents) if _is_there(path))
    try:
        # Write a file rather than read permission bits, which allow root everything on a read-only file system, too.
        with tempfile.TemporaryFile(dir=nearest):
            return HostFinding("host", "ok", "data", f"{folder} can be written")
    except OSError as error:
        detail = f"{folder} cannot be written: {nearest}: {error.strerror}"
        return HostFinding("host", "fail", "data", detail, "Set data_directory to a folder of yours", _NO_SESSIONS)


def check_journal(path: Path) -> Iterator[HostFinding]:
    """Yield whether the journal is in order, where there is one and reading it does not take too long."""
    if not _is_there(path):
        return
    try:
        found = FileCheck(path).run(_JOURNAL_S)
    except sqlite3.Error as error:
        yield HostFinding("host", "warn", "journal", f"{path} cannot be checked: {error}")
        return
    if found.damage:
        yield HostFinding("host", "fail", "journal", f"{path} is damaged: {found.damage}", SALVAGE_HINT, _NO_SESSIONS)
    elif found.is_complete:
        yield HostFinding("host", "ok", "journal", f"{path} is in order")
    else:
        detail = f"{path}: nothing wrong in the first {_JOURNAL_S:g} s of reading it; `belljar journal check` reads all"
        yield HostFinding("host", "ok", "journal", detail)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _providers(settings: Settings) -> dict[str, Provider]:
    """Return the providers by name, a plugin's too if the settings choose it."""
    is_of_plugin = settings.sandbox.startswith(PLUGIN_PREFIX)
    return providers(settings, open_plugins(settings) if is_of_plugin else None)


def _check_sandboxes(settings: Settings) -> Iterator[HostFinding]:
    known = _providers(settings)
    yield from examine_providers(known, settings.sandbox)
    yield from _check_installed_sandboxes(settings.sandbox)
    yield _check_keep_alive(settings, known[settings.sandbox])


def _check_keep_alive(settings: Settings, provider: Provider) -> HostFinding:
    problem = keep_alive_problem(provider)
    if not settings.keep_alive:
        return HostFinding(
            "sandbox", "ok", "keep_alive", f"off; it cannot be used here: {problem}" if problem else "off"
        )
    if problem:
        return HostFinding("sandbox", "fail", "keep_alive", f"it cannot be used: {problem}", KEEP_ALIVE_HINT)
    return HostFinding("sandbox", "ok", "keep_alive", f"sessions wait {settings.keep_alive_s:g} s for the next server")


def examine_providers(known: Mapping[str, Provider], configured: str) -> Iterator[HostFinding]:
    """Yield what each provider reports about this host, beginning with the configured one."""
    warning = known[configured].warning
    detail = f"{configured}. {warning}" if warning else configured
    yield HostFinding("sandbox", "warn" if warning else "ok", "configured", detail)
    for name in sorted(known, key=lambda name: name != configured):
        cost = _NO_SESSIONS if name == configured else f"`--sandbox {name}` cannot be chosen"
        for check in ask_checks(known[name]):
            if check.name == "limits" and name in _LIMITED_BY_US:
                continue
            yield _finding("sandbox", f"{name}, {check.name}", check, is_needed=name == configured, cost=cost)


def _check_installed_sandboxes(configured: str) -> Iterator[HostFinding]:
    """Yield which packages bring a provider. Only the configured one has been imported; the others are just named."""
    for one in installed_sandboxes():
        if one.is_shadowed:
            detail = f"the package {one.package} brings one of this name; it is ignored, because belljar has its own"
            yield HostFinding("sandbox", "warn", one.name, detail, f"Remove {one.package.partition(' ')[0]}")
        elif one.name == configured:
            yield HostFinding("sandbox", "ok", one.name, f"brought by the package {one.package}")
        else:
            detail = f"brought by the package {one.package}; not checked, because it is not configured"
            yield HostFinding("sandbox", "ok", one.name, detail)


def _finding(section: str, name: str, check: HostCheck, *, is_needed: bool, cost: str = "") -> HostFinding:
    status = "ok" if check.is_ok else "fail" if is_needed else "warn"
    return HostFinding(section, status, name, check.detail, check.hint, "" if check.is_ok else check.cost or cost)


def _check_limits(settings: Settings) -> Iterator[HostFinding]:
    for check in check_limits(settings):
        yield _finding("limits", check.name, check, is_needed=False)


def _check_gpus(settings: Settings) -> Iterator[HostFinding]:
    gpus = SessionGpus(settings, _providers(settings)[settings.sandbox], settings.data_directory / "sessions")
    yield _finding("gpus", "gpus", gpus.check(), is_needed=gpus.is_on)


def check_folders(settings: Settings) -> Iterator[HostFinding]:
    """Yield each folder of the host that sessions see, and whose sessions those are."""
    provider = _providers(settings)[settings.sandbox]
    if not settings.folders:
        return
    require_folder_provider(provider)
    for shown, fault in folder_faults(settings, provider):
        entry = settings.folders[shown.name]
        whose = f"the sessions of {', '.join(entry.owners)}" if entry.owners else "all sessions"
        rights = "read and write" if entry.writable else "read"
        if fault is not None:
            detail = fault.message.removeprefix(f"folders.{shown.name}: ")
            yield HostFinding("folders", "fail", shown.name, detail, fault.hint or "", _NO_SESSIONS)
        elif strangers := _unknown_owners(settings, entry.owners):
            detail = f"{shown.path}: no key of api_keys is named {', '.join(strangers)}, so none of theirs sees it"
            yield HostFinding("folders", "warn", shown.name, detail, "Correct owners, or add the key")
        else:
            yield HostFinding("folders", "ok", shown.name, f"{shown.path}: {whose} may {rights} it")


def check_store(settings: Settings) -> Iterator[HostFinding]:
    """Try the store by writing, claiming twice and reading, and count what waits to be put; nothing without a store."""
    if not settings.store:
        return
    # Imported here, because few have a store.
    from belljar.journal.archive import open_archive
    from belljar.sessions.session_objects import try_store

    yield HostFinding("store", "ok", "store", try_store(settings))
    if (settings.data_directory / "journal.sqlite").is_file():
        with open_archive(settings.data_directory) as archive:
            count = archive.records.count_unstored()
        detail = f"{count} sessions sleep on this disk and wait to be put" if count else "all that sleep here are there"
        hint = (
            "A running server puts them; its log says what keeps it from it, and bundle_mb is the largest"
            if count
            else ""
        )
        yield HostFinding("store", "warn" if count else "ok", "sessions", detail, hint)


def _unknown_owners(settings: Settings, owners: Sequence[str]) -> list[str]:
    """Return the owners that no credential of the settings can be; the subjects of an issuer are not known here."""
    keys = {parse_key(key.get_secret_value()).name for key in settings.api_keys}
    return [
        name for name in owners
        if name != LOCAL_PRINCIPAL and not name.startswith("jwt:") and name.removeprefix("key:") not in keys
    ]  # fmt: skip


def check_http(settings: Settings) -> Iterator[HostFinding]:
    """Yield a warning where callers through a proxy could not be told apart."""
    if warning := proxy_warning(settings):
        yield HostFinding("http", "warn", "callers", warning, PROXY_HINT)


def check_webhook(settings: Settings) -> Iterator[HostFinding]:
    """Connect to the host of the inbox's webhook, without a message; nothing where there is none."""
    if not settings.inbox_webhook.get_secret_value():
        return
    # Imported here, because few have one.
    from belljar.questions.webhook import try_webhook

    yield HostFinding("webhook", "ok", "webhook", asyncio.run(try_webhook(settings)))


def _check_environments(settings: Settings) -> Iterator[HostFinding]:
    for check in check_environments(settings):
        yield _finding("environments", check.name, check, is_needed=True, cost=_NO_SESSIONS)
    yield _check_index(settings)


def _check_index(settings: Settings) -> HostFinding:
    """Try the package index, which the settings need only while their environment is not made."""
    is_default = settings.environment == DEFAULT.name
    check = asyncio.run(check_index())
    is_needed = is_default and not is_ready(recipe_folder(settings))
    cost = _NO_SESSIONS if is_needed else "sessions cannot install packages"
    return _finding("environments", check.name, check, is_needed=is_needed, cost=cost)


def _check_product(product: Product, settings: Settings) -> Iterator[HostFinding]:
    for check, is_needed in product.checks(settings):
        yield _finding(product.name, check.name, check, is_needed=is_needed)


def _check_forks(settings: Settings) -> Iterator[HostFinding]:
    for check in check_forks(settings, _providers(settings)[settings.sandbox]):
        yield _finding("forks", check.name, check, is_needed=False)


def _check_toolbox(settings: Settings) -> Iterator[HostFinding]:
    names = ", ".join(load_servers(settings))
    if names:
        yield HostFinding("toolbox", "ok", "servers", f"{names}; `belljar toolbox list` connects to them")


def _check_guardrails(settings: Settings) -> Iterator[HostFinding]:
    configured_guardrails(settings)
    if settings.policy:
        yield HostFinding("guardrails", "ok", "policy", f"{settings.policy} is in order")


def _check_tls(settings: Settings) -> Iterator[HostFinding]:
    """Report when the server's certificate ends; nothing where none is set up."""
    if tls_context(settings) is None:
        return
    end = certificate_end(settings)
    left, day = days_left(end), f"{end:%Y-%m-%d}"
    hint = "Put a new certificate in its place, and start the server again"
    if left < 0:
        yield HostFinding("tls", "fail", "certificate", f"{settings.tls_certificate} ended on {day}", hint)
    elif left < _SOON_DAYS:
        detail = f"{settings.tls_certificate} ends on {day}, in {left:.0f} days"
        yield HostFinding("tls", "warn", "certificate", detail, hint)
    else:
        yield HostFinding("tls", "ok", "certificate", f"{settings.tls_certificate} ends on {day}")


def _check_browser(settings: Settings) -> Iterator[HostFinding]:
    """Report whether sessions can draw Plotly's figures as pictures, which nothing else needs."""
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found:
        yield HostFinding("browser", "ok", "browser", f"{found}: Plotly's figures come back as pictures, too")
        return
    cost = "Plotly's figures come back as pages only, which a model cannot see"
    yield HostFinding("browser", "warn", "browser", "no Chromium or Chrome on the PATH", "apt install chromium", cost)


def _check_node(settings: Settings) -> Iterator[HostFinding]:
    hint = f"install Node {_OLDEST_NODE} or newer"
    cost = "the MCP Inspector cannot be run against belljar; nothing else needs it"
    node = shutil.which("node")
    if node is None:
        yield HostFinding("node", "warn", "node", "not on the PATH", hint, cost)
        return
    try:
        answer = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield HostFinding("node", "warn", "node", f"{node} does not run: {error}", hint, cost)
        return
    version = answer.stdout.strip()
    major = version.removeprefix("v").partition(".")[0]
    is_recent = major.isdecimal() and int(major) >= _OLDEST_NODE
    if is_recent:
        yield HostFinding("node", "ok", "node", f"{version} at {node}")
    else:
        yield HostFinding("node", "warn", "node", f"{version} at {node}, which is too old", hint, cost)


def check_limits(settings: Settings) -> list[HostCheck]:
    """Return what bounds a session here; a check that is not ok never prevents one, and says what that costs."""
    if settings.environment == AZURE:
        return [HostCheck("limits", True, "the pool sets those of its sessions")]
    if owner := _ELSEWHERE.get(settings.sandbox):
        return [HostCheck("limits", True, f"{owner} sets those of sessions; see the line of the sandbox")]
    enforcer = Enforcer(asks_systemd=settings.systemd_scope)
    offer = enforcer.groups.offer
    logging.disable(logging.WARNING)  # the checks report what it would warn of
    try:
        complaints = asyncio.run(try_limits(enforcer))
    finally:
        logging.disable(logging.NOTSET)
    is_there = offer.kind != "none"
    kind = HostCheck("control groups", is_there, _hierarchy(offer), "" if is_there else enforcer.advice)
    return [kind, *(_check_limit(enforcer, limit, complaints.get(name)) for name, limit in CONTROLLERS.items())]


def _hierarchy(offer: ControlGroups) -> str:
    if offer.kind == "none":
        return "no hierarchy is mounted"
    places = ", ".join(sorted({str(place) for place in offer.usable().values()}))
    return f"{offer.kind}, " + (f"those of sessions are made below {places}" if places else "none can be made by us")


def _check_limit(enforcer: Enforcer, limit: GroupedLimit, complaint: str | None) -> HostCheck:
    if complaint is None:
        folder = enforcer.groups.offer.folders.get(limit.controller)
        reason = f"{folder.parent if folder else 'our control group'} is not ours to divide"
        refusal = request_scope() if enforcer.asks_systemd else ""
        complaint = "; ".join(filter(None, ("not for a session as a whole: " + reason, refusal)))
    if complaint:
        return HostCheck(limit.name, False, complaint, enforcer.advice, limit.cost)
    return HostCheck(limit.name, True, limit.trial.proof, cost=limit.cost)


def check_forks(settings: Settings, provider: Provider) -> list[HostCheck]:
    """Return the checks; one that is not ok makes sessions start more slowly, and never prevents one."""
    if not settings.fork_start:
        return [HostCheck(_NAME, True, f"not forked, as fork_start says: {_COLD}")]
    if settings.environment.startswith(KERNEL_PREFIX):
        return [HostCheck(_NAME, True, f"those of Jupyter kernels are not forked: {_COLD}")]
    if settings.environment == AZURE:
        return [HostCheck(_NAME, True, "those in an Azure pool are not forked: the pool allocates them")]
    if not isinstance(provider, ForkableProvider):
        return [HostCheck(_NAME, False, f"the sandbox {provider.name} cannot fork them: {_COLD}")]
    if any(not check.is_ok for check in provider.check()):
        return [HostCheck(_NAME, False, "not tried: the sandbox does not work")]
    if reason := provider.no_nesting_reason():
        return [HostCheck(_NAME, False, f"{reason}: {_COLD}", "`fork_start = false` saves trying")]
    if not _is_prepared(settings):
        return [HostCheck(_NAME, True, "forking works; not timed, because the environment is not prepared yet")]
    with tempfile.TemporaryDirectory(prefix="belljar-doctor-") as folder:
        return asyncio.run(_time_fork(settings, provider, _sessions_folder(Path(folder))))


def _sessions_folder(folder: Path) -> Path:
    """Make a folder for sessions with the permissions of a server's, which the users of sessions must pass through."""
    sessions = folder / "sessions"
    sessions.mkdir()
    sessions.chmod(0o711)
    return sessions


def _is_prepared(settings: Settings) -> bool:
    try:
        return is_prepared(settings, settings.environment)
    except BelljarError:
        return True  # starting a session will report what is wrong with it


async def _time_fork(settings: Settings, provider: Provider, folder: Path) -> list[HostCheck]:
    starter = KernelStarter(settings, provider, folder)
    logging.disable(logging.WARNING)  # the checks report what it would warn of
    try:
        zygote = await starter.zygotes.of(await starter.environments.get(settings.environment))
        started_s = time.monotonic()
        if zygote is None or not await zygote.warm():
            why = zygote.complaint if zygote is not None else "no zygote"
            return [
                HostCheck(_NAME, False, f"the process to fork from does not get ready ({why}): {_COLD}", _WARM_HINT)
            ]
        warm_s = time.monotonic() - started_s
        fork_s, missing = await _fork_one(settings, starter, folder)
    except (BelljarError, TimeoutError) as error:
        return [HostCheck(_NAME, False, f"none could be started: {error or 'no answer'}")]
    finally:
        await starter.aclose()
        logging.disable(logging.NOTSET)
    detail = f"forked: one is ready after {fork_s * 1000:.0f} ms; warming up took {warm_s:.1f} s, once a server"
    return [HostCheck(_NAME, True, detail), _check_preload(settings, missing, zygote.complaint)]


def _check_preload(settings: Settings, missing: list[str], complaint: str) -> HostCheck:
    """Check which modules of `preload` a fork has; one that is not installed counts only if `preload` was set."""
    absent = [name for name in missing if f"{name} does not import" not in complaint]
    loaded = ", ".join(name for name in settings.preload if name not in missing) or "nothing"
    details = [loaded, *([complaint] if complaint else []), *(f"{name} is not installed" for name in absent)]
    is_ok = not complaint and (not absent or "preload" not in settings.model_fields_set)
    return HostCheck("preload", is_ok, "; ".join(details), "" if is_ok else _PRELOAD_HINT)


async def _fork_one(settings: Settings, starter: KernelStarter, folder: Path) -> tuple[float, list[str]]:
    """Start one session; return the seconds that took, and the modules of `preload` that it lacks."""
    folders = new_folders(folder, starter, new_id())
    try:
        started_s = time.monotonic()
        kernel = await starter.start(settings.environment, folders)
        took_s = time.monotonic() - started_s
        try:
            return took_s, await _missing_modules(kernel, settings.preload)
        finally:
            await kernel.aclose()
    finally:
        if folders.identity is not None:
            starter.provider.release_identity(folders.identity)


async def _missing_modules(kernel: Kernel, names: list[str]) -> list[str]:
    printed = [
        event.text
        async for event in kernel.execute(_ASK.format(names=names), allow_input=False)
        if isinstance(event, Stream) and event.name == "stdout"
    ]
    return [name for name in "".join(printed).split() if name in names]
