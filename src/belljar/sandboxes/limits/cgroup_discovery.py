"""Finds which control groups this host offers, and where belljar may make groups. Reads only; it changes nothing.

There are two hierarchies: v1 has one tree per controller; v2, the unified one, has a single tree whose groups pass
controllers on to the groups below them. Knows nothing of sessions.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from belljar.sandboxes.limits.table import CONTROLLERS

LEAF = "belljar-server"
"""The group that the server moves itself to in a delegated v2 group, because a group with groups below holds nobody."""


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The kind of hierarchy, and for each controller we use the folder below which groups are made."""

    kind: Literal["v1", "v2", "hybrid", "none"]
    folders: dict[str, Path] = field(default_factory=dict[str, Path])
    is_unified: bool = False
    """Whether all folders are the same one, of the v2 hierarchy."""
    has_tenants: bool = False
    """Whether the v2 folder holds processes, which must move into a leaf before it can pass its controllers on."""

    def is_writable(self, controller: str) -> bool:
        """Return whether this process can make a group with this controller's limit."""
        return controller in self.folders and _is_ours(self.folders[controller])

    def usable(self) -> dict[str, Path]:
        """Return the folders of the controllers in which this process can make groups."""
        return {name: self.folders[name] for name in CONTROLLERS if self.is_writable(name)}


@dataclass(frozen=True, slots=True)
class _Mount:
    point: Path
    is_unified: bool
    options: set[str]


def read_control_groups(process: Path = Path("/proc/self")) -> ControlGroups:
    """Read the mounts and the group membership of a process."""
    try:
        mounts = _mounts((process / "mountinfo").read_text())
        membership = _membership((process / "cgroup").read_text())
    except OSError:
        return ControlGroups("none")
    if not mounts:
        return ControlGroups("none")
    has_unified = any(mount.is_unified for mount in mounts)
    has_old = not all(mount.is_unified for mount in mounts)
    kind = "hybrid" if has_unified and has_old else "v2" if has_unified else "v1"
    old = _old_folders([mount for mount in mounts if not mount.is_unified], membership)
    if not old and has_unified:
        mount = next(mount for mount in mounts if mount.is_unified)
        return _unified(kind, mount, membership.get("", "/"), process)
    return ControlGroups(kind, old)


def read_membership(process: Path) -> ControlGroups:
    """Return the groups that a process itself is in, by controller, where their folders are visible."""
    try:
        mounts = _mounts(Path("/proc/self/mountinfo").read_text())
        membership = _membership((process / "cgroup").read_text())
    except OSError:
        return ControlGroups("none")
    old = {
        name: mount.point / membership.get(name, "/").lstrip("/")
        for mount in mounts
        for name in CONTROLLERS
        if not mount.is_unified and name in mount.options
    }
    if old:
        return ControlGroups("v1", {name: folder for name, folder in old.items() if folder.is_dir()})
    folders: dict[str, Path] = {}
    for mount in mounts:
        own = mount.point / membership.get("", "/").lstrip("/")
        folders = {name: own for name in CONTROLLERS if name in _words(own / "cgroup.controllers")}
    return ControlGroups("v2", folders, is_unified=True)


def _mounts(mountinfo: str) -> list[_Mount]:
    mounts: list[_Mount] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            mounts.append(_Mount(Path(left.split(" ")[4]), kind == "cgroup2", set(options.split(","))))
    return mounts


def _membership(text: str) -> dict[str, str]:
    """Return each controller's path below its mount; the v2 hierarchy has the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _own_folder(mount: _Mount, path: str) -> Path:
    # In a container the path is the host's and does not exist below this mount; the mount's top is our group then.
    folder = mount.point / path.lstrip("/")
    return folder if folder.is_dir() else mount.point


def _old_folders(mounts: list[_Mount], membership: dict[str, str]) -> dict[str, Path]:
    """Return the group we are in, whose limits then hold for sessions too, or the tree's top if only that is ours."""
    folders: dict[str, Path] = {}
    for mount in mounts:
        for name in CONTROLLERS:
            if name in mount.options and name not in folders:
                own = _own_folder(mount, membership.get(name, "/"))
                folders[name] = mount.point if _is_ours(mount.point) and not _is_ours(own) else own
    return folders


