"""Where and as whom bubblewrap is started, so that a process of one sandbox can enter another with its memory.

A process without capabilities may enter a user namespace that is a child of its own and that its user owns. So
bubblewrap makes a nested sandbox's namespaces from within the parent's user and pid namespaces, as the parent's user.
This module makes the command lines, descriptors, user maps and mounts for that; `sandbox.py` starts bubblewrap, and
processes enter by themselves.
"""

import asyncio
import ctypes
import fcntl
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.child import StartChild, start_child, start_own_child, wait_readable
from belljar.sandboxes.namespace.bwrap_args import (
    MAPPED,
    SYSTEM,
    UserMap,
    encode,
    is_within,
    open_content,
    user_map_for_user,
    user_map_to_fork_from,
)
from belljar.sandboxes.namespace.hardening import Hardening
from belljar.sandboxes.namespace.orphan_reaper import OF_THIS_SERVER, OrphanReaper
from belljar.sandboxes.namespace.process import NamespaceProcess, only_child
from belljar.sandboxes.namespace.user_maps import UserMapHelper, open_map_helper

Resources = AsyncExitStack
"""What must stay open until bubblewrap has started."""

_NS_GET_USERNS = 0xB701
_ROOT = Identity(0, 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """How and where bubblewrap is started for one sandbox."""

    user_map: UserMap
    prefix: tuple[str, ...] = ()
    """What goes before bubblewrap on the command line. It names the server's descriptors by path; none is passed on."""
    descriptors: tuple[int, ...] = ()
    """The only descriptors that are passed on; whatever reads them closes them."""
    hops: int = 0
    """How many processes are between the one that is started and bubblewrap."""
    maps: str = ""
    """The map of the new user namespace, for users and groups alike; empty if bubblewrap maps the only one itself."""
    map_helper: UserMapHelper | None = None
    """The process that writes the maps; None if the server does."""
    changes_user: bool = False
    """Whether bubblewrap runs as another user than the server, which then may not set its processes' limits."""
    waits_for_mounts: bool = True
    """Whether to wait until all mounts are made, because other processes will enter this sandbox."""
    kills_maker: bool = False
    """Whether to kill bubblewrap afterwards, because the parent's code sees it. The sandbox ends with the parent."""

    async def ready(self, _resources: Resources) -> "Layout":
        """Return itself, because nothing has to be opened for it."""
        return self


def forkable_layout(identity: Identity | None, numbers: range | None, root_view: int, setpriv: str) -> Layout:
    """Return the layout of a forkable sandbox. `numbers` are the uids for nested ones, if the server is root."""
    if identity is None or numbers is None:
        return Layout(user_map_to_fork_from(MAPPED))
    user = ("--reuid", str(identity.uid), "--regid", str(identity.gid), "--clear-groups")
    return Layout(
        user_map_to_fork_from(_ROOT),
        prefix=(_nsenter(), f"--mount={_path(root_view)}", "--", setpriv, *user, "--"),
        maps=_forkable_maps(identity.uid, numbers),
        changes_user=True,
    )


def fork_user_map(user: Identity, owner: Identity) -> UserMap:
    """Return the map of a nested sandbox. `user` and `owner` are its user and its parent's, by ids inside."""
    if user == owner:
        return user_map_to_fork_from(user)
    if owner != _ROOT:
        raise SandboxUnavailable(f"A fork of a session of user {owner.uid} cannot run as user {user.uid}")
    return user_map_for_user(user)


class ParentSandbox:
    """The namespaces of a sandbox in which another is being nested."""

    def __init__(self, holder: NamespaceProcess, root_view: int, resources: Resources) -> None:
        self._holder = holder
        self._server_is_root = root_view >= 0
        self._resources = resources
        self._users = self._open("user")
        self._pids = self._open("pid")
        self._root_view = (f"--mount={_path(root_view)}",) if self._server_is_root else ()
        self._entering: tuple[str, ...] = (f"--pid={_path(self._pids)}", "--")
        if not self._server_is_root:
            # bubblewrap makes a second user namespace below the one that owns its pid namespace; the code is in that.
            owner_fd = fcntl.ioctl(self._pids, _NS_GET_USERNS)
            self._resources.callback(os.close, owner_fd)
            self._entering = ("--preserve-credentials", f"--user={_path(owner_fd)}", *self._entering)

    async def layout(self, user: Identity, owner: Identity) -> Layout:
        """Return the layout of a nested sandbox; `user` and `owner` are its user and its parent's, by ids inside."""
        mounts = await self._mounts()
        if not self._server_is_root:
            return Layout(user_map_to_fork_from(user), self._own_prefix(mounts), hops=1)
        enter = (_nsenter(), f"--user={_path(self._users)}", *_as(owner))
        prefix = (*enter, mounts, f"--pid={_path(self._pids)}", "--")
        user_map = fork_user_map(user, owner)
        layout = Layout(user_map, prefix, hops=1, changes_user=True)
        if not user_map.has_to_drop:
            return layout
        helper = self._holder.map_helper
        if helper is None or helper.has_ended:
            if helper is not None:
                helper.close()
            helper = await open_map_helper([*enter, "--"])
            if not self._holder.is_there():
                # It was killed meanwhile, and nobody would close what it gets now.
                helper.close()
                raise SandboxUnavailable("The sandbox to nest in has ended")
            self._holder.map_helper = helper
        return replace(layout, maps=f"0 0 1\n{user.uid} {user.uid} 1\n", map_helper=self._holder.map_helper)

    async def layout_out_of_sight(self, user: Identity, bubblewrap: Path, minimal_root: Sequence[str]) -> Layout:
        """Return the layout of a sandbox nested in one that runs a session's code, with the same `user`.

        That code sees the processes that make this sandbox, and it can look into those that are in its own user
        namespace as its own user; so their root folder must not be the host's. Therefore another bubblewrap first makes
        a minimal root folder for them, from a user namespace above.
        """
        mounts = await self._mounts()
        arguments_fd = open_content(encode(minimal_root), self._resources)
        building = (str(bubblewrap), "--args", str(arguments_fd), "--")
        credentials = _as(user) if self._server_is_root else ("--preserve-credentials",)
        prefix = (
            *(_nsenter(), mounts, f"--net={_path(self._open('net'))}", *self._entering),
            *(*building, _nsenter(), *credentials, "--user=/proc/1/ns/user", "--"),
        )
        return Layout(
            user_map_to_fork_from(user),
            prefix,
            descriptors=(arguments_fd,),
            hops=2,
            changes_user=self._server_is_root,
            kills_maker=True,
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
        if self._holder.proc_mount is None:
            # In the parent's network namespace, because code that sees a process may read its connections from /proc.
            entering = [_nsenter(), *self._root_view, f"--net={_path(self._open('net'))}", *self._entering]
            self._holder.proc_mount = await open_proc_mount(entering, find_tool("unshare"))
        return f"--mount={_path(self._holder.proc_mount)}"

    def _open(self, kind: str) -> int:
        try:
            descriptor = os.open(f"/proc/{self._holder.first_pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxUnavailable(f"The {kind} namespace to nest in is gone: {error.strerror}") from error
        self._resources.callback(os.close, descriptor)
        # Checked after opening, because then the pid still belonged to the holder when it was opened.
        if not self._holder.is_there():
            raise SandboxUnavailable("The sandbox to nest in has ended")
        return descriptor


def _nsenter() -> str:
    return find_tool("nsenter")


def _as(user: Identity) -> tuple[str, str]:
    return f"--setuid={user.uid}", f"--setgid={user.gid}"


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@cache
def find_tool(name: str) -> str:
    """Return the path of one of util-linux's programs; empty where it is not installed."""
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") or ""


def _forkable_maps(root: int, numbers: range) -> str:
    """Return the map in which its user is root; other numbers map to themselves, for nested sandboxes to have."""
    parts = (range(numbers.start, min(root, numbers.stop)), range(max(root + 1, numbers.start), numbers.stop))
    lines = [f"0 {root} 1", *(f"{part.start} {part.start} {len(part)}" for part in parts if part)]
    return "".join(f"{line}\n" for line in lines)


# Tools and nesting level

MOST_LEVELS = 32
"""Of user namespaces, which here are nested deeper than pid namespaces."""


class NamespaceTools(NamedTuple):
    """What sandboxes are made with."""

    bubblewrap: Path
    hardening: Hardening
    start: StartChild = start_own_child
    reaper: OrphanReaper | None = OF_THIS_SERVER
    """None where another process, the supervisor, ends what the server leaves."""


class NamespaceLevel(NamedTuple):
    """What a nested sandbox has to know of the sandbox it is made from."""

    user: Identity
    """The user its code runs as, as numbered inside."""
    root_view: int = -1
    """A mount namespace for bubblewrap to start in, from `open_root_view`; negative where the server is not root."""
    levels: int = 0
    """How many user namespaces it is below the server's."""


def nested_level(parent: NamespaceLevel, identity: Identity | None) -> NamespaceLevel:
    """Return the level of a nested sandbox: its user and its depth."""
    user = identity or parent.user
    user_map = fork_user_map(user, parent.user)
    if (levels := parent.levels + user_map.levels) > MOST_LEVELS:
        raise SandboxUnavailable(
            f"The nested sandbox would be {levels} user namespaces deep, Linux nests {MOST_LEVELS}",
            hint="Fork an earlier one, or start a new session",
        )
    return NamespaceLevel(user, parent.root_view, levels)


# The mounts in which bubblewrap makes a nested sandbox: the host's files, with a /proc of the parent's pid namespace,
# because bubblewrap looks its child up in /proc by the pid that it has in its own pid namespace. Made once for each
# parent.


async def open_proc_mount(entering: Sequence[str], unshare: str) -> int:
    """Return a mount namespace with a new /proc, as a descriptor. `entering` is the prefix that enters the parent."""
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
    opened = -1
    try:
        await wait_readable(stdout)
        if not os.read(stdout, 1):
            status = await child.wait()
            raise SandboxUnavailable(f"No /proc of the sandbox to nest in can be mounted: status {status}")
        opened = os.open(f"/proc/{only_child(child.pid)}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxUnavailable(f"The mounts to nest in cannot be reached: {error.strerror}") from error
    finally:
        os.close(stdout)
        # The shell ends at the end of its input; the namespace lasts as long as the descriptor.
        os.close(stdin_end)
        try:
            await child.reap()
        except asyncio.CancelledError:
            if opened >= 0:
                os.close(opened)
            raise
    return opened


# A view of root's files through which a user without rights can pass, with what a sandbox needs at the same paths.
# Data folders and interpreters of a server that root runs may lie below folders that only root may enter, such as its
# home. In a separate mount namespace each such folder is covered by an empty one that everybody may pass through, and
# below it only the needed trees are mounted. Modes and owners of the host's files do not change. The
# host's other mounts are not in it: bubblewrap reads the whole table of mounts again for each mount that it makes.

_CLONE_NEWNS = 0x00020000
_MNT_DETACH = 2
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000


_MACHINE = ("/etc", "/dev", "/proc")


def open_root_view(trees: Iterable[Path]) -> int:
    """Return a mount namespace, as a descriptor, in which these trees are reachable. It lasts as long as that."""
    outcome: list[int | BaseException] = []

    def build() -> None:
        try:
            outcome.append(_build(sorted(set(trees), key=lambda path: len(path.parts))))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the calling thread
            outcome.append(error)

    # In a thread, because after unshare its mounts, working directory and umask are its own, and go with it.
    thread = threading.Thread(target=build, name="root-view")
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
        # Open all trees first, because those that get covered can then still be mounted.
        for tree in trees:
            sources[tree] = os.open(tree, os.O_PATH | os.O_CLOEXEC)
        _detach_all_but(libc, {*map(str, trees), *(str(tree.resolve()) for tree in trees), *SYSTEM, *_MACHINE})
        for tree, source in sources.items():
            _place(libc, tree.resolve(), source)
        # Then the paths as given, through links, for those who use them; most lead to the same place by now.
        for tree, source in sources.items():
            _place(libc, tree, source)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for source in sources.values():
            os.close(source)


def _detach_all_but(libc: Any, needed: set[str]) -> None:
    """Detach every mount that neither is on the way to one of these paths nor lies below one."""
    detached: list[str] = []
    for line in Path("/proc/thread-self/mountinfo").read_bytes().splitlines():
        # Spaces are escaped here, so that a mount point with one is not found and stays.
        point = os.fsdecode(line.split()[4])
        # What lies below a detached mount is gone with it; its path may lead somewhere else by now.
        if any(is_within(point, gone) for gone in detached):
            continue
        if not any(is_within(path, point) or is_within(point, path) for path in needed):
            libc.umount2(os.fsencode(point), _MNT_DETACH)
            detached.append(point)


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
