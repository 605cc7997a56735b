"""The OCI runtime configuration that gVisor gets for a sandbox. Starts nothing and reads nothing.

gVisor runs in the view that `namespace/bwrap_args.py` describes, and shows the session the same, read-only. The
session's own folders can be written, and temporary folders are gVisor's own memory.
"""

import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from belljar.sandboxes.base import WORKSPACE
from belljar.sandboxes.defaults import HOME, SCRATCH

_RLIMITS = {
    getattr(resource, name): name
    for name in ("RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
}
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
# Linux lets a user namespace mount something again only with the flags it already has, so these are always given.
_HARMLESS = ("nosuid", "nodev")
_TEMPORARY = {"/dev/shm": "1777", "/tmp": "1777", "/run": "0755", HOME: "0700"}  # noqa: S108 - paths inside


@dataclass(frozen=True, slots=True)
class OciConfig:
    """What differs between sandboxes."""

    limits: Mapping[int, int]
    """By the numbers of setrlimit(2)."""
    temporary_bytes: int
    """0 means no limit."""
    readable: Sequence[Path]
    """Trees of the view. Those below a temporary folder are mounted again, because that folder covers them."""
    writable: Sequence[str]
    """Folders of the view that can be written, beside the session's own."""
    covered: Mapping[str, str]
    """Files to show in place of others: paths inside, and where gVisor finds the content."""
    is_read_only: bool
    """Whether gVisor itself mounts the root read-only; the view it runs in is read-only either way."""


def configuration(command: Sequence[str], environment: Mapping[str, str], config: OciConfig) -> bytes:
    """Return the content of `config.json`."""
    return json.dumps(
        {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                # The only user in a user namespace with one user, and without any capability.
                "user": {"uid": 0, "gid": 0},
                "args": list(command),
                "env": [f"{name}={value}" for name, value in environment.items()],
                "cwd": WORKSPACE,
                "capabilities": {},
                "noNewPrivileges": True,
                "rlimits": [
                    {"type": _RLIMITS[kind], "hard": most, "soft": most} for kind, most in config.limits.items()
                ],
            },
            "root": {"path": "/", "readonly": config.is_read_only},
            "hostname": "belljar",
            "mounts": list(_mounts(config)),
            "linux": {"namespaces": [{"type": name} for name in _NAMESPACES]},
        }
    ).encode()


def _mounts(config: OciConfig) -> Iterator[dict[str, object]]:
    yield {"destination": "/proc", "type": "proc", "source": "proc", "options": [*_HARMLESS, "noexec", "ro"]}
    # gVisor's own devices, none of the host's. Not read-only: gVisor would then refuse to open /dev/null for writing.
    yield {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "noexec"]}
    for path, mode in _TEMPORARY.items():
        options = [*_HARMLESS, f"mode={mode}"]
        if config.temporary_bytes:
            options.append(f"size={config.temporary_bytes}")
        yield {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options}
    for path in (WORKSPACE, SCRATCH, *config.writable):
        yield _bind(path, path, "rw")
    # A tree comes before the trees within it, because it would cover them otherwise.
    for tree in sorted(set(config.readable), key=lambda tree: len(tree.parts)):
        if any(tree.is_relative_to(folder) for folder in _TEMPORARY):
            yield _bind(str(tree), str(tree), "ro")
    for inside, path in config.covered.items():
        yield _bind(path, inside, "ro")


def _bind(path: str, inside: str, mode: str) -> dict[str, object]:
    return {"destination": inside, "type": "bind", "source": path, "options": ["rbind", *_HARMLESS, mode]}
