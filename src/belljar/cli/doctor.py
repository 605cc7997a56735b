"""`belljar doctor`: what this host can do, line by line, and what to do about the rest.

A line fails when the configured settings need it, and warns when they do not. What is checked about a sandbox or an
environment is known there; here it is asked and shown.
"""

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
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from belljar.errors import BelljarError

if TYPE_CHECKING:
    from belljar.sandboxes.base import Check, Provider
    from belljar.settings import Settings

OLDEST_NODE = 22
_WITHOUT = {
    "memory": "Each process is limited by itself instead",
    "cpu": "Sessions are placed on as many processors instead, which they can undo",
    "pids": "Processes are counted a user instead, where sessions have users of their own",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    section: str
    status: Literal["ok", "warn", "fail"]
    name: str
    detail: str
    hint: str = ""


def command(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check what this host can do.

    Looks at the sandbox, cgroups, environments, the toolbox's servers and the policy, and forks a session; exits with 1
    if something that the settings need fails.
    """
    from belljar.settings import load_settings

    findings = list(examine(load_settings()))
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else report(findings))
    failed = sum(finding.status == "fail" for finding in findings)
    if failed:
        print(f"{failed} of {len(findings)} checks failed that these settings need", file=sys.stderr)
        raise typer.Exit(1)
    print("everything that these settings need is there", file=sys.stderr)


def examine(settings: "Settings") -> Iterator[Finding]:
    """Every finding, section by section; a section that breaks is a finding too."""
    sections: dict[str, Callable[[Settings], Iterator[Finding]]] = {
        "host": _host,
        "sandbox": _sandboxes,
        "cgroups": _control_groups,
        "environments": _environments,
        "forks": _forks,
        "toolbox": _toolbox,
        "guardrails": _guardrails,
        "node": _node,
    }
    for name, check in sections.items():
        try:
            yield from check(settings)
        except BelljarError as error:
            yield Finding(name, "fail", name, error.message, error.hint)


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, a heading a section."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines.append(f"  {finding.status:<4}  {finding.name}: {_inside(finding.detail)}")
        if finding.hint:
            lines.append(f"        do: {_inside(finding.hint)}")
    return "\n".join(lines)


def _inside(text: str) -> str:
    return text.replace("\n", "\n          ")


def _host(settings: "Settings") -> Iterator[Finding]:
    yield Finding("host", "ok", "system", f"{_system_name()}, {platform.machine()}, {os.cpu_count()} CPUs")
    yield Finding("host", "ok", "kernel", platform.release())
    yield Finding("host", "ok", "python", f"{platform.python_version()} at {sys.executable}")
    yield _data_directory(settings.data_directory)


def _data_directory(folder: Path) -> Finding:
    nearest = next(path for path in (folder, *folder.parents) if _is_there(path))
    try:
        # Permission bits would say yes to root on file systems that say no.
        with tempfile.TemporaryFile(dir=nearest):
            return Finding("host", "ok", "data", f"{folder} can be written")
    except OSError as error:
        detail = f"{folder} cannot be written: {nearest}: {error.strerror}"
        return Finding("host", "fail", "data", detail, "Set data_directory to a folder of yours")


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


def _sandboxes(settings: "Settings") -> Iterator[Finding]:
    from belljar.sandboxes import providers

    known = providers(settings)
    yield from examine_providers(known, settings.sandbox)
    yield from _installed_sandboxes(settings.sandbox)
    yield _keep_alive(settings, known[settings.sandbox])


def _keep_alive(settings: "Settings", provider: "Provider") -> Finding:
    from belljar.runtime import KEEPING_HINT, keeping_gap

    gap = keeping_gap(provider)
    if not settings.keep_alive:
        return Finding("sandbox", "ok", "keep_alive", f"off; it cannot be used here: {gap}" if gap else "off")
    if gap:
        return Finding("sandbox", "fail", "keep_alive", f"it cannot be used: {gap}", KEEPING_HINT)
    return Finding("sandbox", "ok", "keep_alive", f"sessions wait {settings.keep_alive_s:g} s for the next server")


def examine_providers(providers: "Mapping[str, Provider]", configured: str) -> Iterator[Finding]:
    """What each provider says of this host, the configured one first: it is the one that matters."""
    from belljar.sandboxes.installed import ask_checks

    warning = providers[configured].warning
    detail = f"{configured}. {warning}" if warning else configured
    yield Finding("sandbox", "warn" if warning else "ok", "configured", detail)
    for name in sorted(providers, key=lambda name: name != configured):
        for check in ask_checks(providers[name]):
            yield _finding("sandbox", f"{name}, {check.name}", check, is_needed=name == configured)


def _installed_sandboxes(configured: str) -> Iterator[Finding]:
    """Which packages bring a provider. Only the configured one has been imported: the others are just named."""
    from belljar.settings.sandboxes import installed_sandboxes

    for one in installed_sandboxes():
        if one.is_shadowed:
            detail = f"the package {one.package} brings one of this name; it is ignored, because belljar has its own"
            yield Finding("sandbox", "warn", one.name, detail, f"Remove {one.package.partition(' ')[0]}")
        elif one.name == configured:
            yield Finding("sandbox", "ok", one.name, f"brought by the package {one.package}")
        else:
            detail = f"brought by the package {one.package}; not checked, because it is not configured"
            yield Finding("sandbox", "ok", one.name, detail)


def _finding(section: str, name: str, check: "Check", *, is_needed: bool) -> Finding:
    status = "ok" if check.is_ok else "fail" if is_needed else "warn"
    return Finding(section, status, name, check.detail, check.hint)


def _control_groups(settings: "Settings") -> Iterator[Finding]:
    from belljar.sandboxes.hierarchy import CONTROLLERS, read_control_groups
    from belljar.sandboxes.limits import DELEGATE

    groups = read_control_groups()
    hint = "" if groups.kind != "none" else "Mount a cgroup hierarchy if sessions shall have memory and CPU limits"
    yield Finding("cgroups", "warn" if hint else "ok", "hierarchy", groups.kind, hint)
    for controller in CONTROLLERS if not hint else ():
        folder = groups.folders.get(controller)
        if groups.is_writable(controller):
            yield Finding("cgroups", "ok", controller, f"limits can be set below {folder}")
        else:
            reason = f"{folder} is read-only for us" if folder else "no such controller for us"
            detail = f"a session's limit cannot be set: {reason}. {_WITHOUT[controller]}"
            yield Finding("cgroups", "warn", controller, detail, DELEGATE)


def _environments(settings: "Settings") -> Iterator[Finding]:
    from belljar.environments import check_environments

    for check in check_environments(settings):
        yield _finding("environments", check.name, check, is_needed=True)


def _forks(settings: "Settings") -> Iterator[Finding]:
    from belljar.cli.fork_check import check_forks
    from belljar.sandboxes import providers

    for check in check_forks(settings, providers(settings)[settings.sandbox]):
        yield _finding("forks", check.name, check, is_needed=False)


def _toolbox(settings: "Settings") -> Iterator[Finding]:
    from belljar.toolbox.config import load_servers

    names = ", ".join(load_servers(settings))
    if names:
        yield Finding("toolbox", "ok", "servers", f"{names}; `belljar toolbox list` connects to them")


def _guardrails(settings: "Settings") -> Iterator[Finding]:
    from belljar.runtime import configured_guardrails

    configured_guardrails(settings)
    if settings.policy:
        yield Finding("guardrails", "ok", "policy", f"{settings.policy} is in order")


def _node(settings: "Settings") -> Iterator[Finding]:
    hint = f"Optional: Node {OLDEST_NODE} or newer runs the MCP Inspector against belljar"
    node = shutil.which("node")
    if node is None:
        yield Finding("node", "warn", "node", "not on the PATH", hint)
        return
    try:
        answer = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("node", "warn", "node", f"{node} does not run: {error}", hint)
        return
    version = answer.stdout.strip()
    major = version.removeprefix("v").partition(".")[0]
    is_recent = major.isdecimal() and int(major) >= OLDEST_NODE
    yield Finding("node", "ok" if is_recent else "warn", "node", f"{version} at {node}", "" if is_recent else hint)
