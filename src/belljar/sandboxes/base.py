"""The sandbox contract: what the engine asks of a provider, of a sandbox, and of a process in one.

A provider is made once and makes sandboxes; a sandbox belongs to one session and ends with it. It knows folders, limits
and processes, and nothing of kernels, cells or MCP. Whoever implements `Provider`, `Sandbox` and `SandboxProcess` has a
whole provider. `Interruptible`, `ForkableProvider` with `ForkedSandbox`, and `HandoverProvider` are for those that can
do more; the engine asks for them with isinstance. A package can bring a provider: docs/guides/sandbox-providers.md.

Coroutines run on the server's event loop and must not block it; other methods are called there too, so they are quick
or say otherwise. What fails raises `belljar.errors.SandboxUnavailable` with the fact and, as `hint`, what to do: the
session's caller reads both. Any other exception counts as a bug in the server.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from belljar.files.names import SANDBOX_ROOT

if TYPE_CHECKING:
    from belljar.supervisor import SupervisorClient

CONTRACT = 1
"""The version of this contract. A provider of another package names the one it was written for, and is refused under
any other. The number changes when a provider that fulfilled the old contract would not fulfil the new one."""

WORKSPACE = SANDBOX_ROOT
"""The path of the session folder inside a sandbox that has its own view of the file system."""

HOLD = ("/bin/sh", "-c", "trap '' HUP INT TERM; exec sleep infinity")
"""The command that only holds a sandbox open. It ignores the signals that a session may send to every `sleep` there is.
A provider may run it as another user than the session's, whom the session cannot harm."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may use; 0 means no limit."""

    memory_mb: int = 0
    """For all processes together, swap included."""
    cpus: float = 0
    """Processor time per second, in processors; may be a fraction."""
    processes: int = 0
    """Processes and threads together."""
    disk_mb: int = 0
    """The session folder."""
    temporary_mb: int = 0
    """For each of `/tmp`, HOME and `/dev/shm`."""
    open_files: int = 0
    """Per process."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A limit that was hit. Reported in the result of the execution it happened in."""

    kind: Literal["out_of_memory", "too_many_processes", "disk_full", "gpu_out_of_memory", "gpu_lost"]
    detail: str
    """The fact with its values, such as "used 2,048 MB, the limit is 2,048 MB"."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A user and a group of the host, by number."""

    uid: int
    gid: int


FOLDERS = "/mnt"
"""The folder inside, below which a provider that can shows the user's folders, each under its name."""


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A folder of the host's that the operator shows to a session."""

    name: str
    path: str
    """On the host. Whoever mounts it opens it with `open_host_folder`, each time: what is there may have changed."""
    is_writable: bool = False

    @property
    def inside(self) -> str:
        """The path of the folder inside a sandbox that has its own view of the file system."""
        return f"{FOLDERS}/{self.name}"


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a session's sandbox is made of. Paths are the host's."""

    session_id: str
    workspace: Path
    """The session folder: the working directory inside, read and write."""
    scratch: Path
    """Private to the session, for sockets and connection files shared with the host, read and write."""
    home: Path
    """The HOME folder, for providers that make no private one."""
    readable: Sequence[Path] = ()
    """Trees that are visible read-only at the same path: the environment, its base interpreter, the runner."""
    limits: Limits = Limits()
    identity: Identity | None = None
    """The host user that owns the session's processes and files, from `take_identity`."""
    devices: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Device nodes: where they are inside, and where on the host. Only a `DeviceProvider` is given any. Processes that
    see one can write to their own files in /proc, because NVIDIA's library does."""
    nested_folder: Path | None = None
    """For a forkable sandbox: the folder that has the folders of all that are nested in it. Like theirs, it must let
    others pass through it (`o+x`). None means the folder two levels above the workspace."""
    keeps_set_ids: bool = False
    """Whether code may give its files set-user-ID and set-group-ID bits, as archives have them. Only where nobody but
    the server's user can reach a file of the sandbox from outside; inside, such bits mean nothing."""
    folders: Sequence[HostFolder] = ()
    """The user's folders, which a provider with `shows_folders` shows at their `inside`."""


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """How a process of the parent enters a forked sandbox, keeping its memory. For a `ForkableProvider`."""

    holder: int
    """A pidfd of the sandbox's first process, whose namespaces are the ones to join. The sandbox closes it."""
    flags: int
    """For setns(2). The filter of system calls lets exactly these through."""
    identity: Identity
    """The user to become inside, as numbered there."""
    groups: Sequence[int] = ()
    """Descriptors that a process with one thread may write `0` to before it joins the namespaces. It is then in the
    sandbox's control groups at once, whereas `admit` takes some ten milliseconds to move it. The sandbox closes them.
    Only for a process that runs no session's code, because whoever holds them can leave its own groups."""


