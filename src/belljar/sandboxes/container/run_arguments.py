"""What the `container` sandbox looks like from inside, as arguments for an engine's `run`. Starts nothing.

The image provides the system; the host provides the trees that a session's interpreter needs, at their own paths. The
same places as in the `namespace` sandbox are writable, and nothing else is.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import InvalidArgument
from belljar.sandboxes.base import WORKSPACE, SandboxSpec
from belljar.sandboxes.container.engines import ContainerEngine
from belljar.sandboxes.defaults import HOME, SCRATCH, SYSTEM
from belljar.sandboxes.limits.table import CONTROLLERS
from belljar.sandboxes.machine_files import ETC, machine_files

INIT_FOLDER = "/run/container-init"

_SYSTEM_TABLES = ("/etc/ld.so.cache", "/etc/alternatives")
# The host's certificate authorities, because they signed the servers that a session reaches through the proxy.
_ETC = ("/etc/ssl/certs", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/localtime")
_WRITTEN = {
    **ETC,
    "/etc/hostname": "belljar\n",
    "/etc/resolv.conf": "",
}
_ISOLATION = (
    *("--network", "none", "--ipc", "private", "--cgroupns", "private", "--hostname", "belljar"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--workdir", "/"),
    *("--log-driver", "none", "--no-healthcheck", "--stop-signal", "SIGKILL"),
)
_OF_ENGINE = {
    # Switches off what podman does by default: its own temporary folders, the image's volumes, handing in the host's
    # proxies and its service manager's socket, and writing names to /etc.
    "podman": (
        *("--pid", "private", "--uts", "private", "--read-only-tmpfs=false", "--image-volume", "ignore"),
        # Where an ordinary user's podman may not make control groups, it shows those of the host.
        *("--security-opt", "mask=/sys/fs/cgroup"),
        *("--http-proxy=false", "--systemd", "false", "--sdnotify", "ignore", "--no-hosts", "--passwd=false"),
    ),
    "docker": (),
}


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments for one container that is to be made."""

    engine: ContainerEngine
    image: str
    spec: SandboxSpec
    name: str
    labels: Sequence[str]

    def files(self) -> dict[str, str]:
        """Return the texts of single files that are shown in place of the image's and the host's, by path inside."""
        _, user = self.engine.users(self.spec.identity)
        written = {path: text.format(uid=user.uid, gid=user.gid, home=HOME) for path, text in _WRITTEN.items()}
        return {**written, **machine_files(self.spec.limits)}

    def arguments(self, interpreter: str, mounts: Sequence[str], program: Sequence[str]) -> list[str]:
        """Return everything after `run`, except `--detach`."""
        users, _ = self.engine.users(self.spec.identity)
        return [
            *("--rm", "--pull", "never", "--name", self.name),
            *(word for label in self.labels for word in ("--label", label)),
            *_ISOLATION,
            *_OF_ENGINE[self.engine.kind],
            *_selinux(),
            *users,
            *self.engine.ulimits(),
            *(
                word
                for name, limit in CONTROLLERS.items()
                if name in self.engine.controllers
                for word in limit.engine_options(self.spec.limits)
            ),
            *_temporary(self.engine, self.spec),
            *mounts,
            *("--entrypoint", interpreter, self.image, *program),
        ]

    def mounts(self, command: Sequence[str], step: Path, files: Path) -> list[str]:
        """Return the mounts from the host; `files` has the texts of `files()` by `file_name`."""
        spec = self.spec
        trees = {*spec.readable, *_found(_ETC)}
        if is_of_system(command[0]):
            trees |= {*_found(path for path in SYSTEM if not Path(path).is_symlink()), *_found(_SYSTEM_TABLES)}
        shown = [(path.resolve() if path.is_symlink() else path, str(path), True) for path in sorted(trees)]
        shown += [(files / file_name(path), path, True) for path in self.files()]
        shown += [(step, INIT_FOLDER, True)]
        shown += [(spec.workspace.resolve(), WORKSPACE, False), (spec.scratch.resolve(), SCRATCH, False)]
        # The engine takes paths alone; the container's first process checks what was mounted (`StartOrder.shown`).
        shown += [
            (Path(os.path.realpath(folder.path)), folder.inside, not folder.is_writable) for folder in spec.folders
        ]
        return [word for source, path, is_closed in shown for word in self._mount(source, path, is_closed=is_closed)]

    def _mount(self, source: Path, path: str, *, is_closed: bool) -> Iterator[str]:
        for text in (str(source), path):
            if any(mark in text for mark in ',"\n'):
                raise InvalidArgument(
                    f"Path cannot be shown in a container: {text!r}",
                    hint="Use folders without commas, quotes and newlines",
                )
        # docker has no such options; but with no-new-privileges and no devices nothing inside could gain by such files.
        plain = ",nosuid,nodev" if self.engine.kind == "podman" else ""
        yield from ("--mount", f"type=bind,source={source},target={path}{plain}{',readonly' if is_closed else ''}")


