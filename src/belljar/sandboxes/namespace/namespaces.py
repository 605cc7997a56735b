"""Where bubblewrap is started, so that a process of one sandbox can enter another with its memory.

An origin's user namespace has those of its branches below it, and a process without capabilities may enter a user
namespace that is a child of its own and that its user owns. So a branch's namespaces are made by bubblewrap from within
the origin's user and pid namespaces, by the origin's user. Only command lines, descriptors and maps of users;
`enclosure.py` starts bubblewrap, and who enters does so by itself.
"""

import ctypes
import fcntl
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.child import Child, StartChild, start_child, start_own_child, wait_readable
from belljar.sandboxes.namespace.bwrap_args import (
    MAPPED,
    UserMap,
    encode,
    open_content,
    user_map_for_user,
    user_map_to_fork_from,
)
from belljar.sandboxes.namespace.hardening import Hardening
from belljar.sandboxes.namespace.orphan_reaper import OF_THIS_SERVER, OrphanReaper
from belljar.sandboxes.namespace.process import NamespaceProcess, only_child
from belljar.sandboxes.namespace.trial import BwrapTrial

Resources = AsyncExitStack
"""What is needed until bubblewrap has started."""

_NS_GET_USERNS = 0xB701
_MAP = 'read -r pid && printf "$1" > "/proc/$pid/uid_map" && printf "$1" > "/proc/$pid/gid_map"'
_ROOT = Identity(0, 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """What bubblewrap stands on."""

    footing: UserMap
    prefix: tuple[str, ...] = ()
    """What goes before bubblewrap on the command line. It names descriptors of the server: none may be passed on."""
    descriptors: tuple[int, ...] = ()
    """But for these, which what reads them closes."""
    hops: int = 0
    """How many processes are between the one that is started and bubblewrap."""
    maps: str = ""
    """The users of the new user namespace, and its groups alike; empty: bubblewrap maps the one it needs."""
    mapping: tuple[str, ...] = ()
    """A command that writes the maps of the process whose number is on its standard input; none: the server writes."""
    changes_user: bool = False
    """Bubblewrap's user is not the server's, which may then not bind its processes."""
    has_to_settle: bool = True
    """Others enter, and may only when all is in place."""
    is_left_alone: bool = False
    """What made the namespaces goes as soon as they are made: the origin's code sees it. They end with the origin's."""

    async def ready(self, _resources: Resources) -> "Layout":
        """Itself: nothing has to be opened for it."""
        return self


def trunk_layout(identity: Identity | None, numbers: range | None, stage: int, setpriv: str) -> Layout:
    """For a sandbox that is nobody's branch. For root: `numbers` are the users its branches may have."""
    if identity is None or numbers is None:
        return Layout(user_map_to_fork_from(MAPPED))
    user = ("--reuid", str(identity.uid), "--regid", str(identity.gid), "--clear-groups")
    return Layout(
        user_map_to_fork_from(_ROOT),
        prefix=(_nsenter(), f"--mount={_path(stage)}", "--", setpriv, *user, "--"),
        maps=_trunk_maps(identity.uid, numbers),
        changes_user=True,
    )


def fork_user_map(user: Identity, owner: Identity) -> UserMap:
    """For a branch whose code is `user`, where the origin's is `owner`, as numbered inside."""
    if user == owner:
        return user_map_to_fork_from(user)
    if owner != _ROOT:
        raise SandboxUnavailable(f"Branches of user {owner.uid} are that user's, not {user.uid}'s")
    return user_map_for_user(user)


class ParentSandbox:
    """The namespaces of a sandbox that others are made below; for as long as one is made."""

    def __init__(self, holder: NamespaceProcess, stage: int, resources: Resources) -> None:
        self._holder = holder
        self._is_roots = stage >= 0
        self._resources = resources
        self._users = self._open("user")
        self._pids = self._open("pid")
        self._stage = (f"--mount={_path(stage)}",) if self._is_roots else ()
        self._entering: tuple[str, ...] = (f"--pid={_path(self._pids)}", "--")
        if not self._is_roots:
            # bubblewrap puts a second user namespace below the one that owns its pid namespace: the code is in that.
            owner = fcntl.ioctl(self._pids, _NS_GET_USERNS)
            self._resources.callback(os.close, owner)
            self._entering = ("--preserve-credentials", f"--user={_path(owner)}", *self._entering)

    async def ground(self, user: Identity, owner: Identity) -> Layout:
        """For a branch: its code is `user`, the origin's code `owner`, both as numbered inside."""
        mounts = await self._mounts()
        if not self._is_roots:
            return Layout(user_map_to_fork_from(user), self._own_prefix(mounts), hops=1)
        enter = (_nsenter(), f"--user={_path(self._users)}", *_as(owner))
        prefix = (*enter, mounts, f"--pid={_path(self._pids)}", "--")
        footing = fork_user_map(user, owner)
        ground = Layout(footing, prefix, hops=1, changes_user=True)
        if not footing.has_to_drop:
            return ground
        maps = f"0 0 1\n{user.uid} {user.uid} 1\n"
        return replace(ground, maps=maps, mapping=(*enter, "--", "/bin/sh", "-c", _MAP, "belljar", maps))

    async def ground_out_of_sight(self, user: Identity, bubblewrap: Path, backdrop: Sequence[str]) -> Layout:
        """For a branch of a sandbox that runs a session's code, which is `user` as well.

        That code sees who makes the branch, and whoever is in its own user namespace as its own user it can look
        into: their root folder must not be the host's. So another bubblewrap puts up a backdrop first, from a user
        namespace above.
        """
        mounts = await self._mounts()
        told = open_content(encode(backdrop), self._resources)
        building = (str(bubblewrap), "--args", str(told), "--")
        credentials = _as(user) if self._is_roots else ("--preserve-credentials",)
        prefix = (
            *(_nsenter(), mounts, f"--net={_path(self._open('net'))}", *self._entering),
            *(*building, _nsenter(), *credentials, "--user=/proc/1/ns/user", "--"),
        )
        return Layout(
            user_map_to_fork_from(user),
            prefix,
            descriptors=(told,),
            hops=2,
            changes_user=self._is_roots,
            is_left_alone=True,
        )

    def _own_prefix(self, mounts: str) -> tuple[str, ...]:
        return (
            _nsenter(),
            mounts,
            *self._entering,
            _nsenter(),
            "--preserve-credentials",
            "--user=/proc/1/ns/user",
            "--",
        )

    async def _mounts(self) -> str:
        if self._holder.threshold is None:
            # On the origin's network: whoever sees a process may read what it could be connected to.
            entering = [_nsenter(), *self._stage, f"--net={_path(self._open('net'))}", *self._entering]
            self._holder.threshold = await open_proc_mount(entering, find_tool("unshare"))
        return f"--mount={_path(self._holder.threshold)}"

    def _open(self, kind: str) -> int:
        try:
            descriptor = os.open(f"/proc/{self._holder.first_pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxUnavailable(f"The {kind} namespace to branch from is gone: {error.strerror}") from error
        self._resources.callback(os.close, descriptor)
        # Asked afterwards: then the number was not a stranger's.
        if not self._holder.is_there():
            raise SandboxUnavailable("The sandbox to branch from has ended")
        return descriptor


def _nsenter() -> str:
    return find_tool("nsenter")


def _as(user: Identity) -> tuple[str, str]:
    return f"--setuid={user.uid}", f"--setgid={user.gid}"


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@cache
def find_tool(name: str) -> str:
    """One of util-linux's programs; empty where it is not installed."""
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") or ""


def _trunk_maps(root: int, numbers: range) -> str:
    """The trunk's user is root inside; every other number is itself, so that branches may have it."""
    parts = (range(numbers.start, min(root, numbers.stop)), range(max(root + 1, numbers.start), numbers.stop))
    lines = [f"0 {root} 1", *(f"{part.start} {part.start} {len(part)}" for part in parts if part)]
    return "".join(f"{line}\n" for line in lines)


# What a sandbox is made with, and where it stands: whose it is, and how deep below the server's namespaces.

MOST_LEVELS = 32
"""Of user namespaces, which are nested deeper than pid namespaces here."""


class NamespaceTools(NamedTuple):
    """What sandboxes are made with."""

    bubblewrap: Path
    seal: Hardening
    start: StartChild = start_own_child
    will: OrphanReaper | None = OF_THIS_SERVER
    """None where another process sees to what the server leaves."""


class NamespaceLevel(NamedTuple):
    """What a sandbox is to those that are branched from it."""

    user: Identity
    """Whom its code is, as numbered inside."""
    stage: int = -1
    """Root's view of the host's files, for bubblewrap to start in; negative where the server is an ordinary user."""
    levels: int = 0
    """How many user namespaces it is away from the server's."""


def nested_level(origin: NamespaceLevel, identity: Identity | None) -> NamespaceLevel:
    """Of a branch: whose it is, and how deep."""
    user = identity or origin.user
    footing = fork_user_map(user, origin.user)
    if (levels := origin.levels + footing.levels) > MOST_LEVELS:
        raise SandboxUnavailable(
            f"The branch would be {levels} user namespaces deep, Linux nests {MOST_LEVELS}",
            hint="Branch from an earlier one, or from the trunk",
        )
    return NamespaceLevel(user, origin.stage, levels)


# Where bubblewrap starts when it makes a branch: the host's files, with a /proc that counts as the origin does.
# bubblewrap looks its child up in /proc by the number that its own pid namespace gave it, which there is the
# origin's. Made once for each origin. Knows nothing of what is started there.


async def open_proc_mount(entering: Sequence[str], unshare: str) -> int:
    """A descriptor of a mount namespace with a new /proc; `entering` goes before a command of the origin's."""
    stdin, stdin_end = os.pipe()
    stdout, stdout_end = os.pipe()
    mounting = (unshare, "--mount", "--propagation=slave", "--mount-proc", "--", "/bin/sh", "-c", "echo; read -r _")
    try:
        child = start_child(
            [*entering, *mounting],
            environment={},
            folder="/",
            stdin=stdin,
            stdout=stdout_end,
            stderr=subprocess.DEVNULL,
            pass_fds=(),
        )
    except BaseException:
        os.close(stdout)
        os.close(stdin_end)
        raise
    finally:
        os.close(stdin)
        os.close(stdout_end)
    try:
        await wait_readable(stdout)
        if not os.read(stdout, 1):
            status = await child.wait()
            raise SandboxUnavailable(f"No /proc of the sandbox to branch from can be mounted: status {status}")
        return os.open(f"/proc/{only_child(child.pid)}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxUnavailable(f"The mounts to branch from cannot be reached: {error.strerror}") from error
    finally:
        os.close(stdout)
        # At the end of its input it ends; the namespace stays as long as the descriptor.
        os.close(stdin_end)
        await child.wait()
        child.release()


# The users of a new user namespace, mapped while bubblewrap waits for it. What maps to what is `branches.py`'s.


class UserMapWriter:
    """Made with bubblewrap's command line; nothing is written until its first process is known."""

    def __init__(self, ground: Layout) -> None:
        self._maps = ground.maps
        self._mapping = ground.mapping
        self._gate: int | None = None
        self._helper: Child | None = None
        self._told: int | None = None

    def words(self, stack: ExitStack) -> BwrapTrial:
        """What bubblewrap is told, if it has to wait."""
        if not self._maps:
            return BwrapTrial([], [])
        gate_end, self._gate = os.pipe()
        stack.callback(os.close, gate_end)
        # The second word is for its end: bubblewrap leaves the first to the command, and takes a `sync-fd` from it.
        return BwrapTrial(["--userns-block-fd", str(gate_end), "--sync-fd", str(gate_end)], [gate_end])

    def start(self) -> None:
        """Start whoever writes, while bubblewrap is starting too: the kernel wants it done from the namespace above."""
        if not self._mapping:
            return
        reading, self._told = os.pipe()
        try:
            self._helper = start_child(
                self._mapping,
                environment={},
                folder="/",
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(),
            )
        finally:
            os.close(reading)

    async def map(self, pid: int) -> None:
        """Write the maps of a process's user namespace, if there are any to write, and let bubblewrap go on."""
        if self._gate is None:
            return
        try:
            if self._helper is None:
                _write(pid, self._maps)
            else:
                await self._have_written(self._helper, pid)
            is_mapped = all(_read(pid, kind) for kind in _KINDS)
        except OSError as error:
            raise SandboxUnavailable(f"The users of a sandbox cannot be mapped: {error.strerror}") from error
        if not is_mapped:
            raise SandboxUnavailable("The users of a sandbox cannot be mapped from the one it is a branch of")
        os.write(self._gate, b"\n")

    async def _have_written(self, helper: Child, pid: int) -> None:
        if self._told is not None:
            os.write(self._told, f"{pid}\n".encode())
        await helper.wait()

    async def aclose(self) -> None:
        """Let everybody go; called once."""
        for descriptor in (self._gate, self._told):
            if descriptor is not None:
                os.close(descriptor)
        if self._helper is not None:
            # At the end of its input it ends.
            await self._helper.wait()
            self._helper.release()


_KINDS = ("uid_map", "gid_map")


def _write(pid: int, maps: str) -> None:
    for kind in _KINDS:
        descriptor = os.open(f"/proc/{pid}/{kind}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, maps.encode())
        finally:
            os.close(descriptor)


def _read(pid: int, kind: str) -> bytes:
    descriptor = os.open(f"/proc/{pid}/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


# A view of root's files that somebody without rights can walk through: what a sandbox needs, at the same paths.
# Data folders and interpreters of a server run by root may lie below folders that are root's alone, such as its home.
# In a mount namespace of its own each such folder is covered by an empty one that lets everybody through, with
# nothing below it but the trees that are needed. Modes and owners of the host's files stay as they are. Knows nothing
# of sandboxes.

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000


def open_root_view(trees: Iterable[Path]) -> int:
    """A descriptor of the mount namespace in which these trees can be reached. It lasts as long as the descriptor."""
    outcome: list[int | BaseException] = []

    def build() -> None:
        try:
            outcome.append(_build(sorted(set(trees), key=lambda path: len(path.parts))))
        except BaseException as error:  # noqa: BLE001 - raised again below, by whoever asked
            outcome.append(error)

    # A thread has its mounts, its working directory and its umask to itself once it asks, and takes them with it.
    thread = threading.Thread(target=build, name="stage")
    thread.start()
    thread.join()
    (answer,) = outcome
    if isinstance(answer, OSError):
        raise SandboxUnavailable(f"The mounts that sandboxes are made from cannot be made: {answer}") from answer
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _build(trees: list[Path]) -> int:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    os.umask(0o022)
    _mount(libc, "none", "/", _MS_REC | _MS_SLAVE)
    sources: dict[Path, int] = {}
    try:
        # All are opened first: what is covered later can then still be mounted.
        for tree in trees:
            sources[tree] = os.open(tree, os.O_PATH | os.O_CLOEXEC)
        for tree, source in sources.items():
            _place(libc, tree.resolve(), source)
        # The way by links, for those who were told it; most lead there by now.
        for tree, source in sources.items():
            _place(libc, tree, source)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for source in sources.values():
            os.close(source)


def _place(libc: Any, target: Path, source: int) -> None:
    closed = next((parent for parent in reversed(target.parents) if not _is_passable(parent)), None)
    if closed is not None:
        _mount(libc, "tmpfs", str(closed), _MS_NOSUID | _MS_NODEV, kind="tmpfs", options="mode=0711")
    if _is_there(target, source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(source).st_mode):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(libc, f"/proc/thread-self/fd/{source}", str(target), _MS_BIND | _MS_REC)


def _is_passable(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IXOTH)
    except FileNotFoundError:
        return True


def _is_there(target: Path, source: int) -> bool:
    try:
        return os.path.samestat(target.stat(), os.fstat(source))
    except OSError:
        return False


def _mount(libc: Any, source: str, target: str, flags: int, *, kind: str = "", options: str = "") -> None:
    words = [os.fsencode(word) if word else None for word in (source, target, kind, options)]
    _check(libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), target)


def _check(answer: int, name: str) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
