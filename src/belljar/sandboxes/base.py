"""The sandbox contract: one session's process tree, behind whatever glass the provider has.

A provider is made once from the settings and makes sandboxes; a sandbox belongs to one session and dies with it. It
knows folders, namespaces and processes; it knows nothing of kernels, cells or MCP.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

WORKSPACE = "/mnt/data"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may use; 0 means no limit."""

    memory_mb: int = 0
    """All its processes together, swap included."""
    cpus: float = 0
    """Processor time a second, as a number of processors; a fraction is one."""
    processes: int = 0
    """Processes and their threads, all together."""
    disk_mb: int = 0
    """The session folder."""
    temporary_mb: int = 0
    """`/tmp`, HOME and `/dev/shm`, each."""
    open_files: int = 0
    """Per process."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A limit that was hit. Told in the result of the execution it happened in."""

    kind: Literal["out_of_memory", "too_many_processes", "disk_full"]
    detail: str
    """The fact with its values, such as "used 2,048 MB, the limit is 2,048 MB"."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A user and a group of the host, by number."""

    uid: int
    gid: int


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
    limits: Limits = Limits()
    identity: Identity | None = None
    """Whose the session's processes and files are on the host, from `take_identity`."""
    grounds: Path | None = None
    """For a trunk: the folder that holds the folders of all its branches, open to be passed through (`o+x`) as theirs
    are; None: two above the workspace."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """How a process of the origin comes into a branch, memory and all."""

    holder: int
    """A pidfd of the branch's first process: its namespaces are the ones to join. The branch closes it."""
    flags: int
    """For setns(2): exactly these are let through by the filter of system calls."""
    identity: Identity
    """Whom to become inside, as numbered there."""
    groups: Sequence[int] = ()
    """Descriptors that a process with one thread may write `0` to, before it joins: it is then in the branch's control
    groups at once, where `admit` takes some ten milliseconds to move it. The branch closes them. Only for one that runs
    no session's code: whoever holds them can leave its own groups."""


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


@runtime_checkable
class Interruptible(Protocol):
    """A `SandboxProcess` whose command the host's kernel does not know as a process of its own. Others have no need."""

    def interrupt(self) -> None:
        """Send SIGINT to the command. Called by a kernel instead of a signal to its peer's pid; never waits."""
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
    can_spare: bool
    """Whether `kill` can leave processes alive."""
    ends_with_command: bool
    """Whether everything inside ends with the command that was spawned."""

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

    def incidents(self) -> list[Incident]:
        """Limits that were hit since the last call. Asked after each cell and when a kernel has died; quick."""
        ...

    def memory_peak_mb(self) -> float:
        """The most that all its processes together held since the last call; 0 where that is not measured."""
        ...

    async def kill(self, spare: Collection[int] = ()) -> None:
        """End every process inside, at once; those spared, by the host's numbers, keep the sandbox open."""
        ...

    async def aclose(self) -> None:
        """Kill and release; may be called twice. Called when the session ends or its kernel is replaced."""
        ...


@runtime_checkable
class Branch(Sandbox, Protocol):
    """A sandbox of its own that was opened out of another one, its origin. It may be the origin of further ones.

    A command holds it open; once that was spawned, a process of the origin may enter it with its memory.
    """

    def entrance(self) -> Entrance:
        """The way in. Asked after `spawn`."""
        ...

    def admit(self, pid: int) -> None:
        """A process, by the host's number, has entered: hold it to the limits. Called before it runs a cell."""
        ...


class Provider(Protocol):
    """Makes sandboxes."""

    name: str
    isolates: bool

    @property
    def warning(self) -> str:
        """Said at start-up and by `doctor`; empty when there is nothing to warn of."""
        ...

    def check(self) -> list[Check]:
        """What this host can and cannot do. Called at start-up and by `doctor`; must be quick."""
        ...

    def take_identity(self) -> Identity | None:
        """A user for one session alone; None where sessions are the server's own. Called when a session is made."""
        ...

    def release_identity(self, identity: Identity) -> None:
        """The session is over and its files are gone. Called once a session."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet."""
        ...


@runtime_checkable
class Branching(Protocol):
    """A provider whose sandboxes can be branched. Closing an origin ends its own processes; branches live on."""

    def branching_gap(self) -> str:
        """Why that does not work on this host; empty when it does. Tried once, then remembered."""
        ...

    async def open_trunk(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox that branches can be opened from."""
        ...

    async def open_branch(self, spec: SandboxSpec, origin: Sandbox) -> Branch:
        """Make a sandbox whose entrance the origin's processes can use; the origin is a trunk or a branch, and held."""
        ...
