"""The `polite` sandbox: what the `process` sandbox does, at a low priority."""

import shutil
from collections.abc import Collection, Mapping, Sequence

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import HostCheck, Identity, Incident, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.process import ProcessProvider


class PoliteProvider:
    """Makes sandboxes whose commands `nice` starts."""

    contract = 1
    name = "polite"
    isolates = False
    warning = "The polite sandbox does NOT isolate"

    def __init__(self) -> None:
        self._plain = ProcessProvider()

    def check(self) -> list[HostCheck]:
        """Look for the one program that is needed."""
        nice = shutil.which("nice")
        hint = "" if nice else "Install coreutils"
        return [HostCheck("nice", is_ok=bool(nice), detail=nice or "not on the PATH", hint=hint)]

    def take_identity(self) -> Identity | None:
        """Return None: sessions are the server's own user."""
        return None

    def release_identity(self, identity: Identity) -> None:
        """Do nothing, because no user was taken."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox; nothing runs in it yet."""
        return PoliteSandbox(await self._plain.open(spec))


class PoliteSandbox:
    """One session's processes."""

    def __init__(self, plain: Sandbox) -> None:
        self._plain = plain
        self.workspace = plain.workspace
        self.scratch = plain.scratch
        self.home = plain.home
        self.temporary = plain.temporary
        self.can_spare = plain.can_spare
        self.ends_with_command = plain.ends_with_command

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in the session folder, at a low priority."""
        nice = shutil.which("nice")
        if nice is None:
            raise SandboxUnavailable("nice is gone", hint="Install coreutils")
        return await self._plain.spawn(
            [nice, "-n", "5", *command], environment=environment, stdout=stdout, stderr=stderr, pass_fds=pass_fds
        )

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        return self._plain.incidents()

    def memory_peak_mb(self) -> float:
        """Return the most that all processes together held since the last call."""
        return self._plain.memory_peak_mb()

    async def kill(self, spare: Collection[int] = ()) -> None:
        """End every process, but for those spared."""
        await self._plain.kill(spare)

    async def aclose(self) -> None:
        """Kill everything, and start nothing more."""
        await self._plain.aclose()