def read_own_group(process: Path = Path("/proc/self")) -> Path | None:
    """Return the v2 group that a process is in; None where sessions' groups are not made in the v2 hierarchy."""
    if not read_control_groups(process).is_unified:
        return None
    mount = next(mount for mount in _mounts((process / "mountinfo").read_text()) if mount.is_unified)
    return _own_folder(mount, _membership((process / "cgroup").read_text()).get("", "/"))


def _unified(kind: Literal["v1", "v2", "hybrid"], mount: _Mount, path: str, process: Path) -> ControlGroups:
    """Return our own group if it can pass controllers on, else the nearest group above that does or can."""
    own = _own_folder(mount, path)
    if own.name == LEAF:
        own = own.parent
    offered = _controllers(own)
    if offered and offered <= _passed_on(own):
        return ControlGroups(kind, _all_in(own, offered), is_unified=True)
    if offered and _is_ours(own) and (_is_root(own) or _can_be_emptied(own, mount, process)):
        return ControlGroups(kind, _all_in(own, offered), is_unified=True, has_tenants=not _is_root(own))
    for above in own.parents:
        if not above.is_relative_to(mount.point) or not _is_ours(above):
            break
        # A group without processes of its own, and the root of all with any, can pass on what it does not yet.
        is_free = _is_root(above) or not _words(above / "cgroup.procs")
        found = _passed_on(above) | (_controllers(above) if is_free else set[str]())
        if "memory" in found:
            return ControlGroups(kind, _all_in(above, found), is_unified=True)
    # No group of ours passes controllers on: name folders that cannot be used, so that `doctor` can say so.
    return ControlGroups(kind, dict.fromkeys(_all_in(own, offered), own / LEAF), is_unified=True)


def _controllers(folder: Path) -> set[str]:
    return {*CONTROLLERS} & {*_words(folder / "cgroup.controllers")}


def _passed_on(folder: Path) -> set[str]:
    return {*CONTROLLERS} & {*_words(folder / "cgroup.subtree_control")}


def _all_in(folder: Path, controllers: set[str]) -> dict[str, Path]:
    return {name: folder for name in CONTROLLERS if name in controllers}


def _is_root(folder: Path) -> bool:
    """Return whether it is the root of the hierarchy, which alone may hold processes and pass controllers on."""
    return (folder / "cgroup.procs").exists() and not (folder / "cgroup.type").exists()


def _can_be_emptied(own: Path, mount: _Mount, process: Path) -> bool:
    """Return whether all processes of our group may move: those of our container, or else only those above us."""
    pids = {int(word) for word in _words(own / "cgroup.procs")}
    # The kernel shows processes of other pid namespaces as 0, and they cannot be moved by us.
    return 0 not in pids and (own == mount.point or pids <= _ancestry(process))


def _ancestry(process: Path) -> set[int]:
    """Return the process and its ancestors: they may share its group, as `uv run` does which started the server."""
    ancestry: set[int] = set()
    folder = process
    while (parent := _parent(folder)) is not None:
        pid, above = parent
        ancestry.add(pid)
        folder = process.parent / str(above)
        if above in ancestry or above == 0:
            break
    return ancestry


def _parent(folder: Path) -> tuple[int, int] | None:
    try:
        text = (folder / "stat").read_text(errors="replace")
        return int(text.split(" ", 1)[0]), int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _is_ours(folder: Path) -> bool:
    """Return whether this process can make groups there and move processes out of it."""
    entry = folder / "cgroup.procs"
    return os.access(folder, os.W_OK) and (os.access(entry, os.W_OK) or not entry.exists())