@dataclass(frozen=True, slots=True)
class HostCheck:
    """One thing a provider needs of the host: a line of `belljar doctor`. The server starts only if all are ok."""

    name: str
    is_ok: bool
    detail: str
    hint: str = ""
    """The command that gets it, or what else to do."""
    cost: str = ""
    """What sessions go without where it is not ok."""


class SandboxProcess(Protocol):
    """A command that runs in the sandbox."""

    pid: int
    """The process that the host can wait for, or 0 where the host has none; the command may be a descendant of it."""

    async def wait(self) -> int:
        """Return the exit status when the command ends; negative for a signal, -9 also if `kill` ended it.

        The kernel awaits it when it lost the connection to its runner, to say why. Several tasks may wait at once, and
        later calls return the same status. It raises nothing.
        """
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A `SandboxProcess` whose command is not a process of the host, as in a virtual machine."""

    def interrupt(self) -> None:
        """Send SIGINT to the command, and do not wait for what it does.

        A kernel calls it when a cell is interrupted; for a process without this method the kernel signals the pid
        instead. A command that has ended is no error.
        """
        ...


class Sandbox(Protocol):
    """The isolation of one session's processes. Several commands may run in it, one after another or at once."""

    workspace: str
    """The session folder as code inside sees it."""
    scratch: str
    """The scratch folder as code inside sees it."""
    home: str
    """A private HOME, as code inside sees it."""
    temporary: str
    """A private folder for temporary files, as code inside sees it."""
    can_spare: bool
    """Whether `kill` can leave processes alive. If not, a session has no checkpoints to go back to."""
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
        """Start a command in the session folder, with exactly this environment and an empty standard input.

        Called by a kernel when it starts, and by whatever installs packages. `stdout`, `stderr` and `pass_fds` are
        descriptors of the server: the first two become the command's 1 and 2, the others keep their numbers, and the
        server may close its own when this returns. No other descriptor of the server may reach the command. The
        server talks to its runner over a UNIX socket among `pass_fds`, so a provider that cannot pass descriptors
        has to carry their bytes. The sandbox is used again after `kill`. Raise SandboxUnavailable when the command
        cannot be started, and after `aclose`; raise `InvalidArgument` for a null byte in an argument.
        """
        ...

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call; none where that cannot be known.

        Called after each cell and when a kernel has died, so it must be quick. It raises nothing.
        """
        ...

    def memory_peak_mb(self) -> float:
        """Return the most memory that all processes together held since the last call; 0 where that is not measured.

        Called after each cell, so it must be quick. It raises nothing.
        """
        ...

    async def kill(self, spare: Collection[int] = ()) -> None:
        """Kill every process inside at once, daemons included, and return when they are gone.

        Called when a cell ignores its interrupt and when a kernel is restarted, possibly by several tasks at once, and
        also when nothing runs any more. The pids in `spare`, as the host numbers them, live on, and with them the
        sandbox; they are given only where `can_spare` is true. It raises nothing.
        """
        ...

    async def aclose(self) -> None:
        """Kill everything and release what the sandbox took from the host; may be called twice.

        Called when the session ends or its kernel is replaced, also if nothing was ever spawned. The server removes the
        session's folders itself. It raises nothing.
        """
        ...


@runtime_checkable
class ForkedSandbox(Sandbox, Protocol):
    """A sandbox nested in another one, its parent, whose processes can enter it and keep their memory.

    It can be a parent itself. A command that was spawned in it holds its namespaces open; only then may a process of
    the parent enter.
    """

    def entry(self) -> NamespaceEntry:
        """Return how to enter; SandboxUnavailable if the holding command is gone. Called once, after `spawn`."""
        ...

    async def admit(self, pid: int) -> None:
        """Put a process that has entered (its pid on the host) under the limits. Called before it runs a cell."""
        ...


class Provider(Protocol):
    """Makes sandboxes. A server has one, made when the server starts; `belljar doctor` makes them too."""

    name: str
    """The value of the setting `sandbox` that chooses it."""
    isolates: bool
    """Whether code inside cannot reach the host's network or files that it was not shown. Only then does the server
    let sessions reach the hosts that the settings allow, and install packages inside a sandbox."""

    @property
    def warning(self) -> str:
        """Say where protection is weaker than a user would expect; empty when there is nothing to warn of.

        Logged when the server starts, and shown by `belljar doctor`, after `check`. It raises nothing.
        """
        ...

    def check(self) -> list[HostCheck]:
        """Return what this host has and lacks; the first line that is not ok keeps the server from starting.

        Called before anything else, and again by `belljar doctor`, which also asks the providers that are not
        configured. It may try the host out once, in about a second, and remembers the outcome. It raises nothing: what
        went wrong is a line.
        """
        ...

    def take_identity(self) -> Identity | None:
        """Return a host user for one session alone; None where sessions run as the server's own user.

        Called when a session is made, before its folders, which will belong to that user. Raise SandboxUnavailable if
        no user is free.
        """
        ...

    def release_identity(self, identity: Identity) -> None:
        """Take a user back. Called once for each, after the session's files are removed. It raises nothing."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox from folders that exist; nothing runs in it yet.

        Called for each session, for each kernel that replaces another, and for each installation of packages. When it
        raises SandboxUnavailable, it has left nothing behind.
        """
        ...


@runtime_checkable
class FolderProvider(Protocol):
    """A provider whose sandboxes can show the user's folders. With another one, the setting `folders` is refused."""

    shows_folders: Literal["mounted", "as they are"]
    """Whether they are at their paths inside, read-only where they should be; or, where nothing is isolated, at the
    host's paths, and nothing keeps code from writing what the server's user can write."""


