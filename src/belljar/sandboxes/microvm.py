"""The `microvm` provider: a virtual machine for every command, by microsandbox (the extra `microvm`).

The machine has a kernel of its own, the host's system trees read-only, and no network. A command's streams and
descriptors reach the host over virtual sockets: `inside/guest_init.py` connects them inside, and one `DescriptorBridge`
each carries their bytes outside. UNIX sockets in the scratch folder do not work across the two kernels, so a session in
a machine has no egress and installs no packages.

Whether a host boots machines is known only when one has booted, so `check` boots one, runs a command through this whole
file, and compares the status and the output.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from belljar.distribution import install_extra
from belljar.errors import SandboxUnavailable
from belljar.inside import guest_init
from belljar.sandboxes.base import WORKSPACE, HostCheck, Incident, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.defaults import HOME, SCRATCH, SandboxBase, WithoutHostUsers, check_folders

_PACKAGE = "microsandbox"
_SERVER = "MSB_SERVER_URL"
_FIRST_PORT = 5_000
_DEFAULT_MEMORY_MB = 1_024
_KILL_TIMEOUT_S = 30.0
_CHUNK_BYTES = 65_536
_GUEST_INIT = "/run/guest_init.py"
_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ssl/certs", "/etc/alternatives")
_MADE = ("/proc", "/sys", "/dev", "/tmp", "/run", "/etc", "/var", "/root", HOME, SCRATCH, WORKSPACE)  # noqa: S108
_FILES = {
    "/etc/passwd": "root:x:0:0:belljar:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost belljar\n",
}


class MicroVMProvider(WithoutHostUsers):
    """Makes virtual machines."""

    name = "microvm"
    isolates = True
    warning = ""

    def __init__(self, start_timeout_s: float = 60) -> None:
        self._start_timeout_s = start_timeout_s
        """How long the machine of the trial may take from its boot to its end."""

    def check(self) -> list[HostCheck]:
        """Return what keeps a machine from booting here, if that can be told at once; else boot one, once."""
        if obstacle := find_obstacle():
            return [*_check_server(), obstacle]
        found = HostCheck("microsandbox", is_ok=True, detail="installed; the host has KVM")
        found_all = [found, *_check_server()]
        if complaint := self._complaint:
            hint = "`msb doctor` examines the host; `--sandbox gvisor` needs no KVM"
            return [*found_all, HostCheck("microvm", is_ok=False, detail=complaint, hint=hint)]
        works = HostCheck("microvm", is_ok=True, detail="a machine booted, ran a command and told its status")
        return [
            *found_all,
            works,
            HostCheck("packages", is_ok=True, detail="sessions have no egress and install no packages"),
        ]

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; boot no machine yet."""
        check_folders(spec)
        return MicroVMSandbox(spec)

    @cached_property
    def _complaint(self) -> str:
        """What went wrong when a machine like a session's was booted; empty if nothing did."""
        # In a thread, because the current one may be running the server's event loop.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(_try_machine(self._start_timeout_s))).result()


def _check_server() -> list[HostCheck]:
    """Return what to do instead for those who set the server of microsandbox's earlier versions."""
    if not os.environ.get(_SERVER):
        return []
    detail = f"{_SERVER} is set and not used: machines boot on this host, without a server"
    hint = f"Unset {_SERVER}; for machines on another host, run belljar there: `belljar serve --http HOST:PORT`"
    return [HostCheck("server", is_ok=True, detail=detail, hint=hint)]


class MicroVMSandbox(SandboxBase):
    """One session's machines, one for each command."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._processes: list[MicroVMProcess] = []

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
        self._check_open()
        process = MicroVMProcess(self.spec, {1: stdout, 2: stderr, **{number: number for number in pass_fds}})
        self._processes.append(process)
        try:
            await process.start(command, environment)
        except BaseException:
            await self.kill()
            raise
        return process

    def incidents(self) -> list[Incident]:
        """Return none, because the machine's kernel deals with lack of memory and reports it to nobody outside."""
        return []

    def memory_peak_mb(self) -> float:
        """Return 0, because it is not measured."""
        return 0.0

    async def kill(self, spare: Collection[int] = ()) -> None:
        """Kill the machines. No process can be spared."""
        async with self._ending:
            while self._processes:
                await self._processes[-1].kill_all()
                self._processes.pop()

    async def aclose(self) -> None:
        """Kill the machines and let no more start; may be called twice."""
        self._is_closed = True
        await self.kill()


