"""`belljar doctor`: report what this host can do, line by line, and what to do about the rest.

A check that is not passed fails if the configured settings need it, and warns if they do not. The checks of sandboxes
and environments are in their own packages; this module runs them and prints the results.
"""

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from belljar.cli.fork_check import check_forks
from belljar.environments import check_environments
from belljar.environments.managed import DEFAULT, folder, is_ready
from belljar.environments.package_index import check_index
from belljar.errors import BelljarError
from belljar.runtime import KEEP_ALIVE_HINT, configured_guardrails, keep_alive_gap
from belljar.sandboxes import providers
from belljar.sandboxes.base import HostCheck, Provider
from belljar.sandboxes.cgroup_discovery import CONTROLLERS, read_control_groups
from belljar.sandboxes.installed import ask_checks
from belljar.sandboxes.limits import DELEGATE
from belljar.settings import Settings, load_settings
from belljar.settings.azure import AZURE, missing_names, pool_endpoint
from belljar.settings.sandboxes import installed_sandboxes
from belljar.surfaces.tls import certificate_end, days_left, tls_context
from belljar.toolbox.server_config import load_servers

_OLDEST_NODE = 22
_SOON_DAYS = 21
# What a session's limit is replaced by where the controller cannot be used.
_WITHOUT_CONTROLLER = {
    "memory": "Each process is limited by itself instead",
    "cpu": "Sessions are placed on as many processors instead, which they can undo",
    "pids": "Processes are counted a user instead, where sessions have users of their own",
}


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One line of the report."""

    section: str
    status: Literal["ok", "warn", "fail"]
    name: str
    detail: str
    hint: str = ""


def command(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check what this host can do.

    Looks at the sandbox, cgroups, environments, an Azure pool, the toolbox's servers and the policy, and forks a
    session; exits with 1 if something that the settings need fails.
    """
    findings = list(examine(load_settings()))
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else report(findings))
    failed = sum(finding.status == "fail" for finding in findings)
    if failed:
        print(f"{failed} of {len(findings)} checks failed that these settings need", file=sys.stderr)
        raise typer.Exit(1)
    print("everything that these settings need is there", file=sys.stderr)


def examine(settings: Settings) -> Iterator[HostFinding]:
    """Yield every finding, section by section; an error in a section is a finding too."""
    sections: dict[str, Callable[[Settings], Iterator[HostFinding]]] = {
        "host": _check_host,
        "sandbox": _check_sandboxes,
        "cgroups": _check_control_groups,
        "environments": _check_environments,
        "azure": _check_azure,
        "forks": _check_forks,
        "toolbox": _check_toolbox,
        "guardrails": _check_guardrails,
        "tls": _check_tls,
        "node": _check_node,
    }
    for name, check in sections.items():
        try:
            yield from check(settings)
        except BelljarError as error:
            yield HostFinding(name, "fail", name, error.message, error.hint)


