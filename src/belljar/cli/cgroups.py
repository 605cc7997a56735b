"""Which control groups this host offers us, read from /proc; it changes nothing."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CONTROLLERS = ("memory", "cpu", "pids")


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The kind of hierarchy, and for each controller of ours that exists the folder that governs this process."""

    kind: Literal["v1", "v2", "hybrid", "none"]
    folders: dict[str, Path] = field(default_factory=dict[str, Path])

    def is_writable(self, controller: str) -> bool:
        """Whether a group with this limit could be made below ours."""
        return controller in self.folders and os.access(self.folders[controller], os.W_OK)


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
    folders: dict[str, Path] = {}
    for mount in mounts:
        for controller, path in _offered(mount, membership).items():
            folders.setdefault(controller, path)
    kinds = {mount.is_unified for mount in mounts}
    if not kinds:
        return ControlGroups("none")
    return ControlGroups("hybrid" if len(kinds) == 2 else "v2" if True in kinds else "v1", folders)


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


def _offered(mount: _Mount, membership: dict[str, str]) -> dict[str, Path]:
    if not mount.is_unified:
        return {name: _own_folder(mount, membership.get(name)) for name in CONTROLLERS if name in mount.options}
    folder = _own_folder(mount, membership.get(""))
    try:
        enabled = (folder / "cgroup.controllers").read_text().split()
    except OSError:
        return {}
    return {name: folder for name in CONTROLLERS if name in enabled}


def _own_folder(mount: _Mount, path: str | None) -> Path:
    # In a container the path is the host's and means nothing below this mount: its top is our group then.
    folder = mount.point / (path or "/").lstrip("/")
    return folder if folder.is_dir() else mount.point