class MicroVMProcess:
    """One machine and its one command."""

    pid = 0

    def __init__(self, spec: SandboxSpec, given: Mapping[int, int]) -> None:
        self._microsandbox: Any = importlib.import_module(_PACKAGE)
        self._spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="belljar-"))
        self._numbers = dict(enumerate(given, _FIRST_PORT))
        self._bridges = {
            port: DescriptorBridge(self._folder / str(port), given[number]) for port, number in self._numbers.items()
        }
        self._name = f"belljar-{secrets.token_hex(8)}"
        self._machine: Any = None
        self._command: Any = None
        self._waiting: asyncio.Task[int] | None = None
        self._signals: set[asyncio.Task[None]] = set()

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Boot the machine and run the command in it."""
        make_root(self._folder / "root", self._spec.readable)
        package, limits = self._microsandbox, self._spec.limits
        order = {
            "command": list(command),
            "environment": dict(environment),
            "folder": WORKSPACE,
            "descriptors": {number: f"vsock:{port}" for port, number in self._numbers.items()},
        }
        try:
            self._machine = await package.Sandbox.create(
                self._name,
                image=package.Image.bind(str(self._folder / "root")),
                memory=limits.memory_mb or _DEFAULT_MEMORY_MB,
                cpus=math.ceil(limits.cpus) or 1,
                hostname="belljar",
                network=package.Network.none(),
                security=package.SecurityProfile.RESTRICTED,  # no new privileges, no mounts
                volumes=self._volumes(),
                vsock=[package.VsockRoute.stream(str(bridge.path), port) for port, bridge in self._bridges.items()],
                ephemeral=True,
            )
            self._command = await self._machine.exec_stream(
                interpreter_for(command), ["-I", "-S", _GUEST_INIT, json.dumps(order)]
            )
        except package.MicrosandboxError as error:
            raise SandboxUnavailable(f"The virtual machine did not start: {error}") from error
        self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def _volumes(self) -> dict[str, Any]:
        volume, limits = self._microsandbox.Volume, self._spec.limits
        bind = volume.bind
        trees = [path for path in _SHOWN if Path(path).is_dir() and not Path(path).is_symlink()]
        trees += [str(path) for path in self._spec.readable if not any(path.is_relative_to(tree) for tree in trees)]
        return {
            **{path: bind(path, readonly=True, nosuid=True, nodev=True) for path in trees},
            WORKSPACE: bind(str(self._spec.workspace.resolve()), nosuid=True, nodev=True),
            SCRATCH: bind(str(self._spec.scratch.resolve()), nosuid=True, nodev=True),
            **{
                path: volume.tmpfs(size_mib=limits.temporary_mb or None, nosuid=True, nodev=True)
                for path in ("/tmp", HOME)  # noqa: S108 - inside
            },
        }

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        return -signal.SIGKILL if self._waiting is None else await asyncio.shield(self._waiting)

    async def _wait(self) -> int:
        try:
            status, _ = await self._command.wait()
        except self._microsandbox.MicrosandboxError:  # the machine is gone
            return -signal.SIGKILL
        if status < 0:  # `guest_init` was ended by a signal, and blocks or forwards those that it can
            return -signal.SIGKILL
        return 128 - status if status - 128 in signal.valid_signals() else status

    def interrupt(self) -> None:
        """Send SIGINT to the command, through the machine's agent."""
        if self._command is not None:
            task = asyncio.get_running_loop().create_task(self._command.signal(int(signal.SIGINT)))
            self._signals.add(task)
            task.add_done_callback(self._signals.discard)

    async def kill_all(self) -> None:
        """Kill the machine and forget it; may be called twice."""
        package, machine = self._microsandbox, self._machine
        self._machine = None
        if machine is not None:
            with contextlib.suppress(package.MicrosandboxError):
                await machine.kill(timeout=_KILL_TIMEOUT_S)
        # A machine that was killed or did not boot leaves its record and its logs, `ephemeral` or not.
        with contextlib.suppress(package.MicrosandboxError):
            await package.Sandbox.remove(self._name)
        for bridge in self._bridges.values():
            await asyncio.to_thread(bridge.close)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class DescriptorBridge:
    """Carries bytes between a descriptor of the server and the one connection made to a UNIX socket for it.

    The descriptor is duplicated, so the caller may close its own. Bytes of a socket are carried both ways, of any other
    descriptor only out of the machine. Threads do it, because the descriptors block and other processes hold them too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._ours = os.dup(descriptor)
        self._listener = socket.socket(socket.AF_UNIX)
        self._peer: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._listener.bind(str(path))
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            os.close(self._ours)
            raise
        self._thread = threading.Thread(target=self._serve, name=f"bridge-{path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut the connection, and wait until nothing is carried any more; may be called twice."""
        with self._lock:
            self._is_closed = True
            for sock in filter(None, (self._listener, self._peer)):
                _end_stream(sock)
        self._thread.join()

    def _serve(self) -> None:
        try:
            with contextlib.suppress(OSError), self._accept() as peer:
                self._carry(peer)
        finally:
            os.close(self._ours)

    def _accept(self) -> socket.socket:
        with self._listener:
            peer, _ = self._listener.accept()
        with self._lock:
            self._peer = peer
            if self._is_closed:
                _end_stream(peer)
        return peer

    def _carry(self, peer: socket.socket) -> None:
        is_socket = stat.S_ISSOCK(os.fstat(self._ours).st_mode)
        back = threading.Thread(target=self._carry_back, args=(peer,), name=f"{self._thread.name}-back", daemon=True)
        if is_socket:
            back.start()
        with contextlib.suppress(OSError):
            while chunk := peer.recv(_CHUNK_BYTES):
                while chunk:
                    chunk = chunk[os.write(self._ours, chunk) :]
        if is_socket:
            # Whoever holds the other end of our socket now reads end of file, and so does the thread `back`.
            with socket.socket(fileno=os.dup(self._ours)) as ours:
                _end_stream(ours)
            back.join()

    def _carry_back(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._ours, _CHUNK_BYTES):
                peer.sendall(chunk)
        _end_stream(peer, socket.SHUT_WR)


