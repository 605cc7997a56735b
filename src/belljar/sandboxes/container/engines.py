"""The container engines of this host, docker and podman: which are installed, what they report, and what they need.

Runs their programs and waits for the answer; knows nothing of sessions, and makes no container. It can be imported on a
Mac and on Windows, where these engines start the server itself.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from belljar.sandboxes.base import Identity
from belljar.sandboxes.child import ProgramSilent, run_program
from belljar.sandboxes.limits.table import CONTROLLERS

LABEL = "belljar.pids"
"""On every container of ours: the pid namespace to which the process number in its name belongs."""

_NAMES = ("podman", "docker")
_TIMEOUT_S = 15
# Above this podman 4.3 may refuse, because it has lowered its own limit first.
_MAX_PROCESSES = 32_768


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """An engine that answered, and how it must be called."""

    kind: Literal["podman", "docker"]
    program: str
    version: str
    is_rootless: bool
    """Whether its containers are in the user namespace of an ordinary user."""
    controllers: frozenset[str]
    """What it can limit, by the keys of `CONTROLLERS`."""
    options: tuple[str, ...] = ()
    """Put before every command."""
    limits_processes: bool = False
    """Whether it must be given an RLIMIT_NPROC, because it would choose one that it may not set."""
    maps_users: bool = True
    """Whether an ordinary user can be the same user inside; otherwise that user is root inside."""

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of the engine."""
        return [self.program, *self.options, *arguments]

    def users(self, identity: Identity | None) -> tuple[list[str], Identity]:
        """Return the options that run a container as that user, or as the server's, and who that is inside."""
        ours = identity or Identity(os.geteuid(), os.getegid())
        if not self.is_rootless:
            # A daemon may be set to map users, and then the session's user would not be the owner of its folders.
            return ["--userns", "host", "--user", f"{ours.uid}:{ours.gid}"], ours
        if self.kind == "podman" and self.maps_users:
            return ["--userns", "keep-id", "--user", f"{ours.uid}:{ours.gid}"], ours
        return ["--user", "0:0"], Identity(0, 0)

    def ulimits(self) -> list[str]:
        """Return limits no higher than the server's own, because an engine without CAP_SYS_RESOURCE cannot set more."""
        import resource  # which Windows lacks

        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = [] if files == resource.RLIM_INFINITY else ["--ulimit", f"nofile={files}:{files}"]
        if self.limits_processes:
            _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
            most = _MAX_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _MAX_PROCESSES)
            options += ["--ulimit", f"nproc={most}:{most}"]
        return options

    def fallbacks(self) -> Iterator["ContainerEngine"]:
        """Yield other ways to call it, to be tried in turn where containers do not start."""
        limited = replace(self, limits_processes=True)
        yield limited
        if self.kind == "podman":
            # crun refuses hosts with both kinds of control groups; without systemd there is nobody to make groups.
            runtimes = [("--runtime", name) for name in ("runc", "crun") if shutil.which(name, path=_search_path())]
            for runtime in runtimes:
                yield replace(limited, options=runtime)
                yield replace(limited, options=("--cgroup-manager", "cgroupfs", *runtime))
            if self.is_rootless:
                yield replace(limited, maps_users=False)

    def complaint_about_image(self, image: str) -> str:
        """Return why no container can be made from that image; empty when one can."""
        try:
            answer = ask(self.command("image", "inspect", "--format", "{{json .Config}}", image))
        except EngineSilent as silence:
            return str(silence)
        return _complaint_about(answer) if self.kind == "docker" else ""

    def names(self, numbers: str) -> list[str]:
        """Return the containers of any belljar server that were named with these process numbers."""
        listing = ["ps", "--all", "--filter", f"label={LABEL}={numbers}", "--format", "{{.Names}}"]
        try:
            return ask(self.command(*listing)).split()
        except EngineSilent:
            return []

    def remove(self, name: str) -> None:
        """Kill and remove a container with everything in it, if there is one of that name."""
        try:
            ask(self.command("rm", "--force", name))
        except EngineSilent:
            return


class EngineSilent(Exception):
    """Raised when an engine fails or does not answer; the message is the end of its output."""


def find_engines(choice: str, *, first: str = "podman") -> Iterator[ContainerEngine | tuple[str, str]]:
    """Yield the engines that answer, the `first` one first; for one that does not, its name and why."""
    for name in sorted(_NAMES, key=lambda name: name != first) if choice == "auto" else (choice,):
        program = shutil.which(name, path=_search_path())
        if program is None:
            continue
        try:
            yield _read_engine(program, ask([program, "info", "--format", "{{json .}}"]))
        except EngineSilent as silence:
            yield name, str(silence)


def ask(command: Sequence[str]) -> str:
    """Return what an engine's program prints."""
    try:
        answer = run_program(command, timeout_s=_TIMEOUT_S)
    except ProgramSilent as silence:
        raise EngineSilent(str(silence)) from None
    if answer.status != 0:
        raise EngineSilent(error_line(answer.errors) or f"status {answer.status}")
    return answer.output


def error_line(text: str) -> str:
    """Return an engine's complaint, without the lines that lead up to it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # docker's last line says where its help is.
    said = [line for line in lines if not line.startswith(("See '", "Run '"))]
    return said[-1][-500:] if said else ""


def _read_engine(program: str, text: str) -> ContainerEngine:
    try:
        facts: dict[str, Any] = json.loads(text)
        return _podman(program, facts) if "host" in facts else _docker(program, facts)
    except (ValueError, KeyError, TypeError) as error:
        raise EngineSilent(f"answered what cannot be read: {error}") from None


def _podman(program: str, facts: Mapping[str, Any]) -> ContainerEngine:
    host = facts["host"]
    is_rootless = bool(host["security"]["rootless"])
    # An ordinary user may not write the v1 hierarchy: podman accepts limits there, and does not set them.
    is_powerless = is_rootless and host.get("cgroupVersion") == "v1"
    named: list[str] = host.get("cgroupControllers") or []
    known = frozenset(name for name in CONTROLLERS if name in named and not is_powerless)
    return ContainerEngine("podman", program, str(facts["version"]["Version"]), is_rootless, known)


def _docker(program: str, facts: Mapping[str, Any]) -> ContainerEngine:
    if not facts.get("ServerVersion"):
        raise EngineSilent("; ".join(facts.get("ServerErrors") or ["the daemon does not answer"]))
    security: list[str] = facts.get("SecurityOptions") or []
    is_rootless = any("rootless" in option for option in security)
    known = frozenset(name for name, limit in CONTROLLERS.items() if facts.get(limit.docker_info))
    return ContainerEngine("docker", program, str(facts["ServerVersion"]), is_rootless, known)


def _complaint_about(config: str) -> str:
    facts: dict[str, Any] = json.loads(config) or {}
    volumes: dict[str, Any] = facts.get("Volumes") or {}
    return f"it declares volumes, which have no limit: {', '.join(volumes)}" if volumes else ""


def _search_path() -> str:
    # Debian installs runc where only root's PATH looks.
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
