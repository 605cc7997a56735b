"""Host users for the sessions of a server that runs as root: each session gets a number that nobody else has.

No account is made. The numbers come from a range that neither accounts nor containers use, or, where the server itself
runs in a user namespace with few numbers, from the upper part of what it has. They are unique among the live sessions
of this process and random among servers; two sessions that get the same number by chance are still separated by their
namespaces.
"""

import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.files.private import make_missing
from belljar.sandboxes.base import HostFolder, Identity, SandboxSpec

# https://systemd.io/UIDS-GIDS: above what containers get, below the numbers that some programs read as negative.
_FREE = range(0x70000000, 0x7FFFFFFF)
# Accounts of people and of the system; then systemd's homes, services and containers, nobody, and 16-bit minus one.
_TAKEN = (range(10_000), range(60_000, 65_537))
_FEWEST = 1_024
_LAYER_MODE = 0o750
_TRIES = 1_000

_UID_MAP = Path("/proc/self/uid_map")
_GID_MAP = Path("/proc/self/gid_map")


class HostUsers:
    """Gives out user numbers. Not thread-safe."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self._taken: set[int] = set()

    def take(self) -> Identity:
        """Return a user that no live session has."""
        for _ in range(_TRIES):
            number = self.numbers.start + secrets.randbelow(len(self.numbers))
            if number not in self._taken and (self.numbers == _FREE or not _has_account(number)):
                self._taken.add(number)
                return Identity(number, number)
        raise SandboxUnavailable(
            f"{len(self._taken)} of the {len(self.numbers)} host users for sessions are taken",
            hint="End sessions, or give the server's user namespace more users",
        )

    def take_again(self, identity: Identity) -> None:
        """Mark a user as taken that an earlier server gave to a session that lives on."""
        self._taken.add(identity.uid)

    def release(self, identity: Identity) -> None:
        """Free a user, so that it may be given out again; may be called twice."""
        self._taken.discard(identity.uid)


def find_host_users() -> HostUsers | None:
    """Return the users this process may give out; None when its user namespace has too few."""
    try:
        numbers = usable_numbers(_UID_MAP.read_text(), _GID_MAP.read_text())
    except OSError:
        return None
    return HostUsers(numbers) if numbers else None


def is_given_out(uid: int) -> bool:
    """Return whether sessions, of this server or of another, get this number, and no account has it."""
    numbers = _given_out()
    return uid in numbers and (numbers == _FREE or not _has_account(uid))


@cache
def _given_out() -> range:
    identities = find_host_users()
    return identities.numbers if identities else range(0)


def hand_over(spec: SandboxSpec, identity: Identity) -> None:
    """Give the session's folders to its user. Until then they are the server's, so nobody can replace one by a link."""
    for path in spec.readable:
        if not _is_open_to(path.stat(), identity):
            raise SandboxUnavailable(f"Tree is closed to the session's user: {path}", hint=f"chmod -R o+rX {path}")
    for shared in spec.folders:
        if why := closed_to_others(shared):
            raise SandboxUnavailable(f"folder {shared.path} cannot be shown: {why}", hint=f"chmod o+rx {shared.path}")
    for folder in (spec.workspace, spec.scratch, spec.home):
        os.chown(folder, identity.uid, identity.gid, follow_symlinks=False)


def closed_to_others(folder: HostFolder) -> str:
    """Say why a session that has a user of its own cannot use a folder; empty when it can."""
    mode = os.stat(folder.path).st_mode if os.path.isdir(folder.path) else 0o777  # noqa: PTH112, PTH116 - a host path
    needed = stat.S_IROTH | stat.S_IXOTH | (stat.S_IWOTH if folder.is_writable else 0)
    if mode & needed == needed:
        return ""
    lacking = "write" if mode & 0o005 == 0o005 else "read"
    return f"others may not {lacking} it, and each session of a server that root runs has a user of its own"


def _is_open_to(status: os.stat_result, identity: Identity) -> bool:
    is_own_group = status.st_gid == identity.gid and status.st_mode & stat.S_IRGRP
    return bool(status.st_mode & stat.S_IROTH or is_own_group)


def make_layer(folder: Path, identity: Identity | None) -> None:
    """Make the folder of a session's packages. It belongs to the server; only the session's user can read it."""
    make_missing(folder)
    if identity is not None:
        os.chown(folder, -1, identity.gid)
        folder.chmod(_LAYER_MODE)


def usable_numbers(uid_map: str, gid_map: str) -> range | None:
    """Return the numbers to take from, valid as uid and as gid. The maps are in the form of user_namespaces(7)."""
    mapped = [_overlap(uids, gids) for uids in _mapped(uid_map) for gids in _mapped(gid_map) if _overlap(uids, gids)]
    if any(_overlap(numbers, _FREE) == _FREE for numbers in mapped):
        return _FREE
    candidates = (_upper_part(numbers) for numbers in mapped)
    widest = max(candidates, key=len, default=range(0))
    return widest if len(widest) >= _FEWEST else None


def _mapped(text: str) -> Iterator[range]:
    for line in text.splitlines():
        inside, _, count = map(int, line.split())
        yield range(inside, inside + count)


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _upper_part(numbers: range) -> range:
    """Return the widest part of the upper half that avoids the numbers in `_TAKEN`."""
    parts = [range((numbers.start + numbers.stop) // 2, min(numbers.stop, _FREE.stop))]
    for taken in _TAKEN:
        parts = [
            piece
            for part in parts
            for piece in (range(part.start, min(part.stop, taken.start)), range(max(part.start, taken.stop), part.stop))
        ]
    return max(parts, key=len)


def _has_account(number: int) -> bool:
    for find in (pwd.getpwuid, grp.getgrgid):
        try:
            find(number)
        except KeyError:
            continue
        return True
    return False
