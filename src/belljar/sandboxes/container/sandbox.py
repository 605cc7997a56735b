"""A session's containers, one for each command, and the names by which a server tells its containers from others.

`provider.py` finds the engine that makes them; `process.py` runs one command.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from belljar.files.host_folders import open_host_folder
from belljar.sandboxes.base import WORKSPACE, HostFolder, Incident, SandboxProcess, SandboxSpec
from belljar.sandboxes.container.engines import LABEL, ContainerEngine
from belljar.sandboxes.container.handshake import StartOrder
from belljar.sandboxes.container.process import ContainerProcess
from belljar.sandboxes.container.run_arguments import RunArguments
from belljar.sandboxes.defaults import SandboxBase
from belljar.sandboxes.limits import Enforcement
from belljar.sandboxes.seccomp import load_filter


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
