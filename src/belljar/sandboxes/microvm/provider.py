"""The `microvm` provider: a virtual machine for every command, by microsandbox (`pip install 'belljar[microvm]'`).

The machine has a kernel of its own, the host's system trees read-only, and no network. Streams and descriptors cross as
`threshold.py` and `crossing.py` say. Sockets in the scratch folder do not: code in a machine can neither install
packages nor be given egress.

Written on a host that boots no machine, so it trusts nothing: `check` fails unless a machine really boots here, runs a
command through the whole of this file, and tells its status and what it wrote.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import json
import math
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import WORKSPACE, Check, Identity, Incident, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.microvm import threshold as threshold
from belljar.sandboxes.microvm.crossing import Crossing
from belljar.sandboxes.namespace.bubblewrap import HOME, SCRATCH, check_folders

_PACKAGE = "microsandbox"
_INSTALL = "pip install 'belljar[microvm]'"
_FIRST_PORT = 5_000
_DEFAULT_MEMORY_MB = 1_024
_TRIAL_PATIENCE_S = 60.0
_THRESHOLD = "/run/threshold.py"
_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ssl/certs", "/etc/alternatives")
_MADE = ("/proc", "/sys", "/dev", "/tmp", "/run", "/etc", "/var", "/root", HOME, SCRATCH, WORKSPACE)  # noqa: S108
_FILES = {
    "/etc/passwd": "root:x:0:0:belljar:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost belljar\n",
    "/etc/ld.so.cache": "",
}


class MicroVMProvider:
    """Makes virtual machines."""

    name = "microvm"
    isolates = True
    warning = ""

    def check(self) -> list[Check]:
        """What keeps a machine from booting here, as far as it can be told at once; then one is booted, once."""
        if obstacle := find_obstacle():
            return [obstacle]
        found = Check("microsandbox", is_ok=True, detail="installed; the host has KVM")
        if complaint := self._trial:
            hint = "`msb doctor` examines the host; `--sandbox gvisor` needs no KVM"
            return [found, Check("microvm", is_ok=False, detail=complaint, hint=hint)]
        works = Check("microvm", is_ok=True, detail="a machine booted, ran a command and told its status")
        return [found, works, Check("packages", is_ok=True, detail="sessions have no egress and install no packages")]

    def take_identity(self) -> Identity | None:
        """None: on the host a machine is the server's own process."""
        return None

    def release_identity(self, identity: Identity) -> None:
        """Nothing to give back."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; no machine boots yet."""
        check_folders(spec)
        return MicroVMSandbox(spec)

    @cached_property
    def _trial(self) -> str:
        """What went wrong with a machine like a session's; nothing, at best."""
        complaints: list[str] = []
        # A thread, for a loop of its own: the server's may be running in this one.
        thread = threading.Thread(target=lambda: complaints.append(asyncio.run(_try_machine())))
        thread.start()
        thread.join()
        return complaints[0] if complaints else "the trial broke off"