def report(findings: Sequence[HostFinding]) -> str:
    """Return the findings as text, with a heading for each section."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines.append(f"  {finding.status:<4}  {finding.name}: {_indented(finding.detail)}")
        if finding.hint:
            lines.append(f"        do: {_indented(finding.hint)}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n          ")


def _check_host(settings: Settings) -> Iterator[HostFinding]:
    yield HostFinding("host", "ok", "system", f"{_system_name()}, {platform.machine()}, {os.cpu_count()} CPUs")
    yield HostFinding("host", "ok", "kernel", platform.release())
    yield HostFinding("host", "ok", "python", f"{platform.python_version()} at {sys.executable}")
    yield _check_data_directory(settings.data_directory)


def _check_data_directory(folder: Path) -> HostFinding:
    nearest = next(path for path in (folder, *folder.parents) if _is_there(path))
    try:
        # Write a file rather than read permission bits, which allow root everything on a read-only file system, too.
        with tempfile.TemporaryFile(dir=nearest):
            return HostFinding("host", "ok", "data", f"{folder} can be written")
    except OSError as error:
        detail = f"{folder} cannot be written: {nearest}: {error.strerror}"
        return HostFinding("host", "fail", "data", detail, "Set data_directory to a folder of yours")


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


def _check_sandboxes(settings: Settings) -> Iterator[HostFinding]:
    known = providers(settings)
    yield from examine_providers(known, settings.sandbox)
    yield from _check_installed_sandboxes(settings.sandbox)
    yield _check_keep_alive(settings, known[settings.sandbox])


def _check_keep_alive(settings: Settings, provider: Provider) -> HostFinding:
    gap = keep_alive_gap(provider)
    if not settings.keep_alive:
        return HostFinding("sandbox", "ok", "keep_alive", f"off; it cannot be used here: {gap}" if gap else "off")
    if gap:
        return HostFinding("sandbox", "fail", "keep_alive", f"it cannot be used: {gap}", KEEP_ALIVE_HINT)
    return HostFinding("sandbox", "ok", "keep_alive", f"sessions wait {settings.keep_alive_s:g} s for the next server")


def examine_providers(known: Mapping[str, Provider], configured: str) -> Iterator[HostFinding]:
    """Yield what each provider reports about this host, beginning with the configured one."""
    warning = known[configured].warning
    detail = f"{configured}. {warning}" if warning else configured
    yield HostFinding("sandbox", "warn" if warning else "ok", "configured", detail)
    for name in sorted(known, key=lambda name: name != configured):
        for check in ask_checks(known[name]):
            yield _finding("sandbox", f"{name}, {check.name}", check, is_needed=name == configured)


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


def _finding(section: str, name: str, check: HostCheck, *, is_needed: bool) -> HostFinding:
    status = "ok" if check.is_ok else "fail" if is_needed else "warn"
    return HostFinding(section, status, name, check.detail, check.hint)


def _check_control_groups(settings: Settings) -> Iterator[HostFinding]:
    groups = read_control_groups()
    hint = "" if groups.kind != "none" else "Mount a cgroup hierarchy if sessions shall have memory and CPU limits"
    yield HostFinding("cgroups", "warn" if hint else "ok", "hierarchy", groups.kind, hint)
    for controller in CONTROLLERS if not hint else ():
        folder = groups.folders.get(controller)
        if groups.is_writable(controller):
            yield HostFinding("cgroups", "ok", controller, f"limits can be set below {folder}")
        else:
            reason = f"{folder} is read-only for us" if folder else "no such controller for us"
            detail = f"a session's limit cannot be set: {reason}. {_WITHOUT_CONTROLLER[controller]}"
            yield HostFinding("cgroups", "warn", controller, detail, DELEGATE)


def _check_environments(settings: Settings) -> Iterator[HostFinding]:
    for check in check_environments(settings):
        yield _finding("environments", check.name, check, is_needed=True)
    yield _check_index(settings)


def _check_index(settings: Settings) -> HostFinding:
    """Try the package index, which the settings need only while their environment is not made."""
    is_default = settings.environment == DEFAULT.name
    check = asyncio.run(check_index())
    return _finding("environments", check.name, check, is_needed=is_default and not is_ready(folder(settings)))


def _check_azure(settings: Settings) -> Iterator[HostFinding]:
    """Yield whether the session pool can be used, where one is configured or sessions are to live in one."""
    is_needed = settings.environment == AZURE
    if missing := missing_names(settings):
        detail = f"named only in part: {', '.join(missing)} not set"
        hint = "Set all four variables, or none"
        yield HostFinding("azure", "fail" if is_needed else "warn", "pool", detail, hint)
        return
    if not pool_endpoint(settings):
        if is_needed:
            yield HostFinding(
                "azure", "fail", "pool", "none is configured", "Set azure_endpoint, or the four variables"
            )
        return
    # Its HTTP client takes a while to import, which only those who use a pool should pay.
    from belljar.kernels.azure.checks import check_pool

    for check in asyncio.run(check_pool(settings)):
        yield _finding("azure", check.name, check, is_needed=is_needed)


def _check_forks(settings: Settings) -> Iterator[HostFinding]:
    for check in check_forks(settings, providers(settings)[settings.sandbox]):
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


def _check_node(settings: Settings) -> Iterator[HostFinding]:
    hint = f"Optional: Node {_OLDEST_NODE} or newer runs the MCP Inspector against belljar"
    node = shutil.which("node")
    if node is None:
        yield HostFinding("node", "warn", "node", "not on the PATH", hint)
        return
    try:
        answer = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield HostFinding("node", "warn", "node", f"{node} does not run: {error}", hint)
        return
    version = answer.stdout.strip()
    major = version.removeprefix("v").partition(".")[0]
    is_recent = major.isdecimal() and int(major) >= _OLDEST_NODE
    yield HostFinding("node", "ok" if is_recent else "warn", "node", f"{version} at {node}", "" if is_recent else hint)
