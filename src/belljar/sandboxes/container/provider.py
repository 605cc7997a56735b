"""The `container` provider: every command in a container of docker or podman, whichever answers; podman is asked first.

A container's first process is ours, `inside/container_init.py`: it starts the command with the environment and the
descriptors that it gets through a socket, and ends, the container with it, when the server closes that socket or dies.
So nothing outlives a server that was killed; the engine removes what ended (`--rm`). What an engine still leaves, after
a power cut for example, is removed when the next server makes its first sandbox: a container's name says which
process made it and when that process was started, its label to which pid namespace that number belongs.

System calls are filtered twice, by the engine's own list and by ours. `run_arguments.py` says what is visible inside,
`engines.py` what engines need. Each command has the session's limits for itself.
"""

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from belljar.errors import BelljarError, SandboxUnavailable
from belljar.files.host_folders import open_host_folder
from belljar.sandboxes.base import (
    WORKSPACE,
    HostCheck,
    HostFolder,
    Identity,
    Incident,
    Limits,
    Sandbox,
    SandboxProcess,
    SandboxSpec,
)
from belljar.sandboxes.container.engines import LABEL, ContainerEngine, find_engines
from belljar.sandboxes.container.process import ContainerProcess, StartOrder
from belljar.sandboxes.container.run_arguments import RunArguments
from belljar.sandboxes.defaults import SandboxBase, check_folders, may_keep_set_ids
from belljar.sandboxes.host_users import HostUsers, find_host_users, hand_over
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups
from belljar.sandboxes.limits.enforcement import Enforcement, Enforcer
from belljar.sandboxes.namespace.bwrap_args import open_content
from belljar.sandboxes.seccomp import load_filter

_TRIAL_TIMEOUT_S = 30
_INTERPRETER = os.path.realpath(sys.executable)
_TRIAL_LIMITS = Limits(memory_mb=256, cpus=1, processes=64, disk_mb=64, temporary_mb=16, open_files=256)
_BUILD = "{engine} build -t {image} . (in a checkout of belljar), or set container_image to an image that is there"
_WARNING_FOR_ROOT = (
    "The server runs as root, and sessions have no users of their own (too few users are mapped into this user "
    "namespace): their code is the host's uid 0, though without capabilities. Run the server as an ordinary user"
)
_WITHOUT = {
    "memory": "memory is limited per process only",
    "cpu": "CPU time is not limited, sessions are only placed on as many processors",
    "pids": "the number of processes is limited only where sessions have users of their own",
}


class ContainerSandbox(SandboxBase):
    """One session's containers, one for each command."""

    def __init__(
        self,
        engine: ContainerEngine,
        image: str,
        spec: SandboxSpec,
        enforcement: Enforcement,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec)
        self._engine = engine
        self._image = image
        self._enforcement = enforcement
        self._on_close = on_close
        self._processes: list[ContainerProcess] = []
        self._incidents: list[Incident] = []
        self._peak_mb = 0.0

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in a new container; return once the container's first process has it."""
        self._check_open()
        descriptors = {1: stdout, 2: stderr} | {number: number for number in pass_fds}
        program = load_filter(keeps_set_ids=self.spec.keeps_set_ids).program
        order = StartOrder(command, environment, WORKSPACE, descriptors, program, _numbers_of(self.spec.folders))
        order.check()
        name = f"{_prefix(os.getpid())}{secrets.token_hex(8)}"
        run_arguments = RunArguments(self._engine, self._image, self.spec, name, [f"{LABEL}={_numbers()}"])
        process = ContainerProcess(run_arguments, self._enforcement, on_end=self._on_end)
        # Before anything is awaited, because a spawn that is cancelled leaves a container to be ended.
        self._processes.append(process)
        await process.start(order)
        return process

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        found, self._incidents = self._incidents, []
        return found + [incident for process in self._processes for incident in process.incidents()]

    def memory_peak_mb(self) -> float:
        """Return the most memory that all processes together held since the last call; 0 where not measured."""
        peak, self._peak_mb = self._peak_mb, 0.0
        return max(peak, sum(process.memory_peak_mb() for process in self._processes))

    def _on_end(self, process: ContainerProcess) -> None:
        """Read what the container's group has counted, because the engine is about to remove it."""
        self._incidents += process.incidents()
        self._peak_mb = max(self._peak_mb, process.memory_peak_mb())

    async def kill(self, spare: Collection[int] = ()) -> None:
        """Kill every container; return when nothing is left in them. No process can be spared."""
        async with self._ending:
            while self._processes:
                process = self._processes[-1]
                await process.kill_all()
                self._processes.remove(process)

    async def aclose(self) -> None:
        """Kill everything and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()
        await self._enforcement.release()
        self._on_close()


def _numbers_of(folders: Sequence[HostFolder]) -> dict[str, tuple[int, int]]:
    """Return device and inode of each folder by its path inside; SandboxUnavailable for one that cannot be shown."""
    numbers: dict[str, tuple[int, int]] = {}
    for folder in folders:
        descriptor = open_host_folder(folder.path)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        numbers[folder.inside] = (status.st_dev, status.st_ino)
    return numbers


def sweep(engine: ContainerEngine) -> None:
    """Remove the containers of servers that are gone."""
    for name in engine.names(_numbers()):
        pid = name.split("-")[1] if name.startswith("belljar-") else ""
        if pid.isdecimal() and not name.startswith(_prefix(int(pid))):
            engine.remove(name)


def _prefix(pid: int) -> str:
    """Return the prefix of the names of a process's containers: its pid, and when it was started."""
    started = "gone"
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        started = text[text.rindex(")") + 2 :].split()[19]
    return f"belljar-{pid}-{started}-"