class MicroVMSandbox:
    """One session's machines, one a command."""

    workspace = WORKSPACE
    scratch = SCRATCH
    home = HOME
    temporary = "/tmp"  # noqa: S108 - a path inside
    can_spare = False
    ends_with_command = True

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._processes: list[MicroVMProcess] = []
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
        """Boot a machine and start a command in it."""
        if self._is_closed:
            raise SandboxUnavailable(f"Sandbox of session {self._spec.session_id} is closed")
        given = {1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        process = MicroVMProcess(self._spec, given)
        self._processes.append(process)
        try:
            await process.start(command, environment)
        except BaseException:
            await self.kill()
            raise
        return process

    def incidents(self) -> list[Incident]:
        """None: what runs out of memory inside is the machine's own affair."""
        return []

    def memory_peak_mb(self) -> float:
        """Not measured."""
        return 0.0

    async def kill(self, spare: Collection[int] = ()) -> None:
        """End the machines. Nobody is spared."""
        async with self._ending:
            while self._processes:
                await self._processes[-1].end()
                self._processes.pop()

    async def aclose(self) -> None:
        """Kill, and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()


class MicroVMProcess:
    """One machine and its one command."""

    pid = 0
    """The host has no process of that number that is the command."""

    def __init__(self, spec: SandboxSpec, given: Mapping[int, int]) -> None:
        self._spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="belljar-"))
        ports = enumerate(given.items(), _FIRST_PORT)
        self._crossings = {
            port: (number, Crossing(self._folder / str(port), descriptor)) for port, (number, descriptor) in ports
        }
        self._machine: Any = None
        self._command: Any = None
        self._waiting: asyncio.Task[int] | None = None
        self._signals: set[asyncio.Task[None]] = set()

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Boot, and hand the command over."""
        make_root(self._folder / "root", self._spec.readable)
        microsandbox = importlib.import_module(_PACKAGE)
        limits = self._spec.limits
        try:
            self._machine = await microsandbox.Sandbox.create(
                f"belljar-{secrets.token_hex(8)}",
                image=microsandbox.Image.bind(str(self._folder / "root")),
                memory=limits.memory_mb or _DEFAULT_MEMORY_MB,
                cpus=math.ceil(limits.cpus) or 1,
                hostname="belljar",
                network=microsandbox.Network.none(),
                volumes=self._volumes(microsandbox.Volume),
                vsock=[
                    microsandbox.VsockRoute.stream(str(crossing.path), port)
                    for port, (_, crossing) in self._crossings.items()
                ],
                ephemeral=True,
            )
            order = {
                "command": list(command),
                "environment": dict(environment),
                "folder": WORKSPACE,
                "descriptors": {number: f"vsock:{port}" for port, (number, _) in self._crossings.items()},
            }
            arguments = ["-I", "-S", _THRESHOLD, json.dumps(order)]
            self._command = await self._machine.exec_stream(interpreter_for(command), arguments)
        except microsandbox.MicrosandboxError as error:
            raise SandboxUnavailable(f"The virtual machine did not start: {error}") from error
        self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def _volumes(self, volume: Any) -> dict[str, Any]:
        trees = [*(path for path in _SHOWN if Path(path).is_dir() and not Path(path).is_symlink())]
        trees += [str(path) for path in self._spec.readable if not any(path.is_relative_to(tree) for tree in trees)]
        return {
            **{path: volume.bind(path, readonly=True, nosuid=True, nodev=True) for path in trees},
            WORKSPACE: volume.bind(str(self._spec.workspace.resolve()), nosuid=True, nodev=True),
            SCRATCH: volume.bind(str(self._spec.scratch.resolve()), nosuid=True, nodev=True),
        }

    async def wait(self) -> int:
        """Exit status when it ends; negative for a signal."""
        if self._waiting is None:
            return -signal.SIGKILL
        return await asyncio.shield(self._waiting)

    async def _wait(self) -> int:
        microsandbox = importlib.import_module(_PACKAGE)
        try:
            status, _ = await self._command.wait()
        except microsandbox.MicrosandboxError:  # the machine is gone
            return -signal.SIGKILL
        return 128 - status if status - 128 in signal.valid_signals() else status

    def interrupt(self) -> None:
        """Send SIGINT to the command, by the machine's own agent."""
        if self._command is not None:
            task = asyncio.get_running_loop().create_task(self._command.signal(int(signal.SIGINT)))
            self._signals.add(task)
            task.add_done_callback(self._signals.discard)

    async def end(self) -> None:
        """Kill the machine and forget it; may be called twice."""
        if self._machine is not None:
            machine, self._machine = self._machine, None
            microsandbox = importlib.import_module(_PACKAGE)
            with contextlib.suppress(microsandbox.MicrosandboxError):
                await machine.kill()
        for _, crossing in self._crossings.values():
            await asyncio.to_thread(crossing.close)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def find_obstacle(proc: Path = Path("/proc"), device: Path = Path("/dev/kvm")) -> Check | None:
    """The first thing that is sure to keep a machine from booting, in the order in which it can be mended."""
    if sys.platform != "linux":
        hint = "`--sandbox process` does not isolate: choose it knowingly"
        return Check("microvm", is_ok=False, detail=f"Linux only, this is {sys.platform}", hint=hint)
    if importlib.util.find_spec(_PACKAGE) is None:
        return Check("microsandbox", is_ok=False, detail="not installed", hint=_INSTALL)
    if platform.machine() == "x86_64" and not _has_virtualization(proc / "cpuinfo"):
        detail = "the processor offers no virtualization: no vmx (Intel) or svm (AMD) flag in /proc/cpuinfo"
        hint = "enable it in the firmware, or, in a virtual machine, nested virtualization on its host"
        if device.exists():
            detail += f"; {device} is there, but is a paravirtual one that boots no ordinary kernel"
        return Check("processor", is_ok=False, detail=detail, hint=hint)
    if not device.exists():
        return Check("kvm", is_ok=False, detail=f"{device} is missing", hint="modprobe kvm_intel, or kvm_amd")
    if not os.access(device, os.R_OK | os.W_OK):
        hint = "add the server's user to the group kvm: usermod -aG kvm USER"
        return Check("kvm", is_ok=False, detail=f"{device} is closed to this user", hint=hint)
    return None


def _has_virtualization(cpuinfo: Path) -> bool:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "vmx" in flags or "svm" in flags


def make_root(root: Path, readable: Sequence[Path]) -> None:
    """The machine's first file system: places for what is shown in it, and the few files that are its own."""
    for path in (*_MADE, *map(str, readable)):
        _inside(root, path).mkdir(parents=True, exist_ok=True)
    for path in map(Path, _SHOWN):
        if path.is_symlink() and path.parent == Path("/"):
            _inside(root, str(path)).symlink_to(path.readlink())
        elif path.is_dir():
            _inside(root, str(path)).mkdir(parents=True, exist_ok=True)
    for path, content in _FILES.items():
        host = Path(path)
        is_copied = not content and os.access(host, os.R_OK)
        _inside(root, path).write_bytes(host.read_bytes() if is_copied else content.encode())
    shutil.copyfile(threshold.__file__, _inside(root, _THRESHOLD))


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def interpreter_for(command: Sequence[str] = ()) -> str:
    """A Python that the machine shows: the command's own, or the system's."""
    if command and Path(command[0]).name.startswith("python"):
        return command[0]
    return shutil.which("python3", path="/usr/bin:/bin") or "/usr/bin/python3"


async def _try_machine() -> str:
    """Boot a machine, pass it a descriptor, and compare what comes back."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder, os.fdopen(reading, "rb") as heard:
        spec = SandboxSpec("trial", workspace=Path(folder), scratch=Path(folder), home=Path(folder))
        sandbox = MicroVMSandbox(spec)
        try:
            async with asyncio.timeout(_TRIAL_PATIENCE_S):
                code = f"import os, sys; os.write({writing}, b'crossed'); sys.exit(3)"
                process = await sandbox.spawn(
                    [interpreter_for(), "-ISc", code],
                    environment={},
                    stdout=writing,
                    stderr=writing,
                    pass_fds=[writing],
                )
                status = await process.wait()
        except TimeoutError:
            return f"a machine did not end within {_TRIAL_PATIENCE_S:g} s"
        except (SandboxUnavailable, OSError) as error:
            return str(error)
        finally:
            os.close(writing)
            await sandbox.aclose()
        said = heard.read()
    if (status, said) == (3, b"crossed"):
        return ""
    return f"a command that should have ended with 3 ended with {status}, and wrote {said[:200]!r}"
