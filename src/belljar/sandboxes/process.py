"""The `process` provider: plain processes of this user, on this machine, behind no glass at all.

For machines that cannot isolate, and for code that is trusted. What a session starts is ended with it as far as
`lineage` can find it. Outside Linux only the process group is ended.
"""

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Check, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.child import Child, start_child
from belljar.sandboxes.lineage import MARK, end_lineage


class ProcessProvider:
    """Makes sandboxes that are none."""

    name = "process"
    isolates = False
    warning = (
        "The process sandbox does NOT isolate: code in a session can read, change and send away "
        "everything the user who runs this server can"
    )

    def check(self) -> list[Check]:
        """One line that is always good: it asks nothing of the host."""
        return [Check("process", is_ok=True, detail="available, does not isolate")]

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet."""
        return ProcessSandbox(spec)


class ProcessSandbox:
    """The processes of one session. Adds one variable, `BELLJAR_SANDBOX`, by which they are found again."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.workspace = str(spec.workspace)
        self.scratch = str(spec.scratch)
        self.home = str(spec.home)
        self.temporary = str(spec.home)
        self._session_id = spec.session_id
        self._mark = secrets.token_hex(16)
        self._children: list[Child] = []
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
        """Start a command in the session folder."""
        if self._is_closed:
            raise SandboxUnavailable(f"Sandbox of session {self._session_id} is closed")
        child = start_child(
            command,
            environment={**environment, MARK: self._mark},
            folder=self.workspace,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
        )
        self._children.append(child)
        return child

    async def kill(self) -> None:
        """End every process that can be found."""
        async with self._ending:
            while self._children:
                child = self._children[-1]
                child.kill_group()
                if sys.platform == "linux":
                    await asyncio.to_thread(end_lineage, child.pid, self._mark)
                await child.wait()
                child.release()
                self._children.remove(child)

    async def aclose(self) -> None:
        """Kill, and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()