def _numbers() -> str:
    """Return which pid namespace our pids are of, because servers in containers share an engine and have the same."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)


@dataclass(frozen=True, slots=True)
class _EngineFinding:
    """The checks of this host, and the engine that makes containers here, if any."""

    checks: list[HostCheck]
    engine: ContainerEngine | None = None

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)


class ContainerProvider:
    """Makes sandboxes out of containers."""

    name = "container"
    isolates = True
    shows_folders = "mounted"

    def __init__(self, engine: str = "auto", image: str = "belljar:latest") -> None:
        self._choice = engine
        self._image = image
        # The engine makes the control groups; this enforcer only chooses processors.
        self._enforcer = Enforcer(ControlGroups("none"))
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def warning(self) -> str:
        """Say what is less protected here than it could be; found out once, then remembered."""
        if (engine := self._found.engine) is None:
            return ""
        gaps = [text for name, text in _WITHOUT.items() if name not in engine.controllers]
        limits = f"{engine.kind} cannot write control groups here: {'; '.join(gaps)}" if gaps else ""
        is_bare = os.geteuid() == 0 and self._identities is None
        return ". ".join(filter(None, (_WARNING_FOR_ROOT if is_bare else "", limits)))

    def check(self) -> list[HostCheck]:
        """Return whether an engine answers, has the image and starts a container of it; tried once, then remembered."""
        return self._found.checks

    def take_identity(self) -> Identity | None:
        """Return a user for one session of a server that root runs; None where sessions run as the server's user."""
        return self._identities.take() if self._identities else None

    def release_identity(self, identity: Identity) -> None:
        """Let another session have this user."""
        if self._identities:
            self._identities.release(identity)

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet. A spec without an identity gets one until the sandbox closes."""
        engine = (await asyncio.to_thread(lambda: self._found)).engine
        if engine is None:
            failed = next(check for check in self.check() if not check.is_ok)
            raise SandboxUnavailable(f"No container can be made: {failed.name}: {failed.detail}", hint=failed.hint)
        await self._swept(engine)
        return self._make(engine, spec)

    def _make(self, engine: ContainerEngine, spec: SandboxSpec) -> ContainerSandbox:
        check_folders(spec)
        if self._identities is None:
            return self._new_sandbox(engine, replace(spec, identity=None))
        if spec.identity is not None:
            hand_over(spec, spec.identity)
            return self._new_sandbox(engine, spec)
        identity = self._identities.take()
        release = partial(self._identities.release, identity)
        try:
            hand_over(spec, identity)
            return self._new_sandbox(engine, replace(spec, identity=identity), on_close=release)
        except BaseException:
            release()
            raise

    def _new_sandbox(
        self, engine: ContainerEngine, spec: SandboxSpec, on_close: Callable[[], None] = lambda: None
    ) -> ContainerSandbox:
        spec = replace(spec, keeps_set_ids=may_keep_set_ids(spec, spec.identity))
        return ContainerSandbox(
            engine, self._image, spec, self._enforcer.enforce(spec.session_id, spec.limits), on_close=on_close
        )

    async def _swept(self, engine: ContainerEngine) -> None:
        """Remove what servers that are gone have left, once."""
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(asyncio.to_thread(sweep, engine))
        await asyncio.shield(self._sweeping)

    @cached_property
    def _identities(self) -> HostUsers | None:
        return find_host_users() if os.geteuid() == 0 else None

    @cached_property
    def _found(self) -> _EngineFinding:
        """The first engine that works, otherwise what the first of them lacks."""
        if sys.platform != "linux":
            detail = f"Linux only, this is {sys.platform}: elsewhere containers are on a machine of their own"
            hint = "`--sandbox process` does not isolate: choose it knowingly"
            return _EngineFinding([HostCheck("engine", is_ok=False, detail=detail, hint=hint)])
        first: _EngineFinding | None = None
        for engine in find_engines(self._choice):
            finding = self._examine(engine)
            if finding.is_ok:
                return finding
            first = first or finding
        if first is not None:
            return first
        sought = "podman or docker" if self._choice == "auto" else self._choice
        return _EngineFinding(
            [HostCheck("engine", is_ok=False, detail=f"{sought} not found", hint=f"Install {sought}")]
        )

    def _examine(self, answer: ContainerEngine | tuple[str, str]) -> _EngineFinding:
        if not isinstance(answer, ContainerEngine):
            name, complaint = answer
            hint = f"`{name} info` must work for the user of the server: start its service, or let that user talk to it"
            return _EngineFinding(
                [HostCheck("engine", is_ok=False, detail=f"{name} does not answer: {complaint}", hint=hint)]
            )
        rootless = ", rootless" if answer.is_rootless else ""
        found = HostCheck("engine", is_ok=True, detail=f"{answer.kind} {answer.version}{rootless}, {answer.program}")
        if complaint := answer.complaint_about_image(self._image):
            hint = _BUILD.format(engine=answer.kind, image=self._image)
            return _EngineFinding(
                [found, HostCheck("image", is_ok=False, detail=f"{self._image}: {complaint}", hint=hint)]
            )
        image = HostCheck("image", is_ok=True, detail=self._image)
        complaints: list[str] = []
        for engine in (answer, *answer.fallbacks()):
            if not (complaint := self._complaint(engine)):
                return _EngineFinding([found, image, *_working(engine, self._identities)], engine)
            if complaint not in complaints:
                complaints.append(complaint)
        hint = f"`{answer.kind} run --rm --network none {self._image} true` shows what the engine lacks"
        return _EngineFinding(
            [found, image, HostCheck("container", is_ok=False, detail="; then ".join(complaints), hint=hint)]
        )

    def _complaint(self, engine: ContainerEngine) -> str:
        """Run something in a container like a session's; return what went wrong, or nothing."""
        # In a thread with its own loop, because the caller may be in one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._try(engine)).result()

    async def _try(self, engine: ContainerEngine) -> str:
        trees = [path for path in map(Path, (sys.prefix, sys.base_prefix)) if not path.is_relative_to("/usr")]
        with tempfile.TemporaryDirectory(prefix="belljar-") as folder, contextlib.ExitStack() as stack:
            nowhere = open_content(b"", stack)
            spec = SandboxSpec("trial", Path(folder), Path(folder), Path(folder), trees, _TRIAL_LIMITS)
            try:
                sandbox = self._make(engine, spec)
                try:
                    async with asyncio.timeout(_TRIAL_TIMEOUT_S):
                        process = await sandbox.spawn(
                            [_INTERPRETER, "-ISc", ""], environment={}, stdout=nowhere, stderr=nowhere
                        )
                        status = await process.wait()
                finally:
                    await sandbox.aclose()
            except TimeoutError:
                return f"a container did nothing for {_TRIAL_TIMEOUT_S} s"
            except BelljarError as error:
                return error.message
        return f"a command that does nothing ended with status {status}" if status else ""


def _working(engine: ContainerEngine, identities: HostUsers | None) -> list[HostCheck]:
    options = f" with {' '.join(engine.options)}" if engine.options else ""
    filtered = load_filter()
    detail = f"filtered by {engine.kind}'s own list and by ours"
    if filtered.complaint:
        detail = f"filtered by {engine.kind}'s own list only: {filtered.complaint}"
    users = "one of the host's for each session" if identities else "the server's"
    lacking = [text for name, text in _WITHOUT.items() if name not in engine.controllers]
    limits = "; ".join(lacking) or "control groups bound the memory, CPU and processes of a session"
    return [
        HostCheck("container", is_ok=True, detail=f"starts{options}"),
        HostCheck("system calls", is_ok=True, detail=detail),
        HostCheck("users", is_ok=True, detail=users),
        HostCheck("limits", is_ok=True, detail=limits),
    ]
