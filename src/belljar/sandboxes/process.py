"""The `process` provider: plain processes of this user, on this machine, without any isolation.

For machines that cannot isolate, and for code that is trusted. What a session starts is ended with it as far as
`process_tree.py` can find it, and with its control group where those can be written. Outside Linux only the process
group is ended, and nothing is limited. The folder for temporary files is a plain one, so its size is not limited. The
session's folder is at its own path, and at /mnt/data where `data_path.py` can show it there.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import HostCheck, Incident, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.child import Child, start_child
from belljar.sandboxes.data_path import DataPath, unlink
from belljar.sandboxes.defaults import SandboxBase, WithoutHostUsers
from belljar.sandboxes.limits.enforcement import Enforcement, Enforcer
from belljar.sandboxes.process_tree import MARK, kill_process_tree


class ProcessProvider(WithoutHostUsers):
    """Makes sandboxes that do not isolate."""

    name = "process"
    isolates = False
    shows_folders = "as they are"
    shows_devices = True  # of the whole host
    _warning = (
        "The process sandbox does NOT isolate: code in a session can read, change and send away "
        "everything the user who runs this server can, and egress rules are not enforced"
    )

    def __init__(self, enforcer: Enforcer | None = None, data_path: DataPath | None = None) -> None:
        self._enforcer = enforcer or Enforcer()
        self._data_path = data_path or DataPath()

    @property
    def shows_workspace(self) -> bool:
        """See `HostPathProvider`."""
        return self._data_path.is_shown

    @property
    def warning(self) -> str:
        """That it isolates nothing, and what it cannot limit."""
        return ". ".join(filter(None, (self._warning, self._enforcer.warning)))

    def check(self) -> list[HostCheck]:
        """Return lines that are always ok, because it needs nothing of the host."""
        return [HostCheck("process", is_ok=True, detail="available, does not isolate"), self._enforcer.check()]

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet."""
        await asyncio.to_thread(lambda: self._data_path.is_shown)  # starts a process when first asked
        return ProcessSandbox(spec, self._enforcer.enforce(spec.session_id, spec.limits), self._data_path)


class ProcessSandbox(SandboxBase):
    """The processes of one session. They get one more variable, `BELLJAR_SANDBOX`, by which they are found again.

    A shell starts each command, so `PWD`, `OLDPWD` and `SHLVL` do not reach it, and some shells add `_`.
    """

    def __init__(self, spec: SandboxSpec, enforcement: Enforcement, data_path: DataPath) -> None:
        super().__init__(spec)
        self.workspace = str(spec.workspace)
        self.scratch = str(spec.scratch)
        self.home = str(spec.home)
        self.temporary = str(spec.home)
        self.can_spare = sys.platform == "linux"
        self.ends_with_command = False
        self._enforcement = enforcement
        self._data_path = data_path
        self._link = data_path.link(spec.workspace)
        self._mark = secrets.token_hex(16)
        self._children: list[Child] = []

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in the session folder."""
        self._check_open()
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            # The shell that starts it would report this only where nobody reads it.
            raise SandboxUnavailable(
                f"Cannot start {command[0]}: No such file", hint="Check that the file exists and may be executed"
            )
        stdin, line = os.pipe()
        try:
            child = start_child(
                self._enforcement.guarded(self._data_path.command(self.workspace, command), waits=True),
                environment={**environment, MARK: self._mark},
                folder=self.workspace,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
            )
            self._children.append(child)
            # Without a control group their number is not limited, because other processes of the user would count too.
            self._enforcement.bind(child.pid, is_alone=False)
            # The shell has waited for this line until its limits were set; after it the command reads only end of file.
            with contextlib.suppress(BrokenPipeError):
                os.write(line, b"\n")
        finally:
            os.close(stdin)
            os.close(line)
        return child

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        return self._enforcement.incidents()

    def memory_peak_mb(self) -> float:
        """Return the most memory that all processes together held since the last call; 0 where not measured."""
        return self._enforcement.memory_peak_mb()

    async def kill(self, spare: Collection[int] = ()) -> None:
        """Kill every process that can be found except the spared; outside Linux none can be spared."""
        async with self._ending:
            if spare and sys.platform == "linux":
                for child in self._children:
                    await asyncio.to_thread(kill_process_tree, child.pid, self._mark, spare)
                return
            while self._children:
                child = self._children[-1]
                self._enforcement.kill()
                child.kill_group()
                if sys.platform == "linux":
                    await asyncio.to_thread(kill_process_tree, child.pid, self._mark)
                await child.wait()
                child.release()
                self._children.remove(child)

    async def aclose(self) -> None:
        """Kill everything and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()
        link, self._link = self._link, None
        if link is not None:
            unlink(link, self.spec.workspace)
        await self._enforcement.release()