def _end_stream(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):  # not connected, or closed by the other thread
        sock.shutdown(how)


def find_obstacle(proc: Path = Path("/proc"), device: Path = Path("/dev/kvm")) -> HostCheck | None:
    """Return the first thing that surely keeps a machine from booting, in the order in which it can be fixed."""

    def failed(name: str, detail: str, hint: str) -> HostCheck:
        return HostCheck(name, is_ok=False, detail=detail, hint=hint)

    if sys.platform != "linux":
        hint = "`--sandbox process` does not isolate: choose it knowingly"
        return failed("microvm", f"Linux only, this is {sys.platform}", hint)
    if importlib.util.find_spec(_PACKAGE) is None:
        return failed("microsandbox", "not installed", install_extra("microvm"))
    if platform.machine() == "x86_64" and not _has_virtualization(proc / "cpuinfo"):
        detail = "the processor offers no virtualization: no vmx (Intel) or svm (AMD) flag in /proc/cpuinfo"
        if device.exists():
            detail += f"; {device} is there, but is a paravirtual one that boots no ordinary kernel"
        hint = "enable it in the firmware, or, in a virtual machine, nested virtualization on its host"
        return failed("processor", detail, hint)
    if not device.exists():
        return failed("kvm", f"{device} is missing", "modprobe kvm_intel, or kvm_amd")
    if not os.access(device, os.R_OK | os.W_OK):
        hint = "add the server's user to the group kvm: usermod -aG kvm USER"
        return failed("kvm", f"{device} is closed to this user", hint)
    return None


def _has_virtualization(cpuinfo: Path) -> bool:
    try:
        return re.search(r"^flags\b.*\s(vmx|svm)\b", cpuinfo.read_text(errors="replace"), re.MULTILINE) is not None
    except OSError:
        return False


def make_root(root: Path, readable: Sequence[Path]) -> None:
    """Make the machine's root file system: mount points for what is shown in it, and the few files of its own."""

    def inside(path: str | Path) -> Path:
        return root / str(path).lstrip("/")

    for path in (*_MADE, *readable):
        inside(path).mkdir(parents=True, exist_ok=True)
    for path in map(Path, _SHOWN):
        if path.is_symlink() and path.parent == Path("/"):
            inside(path).symlink_to(path.readlink())
        elif path.is_dir():
            inside(path).mkdir(parents=True, exist_ok=True)
    for path, content in _FILES.items():
        inside(path).write_text(content)
    with contextlib.suppress(OSError):  # the loader works without it
        shutil.copyfile("/etc/ld.so.cache", inside("/etc/ld.so.cache"))
    shutil.copyfile(guest_init.__file__, inside(_GUEST_INIT))


def interpreter_for(command: Sequence[str] = ()) -> str:
    """Return a Python that exists in the machine: the command's own, or the system's."""
    if command and Path(command[0]).name.startswith("python"):
        return command[0]
    return shutil.which("python3", path="/usr/bin:/bin") or "/usr/bin/python3"


async def _try_machine(timeout_s: float) -> str:
    """Boot a machine, pass a descriptor to a command, compare what comes back; return what is wrong, or nothing."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder, os.fdopen(reading, "rb") as heard:
        sandbox = MicroVMSandbox(SandboxSpec("trial", workspace=Path(folder), scratch=Path(folder), home=Path(folder)))
        code = f"import os, sys; os.write({writing}, b'crossed'); sys.exit(3)"
        streams = {"stdout": writing, "stderr": writing}
        try:
            async with asyncio.timeout(timeout_s):
                process = await sandbox.spawn(
                    [interpreter_for(), "-ISc", code], environment={}, **streams, pass_fds=[writing]
                )
                status = await process.wait()
        except TimeoutError:
            return f"a machine did not end within {timeout_s:g} s (`start_timeout_s`)"
        except (SandboxUnavailable, OSError) as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the package's interface may be another than this was written for
            return f"{type(error).__name__}: {error}"
        finally:
            os.close(writing)
            await sandbox.aclose()
        said = heard.read()
    if (status, said) == (3, b"crossed"):
        return ""
    return f"a command that should have ended with 3 ended with {status}, and wrote {said[:200]!r}"
