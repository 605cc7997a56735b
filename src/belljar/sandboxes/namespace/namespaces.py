"""Where and as whom bubblewrap is started, so that a process of one sandbox can enter another with its memory.

A process without capabilities may enter a user namespace that is a child of its own and that its user owns. So
bubblewrap makes a nested sandbox's namespaces from within the parent's user and pid namespaces, as the parent's user.
This module makes the command lines, descriptors, user maps and mounts for that; `sandbox.py` starts bubblewrap, and
processes enter by themselves.
"""

import asyncio
import fcntl
import os
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.child import StartChild, start_child, start_own_child, wait_readable
from belljar.sandboxes.namespace.bwrap_args import (
    MAPPED,
    UserMap,
    encode,
    open_content,
    user_map_for_user,
    user_map_to_fork_from,
)
from belljar.sandboxes.namespace.hardening import Hardening
from belljar.sandboxes.namespace.process import OF_THIS_SERVER, NamespaceProcess, OrphanReaper, only_child
from belljar.sandboxes.namespace.user_namespaces import find_tool

Resources = AsyncExitStack
"""What must stay open until bubblewrap has started."""

_NS_GET_USERNS = 0xB701
_ROOT = Identity(0, 0)


@dataclass(frozen=True, slots=True)
class BwrapLaunch:
    """How and where bubblewrap is started for one sandbox."""

    user_map: UserMap
    prefix: tuple[str, ...] = ()
    """What goes before bubblewrap on the command line. It names the server's descriptors by path; none is passed on."""
    descriptors: tuple[int, ...] = ()
    """The only descriptors that are passed on; whatever reads them closes them."""
    launcher_depth: int = 0
    """How many processes are between the one that is started and bubblewrap."""
    maps: str = ""
    """The uid and gid map, one text for both; empty if bubblewrap writes it."""
    changes_user: bool = False
    """Whether bubblewrap runs as another user than the server, which then may not set its processes' limits."""
    waits_for_mounts: bool = True
    """Whether to wait until all mounts are made, because other processes will enter this sandbox."""
    is_shared: bool = False
    """Whether the sandboxes of several sessions will be nested in this one."""
    kills_bubblewrap: bool = False
    """Whether to kill bubblewrap once the sandbox is made, because the parent's code could see it."""


def forkable_launch(identity: Identity | None, numbers: range | None, root_view: int, setpriv: str) -> BwrapLaunch:
    """Return how to launch a forkable sandbox. `numbers` are the uids for nested ones, if the server is root."""
    if identity is None or numbers is None:
        return BwrapLaunch(user_map_to_fork_from(MAPPED), is_shared=True)
    user = ("--reuid", str(identity.uid), "--regid", str(identity.gid), "--clear-groups")
    return BwrapLaunch(
        user_map_to_fork_from(_ROOT),
        prefix=(_nsenter(), f"--mount={_path(root_view)}", "--", setpriv, *user, "--"),
        maps=_forkable_maps(identity.uid, numbers),
        changes_user=True,
        is_shared=True,
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
        self._is_server_root = root_view >= 0
        self._resources = resources
        self._users = self._open("user")
        self._pids = self._open("pid")
        self._root_view = (f"--mount={_path(root_view)}",) if self._is_server_root else ()
        self._entering: tuple[str, ...] = (f"--pid={_path(self._pids)}", "--")
        if not self._is_server_root:
            # bubblewrap makes two user namespaces: the outer one owns the pid namespace, the code is in the inner one.
            owner_fd = fcntl.ioctl(self._pids, _NS_GET_USERNS)
            self._resources.callback(os.close, owner_fd)
            self._entering = ("--preserve-credentials", f"--user={_path(owner_fd)}", *self._entering)

    async def launch(self, user: Identity, owner: Identity) -> BwrapLaunch:
        """Return how to launch a nested sandbox; `user` and `owner` are its user and its parent's, by ids inside."""
        mounts = await self._mounts()
        if not self._is_server_root:
            return BwrapLaunch(user_map_to_fork_from(user), self._own_prefix(mounts), launcher_depth=1)
        enter = (_nsenter(), f"--user={_path(self._users)}", *_as(owner))
        prefix = (*enter, mounts, f"--pid={_path(self._pids)}", "--")
        user_map = fork_user_map(user, owner)
        # The sandbox's own root, and its user.
        maps = f"0 0 1\n{user.uid} {user.uid} 1\n" if user_map.has_to_drop else ""
        return BwrapLaunch(user_map, prefix, launcher_depth=1, maps=maps, changes_user=True)

    async def launch_inside_session(self, user: Identity, bubblewrap: Path, minimal_root: Sequence[str]) -> BwrapLaunch:
        """Return how to launch a sandbox nested in one that runs a session's code, with the same `user`.

        That code sees the processes that make this sandbox, and it can look into those that are in its own user
        namespace as its own user; so their root folder must not be the host's. Therefore another bubblewrap first makes
        a minimal root folder for them, from a user namespace above.
        """
        mounts = await self._mounts()
        arguments_fd = open_content(encode(minimal_root), self._resources)
        building = (str(bubblewrap), "--args", str(arguments_fd), "--")
        credentials = _as(user) if self._is_server_root else ("--preserve-credentials",)
        prefix = (
            *(_nsenter(), mounts, f"--net={_path(self._open('net'))}", *self._entering),
            *(*building, _nsenter(), *credentials, "--user=/proc/1/ns/user", "--"),
        )
        return BwrapLaunch(
            user_map_to_fork_from(user),
            prefix,
            descriptors=(arguments_fd,),
            launcher_depth=2,
            changes_user=self._is_server_root,
            kills_bubblewrap=True,
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
        return f"--mount={_path(await self._proc_mount())}"

    async def _proc_mount(self) -> int:
        if self._holder.proc_mount is None:
            # In the parent's network namespace, because code that sees a process may read its connections from /proc.
            entering = [_nsenter(), *self._root_view, f"--net={_path(self._open('net'))}", *self._entering]
            self._holder.proc_mount = await open_proc_mount(entering, find_tool("unshare"))
        return self._holder.proc_mount

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


def _forkable_maps(root: int, numbers: range) -> str:
    """Return the map in which its user is root; other numbers map to themselves, for nested sandboxes to have."""
    parts = (range(numbers.start, min(root, numbers.stop)), range(max(root + 1, numbers.start), numbers.stop))
    lines = [f"0 {root} 1", *(f"{part.start} {part.start} {len(part)}" for part in parts if part)]
    return "".join(f"{line}\n" for line in lines)


# Tools and nesting level

MAX_LEVELS = 32
"""How deep Linux nests user namespaces; ours are nested deeper than our pid namespaces."""


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
    depth: int = 0
    """How many user namespaces it is below the server's."""


def nested_level(parent: NamespaceLevel, identity: Identity | None) -> NamespaceLevel:
    """Return the level of a nested sandbox: its user and its depth."""
    user = identity or parent.user
    user_map = fork_user_map(user, parent.user)
    if (depth := parent.depth + user_map.levels) > MAX_LEVELS:
        raise SandboxUnavailable(
            f"The nested sandbox would be {depth} user namespaces deep, Linux nests {MAX_LEVELS}",
            hint="Fork an earlier one, or start a new session",
        )
    return NamespaceLevel(user, parent.root_view, depth)


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