def file_name(path: str) -> str:
    """Return a single file's name in the folder that holds them all."""
    return path.strip("/").replace("/", "-")


def is_of_system(program: str) -> bool:
    """Return whether a program belongs to the host's system, whose libraries must then be shown too."""
    return program.startswith("/") and Path(program).exists() and _is_below(os.path.realpath(program), SYSTEM)


def find_interpreter(spec: SandboxSpec, command: Sequence[str]) -> str:
    """Return the Python for the first process: of a tree that is shown, else the command's own, else the image's."""
    trees = [str(tree.resolve()) for tree in spec.readable]
    for tree in spec.readable:
        for name in ("python3", "python"):
            path = tree / "bin" / name
            if path.is_file() and _is_below(os.path.realpath(path), trees):
                return str(path)
    if is_of_system(command[0]) and Path(command[0]).name.startswith("python"):
        return command[0]
    return "python3"


def _is_below(path: str, trees: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(tree) for tree in trees)


def _found(paths: Iterator[str] | Sequence[str]) -> set[Path]:
    return {Path(path) for path in paths if os.access(path, os.R_OK)}


def _selinux() -> Iterator[str]:
    # The labels of the host's trees must stay, because relabelling them would break their other users.
    if Path("/sys/fs/selinux/enforce").exists():
        yield from ("--security-opt", "label=disable")


def _temporary(engine: ContainerEngine, spec: SandboxSpec) -> Iterator[str]:
    limits = spec.limits
    size = f"size={limits.temporary_mb}m" if limits.temporary_mb else ""
    for path in ("/tmp", "/var/tmp", "/run", HOME):  # noqa: S108
        yield from _tmpfs(engine, spec, path, "rw", "exec", size)
    # /sys describes the host's hardware; a home in the image is closed to the session, which has to pass through it.
    for path in ("/sys", *_homes(spec.readable)):
        yield from _tmpfs(engine, spec, path, "ro", "size=64k")
    yield from ("--shm-size", f"{limits.temporary_mb}m" if limits.temporary_mb else str(_half_of_memory()))


def _tmpfs(engine: ContainerEngine, spec: SandboxSpec, path: str, *options: str) -> Iterator[str]:
    _, user = engine.users(spec.identity)
    # Owned by the session's user: if the image has the folder, runc 1.1 uses that one's mode, whatever it is told.
    owned = ("U", "notmpcopyup") if engine.kind == "podman" else (f"uid={user.uid}", f"gid={user.gid}")
    mode = "1777" if Path(path).name == "tmp" else "0755"
    yield from ("--tmpfs", f"{path}:" + ",".join(filter(None, (*options, "nosuid", "nodev", f"mode={mode}", *owned))))


def _homes(trees: Sequence[Path]) -> list[str]:
    """Return the home folders that trees are below, except the session's own."""
    found = {str(Path(*tree.parts[: 3 if tree.parts[1] == "home" else 2])) for tree in trees if len(tree.parts) > 2}
    homes = {home for home in found if home == "/root" or home.startswith("/home/")}
    return sorted(homes - {HOME, *map(str, trees)})


def _half_of_memory() -> int:
    """Return the size that Linux gives a memory file system without a limit."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
