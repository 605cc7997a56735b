"""Which control groups this host offers us and where groups of ours may be made. Reads only; it changes nothing.

Two worlds: the old one (v1) has a tree a controller, the unified one (v2) has one tree whose groups pass controllers on
to the groups below them. Knows nothing of sessions or limits.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CONTROLLERS = ("memory", "cpu", "pids")
LEAF = "belljar-server"
"""Where the server itself moves in a unified group that was given to it: a group with groups below holds nobody."""


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The kind of hierarchy, and for each controller of ours that exists the folder below which groups are made."""

    kind: Literal["v1", "v2", "hybrid", "none"]
    folders: dict[str, Path] = field(default_factory=dict[str, Path])
    is_unified: bool = False
    """Whether the folders are one and the same, of the unified hierarchy."""
    tenants: tuple[int, ...] = ()
    """Processes that must move into a leaf before that folder can pass its controllers on."""

    def is_writable(self, controller: str) -> bool:
        """Whether a group with this limit could be made."""
        return controller in self.folders and _is_ours(self.folders[controller])

    def usable(self) -> dict[str, Path]:
        """The folders of the controllers that are ours to use."""
        return {name: self.folders[name] for name in CONTROLLERS if self.is_writable(name)}


@dataclass(frozen=True, slots=True)
class _Mount:
    point: Path
    is_unified: bool
    options: set[str]


def read_control_groups(process: Path = Path("/proc/self")) -> ControlGroups:
    """Look at the mounts and the membership of a process."""
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
    """The groups that a process is in itself, by controller, where their folders can be seen."""
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
    """Controller to path below its mount; the unified hierarchy is the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _own_folder(mount: _Mount, path: str) -> Path:
    # In a container the path is the host's and means nothing below this mount: its top is our group then.
    folder = mount.point / path.lstrip("/")
    return folder if folder.is_dir() else mount.point


def _old_folders(mounts: list[_Mount], membership: dict[str, str]) -> dict[str, Path]:
    """The top of each tree where we may write, as container engines do; else the group that was given to us."""
    folders: dict[str, Path] = {}
    for mount in mounts:
        for name in CONTROLLERS:
            if name in mount.options and name not in folders:
                folders[name] = mount.point if _is_ours(mount.point) else _own_folder(mount, membership.get(name, "/"))
    return folders


def _unified(kind: Literal["v1", "v2", "hybrid"], mount: _Mount, path: str, process: Path) -> ControlGroups:
    """Our own group if it can pass controllers on, else the nearest above it that does so already and is ours."""
    own = _own_folder(mount, path)
    if own.name.startswith(LEAF):
        own = own.parent
    offered = _words(own / "cgroup.controllers")
    folders = {name: own for name in CONTROLLERS if name in offered}
    if folders.keys() <= set(_words(own / "cgroup.subtree_control")):
        return ControlGroups(kind, folders, is_unified=True)
    tenants = [int(word) for word in _words(own / "cgroup.procs")]
    if _is_ours(own) and set(tenants) <= _kin(process):
        return ControlGroups(kind, folders, is_unified=True, tenants=tuple(tenants))
    for above in own.parents:
        if not above.is_relative_to(mount.point) or not _is_ours(above):
            break
        passed_on = _words(above / "cgroup.subtree_control")
        if "memory" in passed_on:
            return ControlGroups(kind, {name: above for name in CONTROLLERS if name in passed_on}, is_unified=True)
    # Where nothing of ours passes them on, the folders are named so that `doctor` can say so.
    return ControlGroups(kind, dict.fromkeys(folders, own / LEAF), is_unified=True)


def _kin(process: Path) -> set[int]:
    """The process and those it descends from: whoever started the server in a group of its own, `uv run` say."""
    kin: set[int] = set()
    folder = process
    while (parent := _parent(folder)) is not None:
        pid, above = parent
        kin.add(pid)
        folder = process.parent / str(above)
        if above in kin or above <= 1:
            break
    return kin


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
    """Whether groups can be made there and processes be moved from there."""
    entrance = folder / "cgroup.procs"
    return os.access(folder, os.W_OK) and (os.access(entrance, os.W_OK) or not entrance.exists())
