"""The sandbox contract: what the engine asks of a provider, of a sandbox, and of a process in one.

A provider is made once and makes sandboxes; a sandbox belongs to one session and ends with it. It knows folders, limits
and processes, and nothing of kernels, cells or MCP. Whoever implements `Provider`, `Sandbox` and `SandboxProcess` has a
whole provider; `Interruptible`, `Branching` with `Branch`, and `Keeping` are for those that can do more, and the engine
asks for them with isinstance. A package can bring a provider: docs/guides/sandbox-providers.md.

Coroutines run on the server's event loop and must not block it; other methods are called there too, so they are quick
or say otherwise. What fails raises `belljar.errors.SandboxUnavailable` with the fact and, as `hint`, what to do: the
session's caller reads both. Any other exception is taken for a fault of the server's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

CONTRACT = 1
"""The version of this contract. A provider of another package names the one it was written for, and is refused under
any other: the number changes when a provider that fulfilled the old contract would not fulfil the new one."""

WORKSPACE = "/mnt/data"
"""Where the session folder is inside a sandbox that has a file system view of its own."""


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
class NamespaceEntry:
    """How a process of the origin comes into a branch, with its memory. For providers that are `Branching`."""

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
class HostCheck:
    """One thing that a provider needs of the host: a line of `belljar doctor`; the server starts only if all are ok."""

    name: str
    is_ok: bool
    detail: str
    hint: str = ""


class SandboxProcess(Protocol):
    """A command inside the sandbox."""

    pid: int
    """The process the host can wait for, or 0 where the host has none; the command itself may be a descendant."""

    async def wait(self) -> int:
        """Return the exit status when the command ends; negative for a signal, -9 also if `kill` ended it.

        The kernel awaits it when it lost the connection to its runner, to say why. Several tasks may wait at once, and
        after the end it returns the same status again. It raises nothing.
        """
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A `SandboxProcess` whose command is no process of the host's, as in a virtual machine; others do without."""

    def interrupt(self) -> None:
        """Send SIGINT to the command, and do not wait for what it does.

        A kernel calls it when a cell is interrupted; for a process without this method it signals the pid instead. One
        that has ended is no error.
        """
        ...


class Sandbox(Protocol):
    """What one session's processes are enclosed in. Several commands may run in it, one after another or at once."""

    workspace: str
    """The session folder as code inside sees it."""
    scratch: str
    """The scratch folder as code inside sees it."""
    home: str
    """A private HOME, as code inside sees it."""
    temporary: str
    """A private folder for temporary files, as code inside sees it."""
    can_spare: bool
    """Whether `kill` can leave processes alive. Without it a session has no checkpoints to go back to."""
    ends_with_command: bool
    """Whether everything inside ends with the command that was spawned, as with the first process of a pid namespace.
    """

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in the session folder, with exactly this environment and at the end of its standard input.

        A kernel calls it when it starts, and so does whatever installs packages. `stdout`, `stderr` and `pass_fds` are
        descriptors of the server: the first two become the command's 1 and 2, the others keep their numbers, and the
        server may close its own when this returns. No other descriptor of the server may reach the command. The
        server speaks with its runner over a UNIX socket among `pass_fds`, so a provider that cannot pass descriptors
        has to carry their bytes. After `kill` the sandbox is used again; after `aclose` this raises SandboxUnavailable,
        and it does so when the command cannot be started. `InvalidArgument` is for a null byte in what was given.
        """
        ...

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call; none where that cannot be known.

        Asked after each cell and when a kernel has died, so it must be quick. It raises nothing.
        """
        ...

    def memory_peak_mb(self) -> float:
        """Return the most that all processes together held since the last call; 0 where that is not measured.

        Asked after each cell, so it must be quick. It raises nothing.
        """
        ...

    async def kill(self, spare: Collection[int] = ()) -> None:
        """End every process inside at once, daemons included, and return when they are gone.

        Called when a cell ignores its interrupt and when a kernel is restarted, by several tasks at once too, and also
        when nothing runs any more. The pids in `spare`, by the host's numbers, live on, and with them the sandbox; they
        are given only where `can_spare` is true. It raises nothing.
        """
        ...

    async def aclose(self) -> None:
        """Kill everything and release what the sandbox took of the host; may be called twice.

        Called when the session ends or its kernel is replaced, also if nothing was ever spawned. The session's folders
        are the server's to remove. It raises nothing.
        """
        ...


@runtime_checkable
class ForkedSandbox(Sandbox, Protocol):
    """A sandbox that a process of another one, its origin, can enter with its memory. It may be an origin itself.

    A command that was spawned in it holds it open; from then on a process of the origin may enter.
    """

    def entrance(self) -> NamespaceEntry:
        """Return the way in; SandboxUnavailable if the holding command is gone. Asked once, after `spawn`."""
        ...

    def admit(self, pid: int) -> None:
        """Hold a process that has entered, by the host's number, to the limits. Called before it runs a cell."""
        ...


class Provider(Protocol):
    """Makes sandboxes. There is one in a server, made when the server starts, or by `belljar doctor`."""

    name: str
    """What the setting `sandbox` calls it."""
    isolates: bool
    """Whether code inside is kept from the host's network and from files that it was not shown. Only then does the
    server give sessions a way to the hosts that the settings allow, and install packages inside a sandbox."""

    @property
    def warning(self) -> str:
        """Say what does not protect here as one would expect; empty when there is nothing to warn of.

        Logged when the server starts, and shown by `belljar doctor`, after `check`. It raises nothing.
        """
        ...

    def check(self) -> list[HostCheck]:
        """Return what this host has and lacks; the first line that is not ok keeps the server from starting.

        Called before anything else, and again by `belljar doctor`, which says it of providers that are not configured
        too. It may try the host out once, in about a second, and remembers the outcome. It raises nothing: what went
        wrong is a line.
        """
        ...

    def take_identity(self) -> Identity | None:
        """Return a user for one session alone; None where sessions are the server's own user.

        Called when a session is made, before its folders are, which will belong to that user; SandboxUnavailable if
        there is none to have.
        """
        ...

    def release_identity(self, identity: Identity) -> None:
        """Take a user back. Called once for each that was taken, after the session's files are gone; raises nothing."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox of folders that exist; nothing runs in it yet.

        Called for each session, for each kernel that replaces another, and for each installation of packages. It
        raises SandboxUnavailable, and then has left nothing behind.
        """
        ...


class InstalledProvider(Provider, Protocol):
    """A provider that a package brings; its entry point names a class, or a function, that takes no arguments."""

    contract: int
    """The `CONTRACT` that it was written for, as a number: `contract = 1`."""


@runtime_checkable
class ForkableProvider(Protocol):
    """A provider whose sandboxes can be branched: sessions start as forks of a process that has everything imported.

    Closing an origin ends its own processes; its branches live on.
    """

    def branching_gap(self) -> str:
        """Say why that does not work on this host; empty when it does.

        Called in a thread before the first trunk is opened, and by `belljar doctor`. It may try the host out, once, and
        remembers the outcome. It raises nothing: without branches sessions start cold.
        """
        ...

    async def open_trunk(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox that branches can be opened from. Called once for each environment that sessions fork from.

        It raises SandboxUnavailable; sessions of that environment then start cold.
        """
        ...

    async def open_branch(self, spec: SandboxSpec, origin: Sandbox) -> ForkedSandbox:
        """Make a sandbox whose entrance the origin's processes can use.

        The origin is a trunk or a branch, and a command in it holds it open. Called for each session that starts as a
        fork, and for each fork of a session. It raises SandboxUnavailable.
        """
        ...