@runtime_checkable
class HostPathProvider(Protocol):
    """A provider whose sandboxes see the session folder at the host's path, and perhaps at `WORKSPACE` too."""

    @property
    def shows_workspace(self) -> bool:
        """Return whether they see it at `WORKSPACE`. If not, no text for clients names that path."""
        ...


class InstalledProvider(Provider, Protocol):
    """A provider from another package. The entry point names a class or a function that takes no arguments."""

    contract: int
    """The `CONTRACT` it was written for, as a number: `contract = 1`."""


@runtime_checkable
class DeviceProvider(Protocol):
    """A provider whose sandboxes show the `devices` of their specs, and no others. Without it, no session has a GPU."""

    shows_devices: bool
    """Always true; what counts is that it is there."""


@runtime_checkable
class ForkableProvider(Protocol):
    """A provider whose sandboxes can be forked, so sessions start as forks of a process that has everything imported.

    Sandboxes are nested in a forkable one, or in another nested one, which is then their parent. Closing a parent ends
    its own processes; the sandboxes nested in it live on.
    """

    def no_nesting_reason(self) -> str:
        """Say why forking does not work on this host; empty when it does.

        Called in a thread before the first forkable sandbox is opened, and by `belljar doctor`. It may try the host
        out, once, and remembers the outcome. It raises nothing: without nested sandboxes, sessions start cold.
        """
        ...

    async def open_forkable(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox in which others can be nested. Called once for each environment that sessions fork from.

        It raises SandboxUnavailable; sessions of that environment then start cold.
        """
        ...

    async def open_nested(self, spec: SandboxSpec, parent: Sandbox) -> ForkedSandbox:
        """Make a sandbox that the parent's processes can enter.

        The parent is a forkable or a nested sandbox, held open by a command in it. Called for each session that starts
        as a fork, and for each fork of a session. It raises SandboxUnavailable.
        """
        ...


# Sandboxes that one server hands to the next. A server deposits them with its supervisor, and the key of a deposit is
# all that the next server needs to restore the sandbox. Only the runtime asks whether a provider can hand over; all
# others talk to a `Handover` (`provisioning/handover.py`), which does nothing where that is off.


class RestoredSandbox(NamedTuple):
    """A sandbox that an earlier server deposited."""

    sandbox: Sandbox
    processes: Sequence[SandboxProcess]
    """The commands that were started in it, oldest first."""


class SandboxHandover(Protocol):
    """Deposits sandboxes for the next server, and restores those of an earlier one."""

    def deposit(self, sandbox: Sandbox) -> str:
        """Deposit a sandbox that a session's kernel runs in. Called again whenever a kernel was started in it.

        Return its key; empty when it cannot be handed over.
        """
        ...

    def key_of(self, sandbox: Sandbox) -> str:
        """Return the key that a sandbox is deposited under; empty when it is not."""
        ...

    def detach(self, sandbox: Sandbox) -> None:
        """Release a deposited sandbox without ending it. Called when the server stops."""
        ...

    def restore(self, key: str) -> RestoredSandbox:
        """Return a sandbox that an earlier server deposited; SandboxUnavailable when nothing of it is left."""
        ...

    async def end_unclaimed(self) -> None:
        """End the sandboxes that nobody has restored. Called once, after the last `restore`."""
        ...


@runtime_checkable
class HandoverProvider(Protocol):
    """A provider whose sandboxes can outlive the server, with their processes as the supervisor's children."""

    def hand_over_with(self, supervisor: "SupervisorClient") -> SandboxHandover:
        """Start all processes as the supervisor's children from now on. Called once, before anything is opened."""
        ...
