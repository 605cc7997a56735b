"""The sandbox contract: one session's process tree, behind whatever glass the provider has.

A provider is made once from the settings and makes sandboxes; a sandbox belongs to one session and dies with it. It
knows folders, namespaces and processes; it knows nothing of kernels, cells or MCP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WORKSPACE = "/mnt/data"


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a session needs to see. Paths are the host's."""

    session_id: str
    workspace: Path
    """The session folder: the working directory inside, read and write."""
    scratch: Path
    """Private to the session, for sockets and connection files shared with the host, read and write."""
    home: Path
    """HOME where the provider has no private one of its own."""
    readable: Sequence[Path] = ()
    """Trees visible read-only at the same path: the environment, its base interpreter, the runner."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `belljar doctor`."""

    name: str
    is_ok: bool
    detail: str
    hint: str = ""


class SandboxProcess(Protocol):
    """A command inside the sandbox."""

    pid: int
    """The process the host can wait for; the command itself may be a descendant."""

    async def wait(self) -> int:
        """Exit status when it ends; negative for a signal. The kernel awaits it to tell why it lost its peer."""
        ...


class Sandbox(Protocol):
    """One session's glass."""

    workspace: str
    """The session folder as code inside sees it."""
    scratch: str
    """The scratch folder as code inside sees it."""
    home: str
    """A private HOME, as code inside sees it."""
    temporary: str
    """A private folder for temporary files, as code inside sees it."""

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command with exactly this environment. Called by a kernel when it starts."""
        ...

    async def kill(self) -> None:
        """End every process inside, at once."""
        ...

    async def aclose(self) -> None:
        """Kill and release; may be called twice. Called when the session ends or its kernel is replaced."""
        ...


class Provider(Protocol):
    """Makes sandboxes."""

    name: str
    isolates: bool
    warning: str
    """Said at start-up and by `doctor`; empty when there is nothing to warn of."""

    def check(self) -> list[Check]:
        """What this host can and cannot do. Called at start-up and by `doctor`; must be quick."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet."""
        ...
