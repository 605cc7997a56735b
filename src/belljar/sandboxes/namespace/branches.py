"""Where bubblewrap is started, so that a process of one sandbox can enter another with its memory.

An origin's user namespace has those of its branches below it, and a process without capabilities may enter a user
namespace that is a child of its own and that its user owns. So a branch's namespaces are made by bubblewrap from within
the origin's user and pid namespaces, by the origin's user. Only command lines, descriptors and maps of users;
`enclosure.py` starts bubblewrap, and who enters does so by itself.
"""

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.namespace.bubblewrap import (
    MAPPED,
    Footing,
    encode,
    footing_for_user,
    footing_to_branch_from,
    open_content,
)
from belljar.sandboxes.namespace.enclosed import NamespaceProcess
from belljar.sandboxes.namespace.thresholds import open_threshold

Resources = AsyncExitStack
"""What is needed until bubblewrap has started."""

_NS_GET_USERNS = 0xB701
_MAP = 'read -r pid && printf "$1" > "/proc/$pid/uid_map" && printf "$1" > "/proc/$pid/gid_map"'
_ROOT = Identity(0, 0)


@dataclass(frozen=True, slots=True)
class Ground:
    """What bubblewrap stands on."""

    footing: Footing
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

    async def ready(self, _resources: Resources) -> "Ground":
        """Itself: nothing has to be opened for it."""
        return self


def trunk_ground(identity: Identity | None, numbers: range | None, stage: int, setpriv: str) -> Ground:
    """For a sandbox that is nobody's branch. For root: `numbers` are the users its branches may have."""
    if identity is None or numbers is None:
        return Ground(footing_to_branch_from(MAPPED))
    user = ("--reuid", str(identity.uid), "--regid", str(identity.gid), "--clear-groups")
    return Ground(
        footing_to_branch_from(_ROOT),
        prefix=(_nsenter(), f"--mount={_path(stage)}", "--", setpriv, *user, "--"),
        maps=_trunk_maps(identity.uid, numbers),
        changes_user=True,
    )


def branch_footing(user: Identity, owner: Identity) -> Footing:
    """For a branch whose code is `user`, where the origin's is `owner`, as numbered inside."""
    if user == owner:
        return footing_to_branch_from(user)
    if owner != _ROOT:
        raise SandboxUnavailable(f"Branches of user {owner.uid} are that user's, not {user.uid}'s")
    return footing_for_user(user)


class Origin:
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

    async def ground(self, user: Identity, owner: Identity) -> Ground:
        """For a branch: its code is `user`, the origin's code `owner`, both as numbered inside."""
        mounts = await self._mounts()
        if not self._is_roots:
            return Ground(footing_to_branch_from(user), self._own_prefix(mounts), hops=1)
        enter = (_nsenter(), f"--user={_path(self._users)}", *_as(owner))
        prefix = (*enter, mounts, f"--pid={_path(self._pids)}", "--")
        footing = branch_footing(user, owner)
        ground = Ground(footing, prefix, hops=1, changes_user=True)
        if not footing.has_to_drop:
            return ground
        maps = f"0 0 1\n{user.uid} {user.uid} 1\n"
        return replace(ground, maps=maps, mapping=(*enter, "--", "/bin/sh", "-c", _MAP, "belljar", maps))

    async def ground_out_of_sight(self, user: Identity, bubblewrap: Path, backdrop: Sequence[str]) -> Ground:
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
        return Ground(
            footing_to_branch_from(user),
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
            self._holder.threshold = await open_threshold(entering, find_tool("unshare"))
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
