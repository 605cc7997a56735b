"""Makes the sandboxes that forked sessions enter: a process that does what bubblewrap does, without starting it.

`sandbox_maker.py SOCKET FILTER USERS MOUNTS PIDS`: the last three are the namespaces of the sandbox in which the others
are nested, and FILTER is a program for seccomp. Each packet that comes over SOCKET is a request for one sandbox, with
bubblewrap's own arguments for what it shows; the answer brings a pidfd of its first process, which holds it open.

A sandbox by bubblewrap takes 8 ms of processor time: it starts five programs, and bubblewrap reads the table of mounts
again for each mount. Here it takes about half. Linux 5.12 is the first that can do it.
"""

# Path objects would take longer than what is done with them.
# ruff: noqa: PTH101, PTH102, PTH108, PTH110, PTH115, PTH123, PTH211

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_PACKET_BYTES = 196_608
_MAX_DESCRIPTORS = 253  # the most that Linux passes in one message
_NUMBERS = array.array("i")
_NEW_ROOT = "/tmp"
"""Where a root folder is put together, in mounts that nobody else sees. bubblewrap does it there, too."""
_COVERED = ("sys", "sysrq-trigger", "irq", "bus")
"""What bubblewrap makes read-only of /proc, where it can be written."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    *(("/proc/self/fd", "fd"), ("/proc/kcore", "core"), ("pts/ptmx", "ptmx")),
    *((f"/proc/self/fd/{number}", name) for number, name in enumerate(("stdin", "stdout", "stderr"))),
)
_SLEEP = "/usr/bin/sleep" if os.path.exists("/usr/bin/sleep") else "/bin/sleep"

# Numbers of Linux's; those from 424 on are the same on every architecture.
_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, 0)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, 0)
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_NEW_MOUNTS, _NEW_CGROUP = 0x00020000, 0x02000000
_NEW_NAMESPACES = _NEW_MOUNTS | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, host name, IPC, users, pids and network. The one of control groups is made once it has joined its own."""
_CLONE_PIDFD, _CLONE_VFORK = 0x1000, 0x4000
_NEW_PROCESS = ctypes.c_ulong(_NEW_NAMESPACES | _CLONE_PIDFD | _CLONE_VFORK | signal.SIGCHLD)
_NOSUID, _NODEV, _NOEXEC, _RECURSIVE, _SLAVE = 0x2, 0x4, 0x8, 0x4000, 0x80000
_DETACH = 2
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_TREE_CLONE, _TREE_CLOEXEC = 0x1, os.O_CLOEXEC
_AT_CWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_MOVE_FROM_EMPTY_PATH, _MOVE_TO_LINKS = 0x4, 0x10
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 28, 38
_NO_ROOT_LOCKED = 0x3
"""Root has no capabilities by being root, for good."""
_SECCOMP_MODE_FILTER, _BYTES_PER_INSTRUCTION = 2, 8
_CAPABILITIES_OF_THIS_PROCESS, _NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1

# Keeps the lock of the interpreter, because a fork by `clone` has no other thread that could take it.
_libc: Any = ctypes.PyDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main(requests: str, program: str, *namespaces: str) -> None:
    """Enter the sandbox to nest in, and serve until the server hangs up or dies."""
    sock = socket.socket(fileno=int(requests))
    sock.set_inheritable(False)
    try:
        with open(int(program), "rb") as file:
            seccomp = _program(file.read())
        is_inside = _enter_parent(*map(int, namespaces))
    except OSError as error:
        sock.send(json.dumps({"error": str(error)}).encode())
        return
    if is_inside:
        _serve(sock, seccomp)


def _enter_parent(users: int, mounts: int, pids: int) -> bool:
    """Enter a sandbox; return True in a child that is all inside, and False in this process once that has ended."""
    # The mounts belong to the server, so only its own root may enter them.
    _enter(mounts)
    _enter(pids)  # for children only
    _enter(users)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # After a change of user /proc would show its processes as the host's root's, whose maps it may not write. The
    # parent's code cannot reach into it all the same, because it has no capabilities.
    _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
    for namespace in (users, mounts, pids):
        os.close(namespace)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child:
        # Nothing of this process keeps the connection open, so the server sees the child's end.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.waitpid(child, 0)
        return False
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Ignored here, and so in the first process of every sandbox: whatever ends there is nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0)
    # Where it puts root folders together, nobody else sees it.
    _call("unshare", _NEW_MOUNTS)
    _mount("none", "/", "", _RECURSIVE | _SLAVE)
    return True


def _serve(sock: socket.socket, seccomp: _Program) -> None:
    gc.collect()
    gc.freeze()  # else a collection in a fork would write to all that it shares with this process
    sock.send(b"{}")
    while True:
        packet, received, is_whole = _receive(sock)
        if not packet:
            return
        pidfd = ctypes.c_int(-1)
        try:
            head, *arguments = os.fsdecode(packet).split("\0")
            error = _make(json.loads(head), arguments[:-1], received, seccomp, pidfd) if is_whole else "incomplete"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        made = [pidfd.value] if pidfd.value >= 0 else []
        socket.send_fds(sock, [json.dumps({"error": error}).encode()], made)
        for descriptor in (*received, *made):
            os.close(descriptor)


def _receive(sock: socket.socket) -> "tuple[bytes, list[int], bool]":
    """Return a packet, its descriptors, and whether all of it came."""
    # Not `socket.recv_fds`, which forgets its flags: the descriptors would stay open in the first process.
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _NUMBERS.itemsize)
    packet, ancillary, found, _ = sock.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for _, _, data in ancillary:
        received.frombytes(data)
    return packet, received.tolist(), not found & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def _make(
    request: "dict[str, Any]",
    arguments: "list[str]",
    received: "list[int]",
    seccomp: _Program,
    pidfd: ctypes.c_int,
) -> str:
    """Make a sandbox; return what is wrong with it, or nothing. `pidfd` becomes that of its first process."""
    descriptors = dict(zip(request["descriptors"], received))  # noqa: B905 - `strict` is Python 3.10's
    root = _Root(descriptors)
    try:
        root.build(arguments)
        # This process sleeps until the new one has executed its command: until then, Linux would copy each page that
        # either of them writes to.
        pid = _call("syscall", _CLONE, _NEW_PROCESS, None, ctypes.byref(pidfd), None, None)
        if pid == 0:
            _hold(request, descriptors, root, seccomp)
    finally:
        root.close()
    try:
        for kind in ("uid_map", "gid_map"):
            mapping = os.open(f"/proc/{pid}/{kind}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(mapping, request["maps"].encode())
            finally:
                os.close(mapping)
    except OSError as error:
        # If it has ended, its status says why.
        return "" if error.errno in (errno.ENOENT, errno.ESRCH) else f"its users cannot be mapped: {error.strerror}"
    return ""


def _hold(request: "dict[str, Any]", descriptors: "dict[int, int]", root: "_Root", seccomp: _Program) -> NoReturn:
    """Finish a sandbox as its first process, and become the command that holds it open.

    The status pipe closes when that command is started; anything written to it before is why it could not be.
    """
    status = descriptors[request["status"]]
    try:
        for group in request["groups"]:
            os.write(descriptors[group], b"0")
        with contextlib.suppress(OSError):
            _call("unshare", _NEW_CGROUP)
        os.setsid()
        if request["hostname"]:
            socket.sethostname(request["hostname"])
        _raise_loopback()
        root.enter()
        _drop_privileges(seccomp)
        # The status is close-on-exec, and nothing else of the host's is left to who holds the sandbox open.
        os.closerange(0, status)
        os.closerange(status + 1, os.sysconf("SC_OPEN_MAX"))
        os.execve(_SLEEP, ("sleep", "infinity"), {})
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(status, f"{type(error).__name__}: {error}".encode())
    os._exit(1)


class _Root:
    """A root folder, made of bubblewrap's arguments.

    The maker makes all of it that needs no namespace of the sandbox's own, because its code is warm: in a new process
    the same takes three times as long.
    """

    def __init__(self, descriptors: "dict[int, int]") -> None:
        self._descriptors = descriptors
        self._trees: list[int] = []
        """Copies of mounts, attached nowhere yet."""
        self._made: set[str] = set()
        """The folders that are there."""
        self._is_mounted = False
        self._finishing: list[Callable[[], None]] = []
        """What is left to the first process."""

    def build(self, arguments: "list[str]") -> None:
        """Make the root folder at a place of its own."""
        operations = _parse(arguments)
        # Copied before that place is covered, because they may lie there.
        trees = [self._copy(option, values[0]) if option in _BINDS else -1 for option, values, _, _ in operations]
        _mount("tmpfs", _NEW_ROOT, "tmpfs", _NOSUID | _NODEV)
        self._is_mounted = True
        os.chmod(_NEW_ROOT, 0o755)
        for (option, values, mode, size), tree in zip(operations, trees):  # noqa: B905 - as above
            if option not in _BINDS:
                getattr(self, f"_{option[2:].replace('-', '_')}")(*values, mode, size)
            elif tree >= 0:
                self._attach(tree, values[1])

    def enter(self) -> None:
        """Finish the root folder in the sandbox's namespaces, and leave the old one for it."""
        for finish in self._finishing:
            finish()
        # A copy, because Linux lets nobody make a root of what came with the mounts of another's namespace.
        _move(_open_tree(_NEW_ROOT), _NEW_ROOT)
        os.chdir(_NEW_ROOT)
        # The old root is on top of the new one then, until it goes.
        _call("syscall", _PIVOT_ROOT, b".", b".")
        _check(_libc.umount2(b".", _DETACH), "umount2")
        os.chdir("/")

    def close(self) -> None:
        """Remove it from the maker's mounts."""
        if self._is_mounted:
            _check(_libc.umount2(_NEW_ROOT.encode(), _DETACH), "umount2")
        for tree in self._trees:
            os.close(tree)

    def _copy(self, option: str, source: str) -> int:
        """Return a copy of the mounts at a path, or of a descriptor's folder; -1 where there may be nothing."""
        is_read_only, may_lack, is_descriptor = _BINDS[option]
        wanted = None
        if is_descriptor:
            # Linux mounts no folder of another mount namespace, so this is the folder that is at its path here.
            wanted = os.fstat(self._descriptors[int(source)])
            source = os.readlink(f"/proc/self/fd/{self._descriptors[int(source)]}")
        try:
            tree = self._open_tree(source)
        except FileNotFoundError:
            if may_lack:
                return -1
            raise
        if wanted is not None and not os.path.samestat(os.fstat(tree), wanted):
            raise PermissionError(0, f"{source} is not the folder that the settings name")
        _restrict(tree, is_read_only=is_read_only, recursive=True)
        return tree

    def _open_tree(self, path: str) -> int:
        tree = _open_tree(path)
        self._trees.append(tree)
        return tree

    def _attach(self, tree: int, path: str, *, and_then: "Callable[[], None]" = lambda: None) -> None:
        """Attach a copy of mounts at a path, where an empty folder or file is made for it."""
        if path.startswith("/proc/"):
            self._finishing += [lambda: _move(tree, _NEW_ROOT + path), and_then]
            return
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            self._make_folder(path, 0o755)
        else:
            self._make_file(path, 0o444)
        _move(tree, _NEW_ROOT + path)
        and_then()

    def _proc(self, path: str, *_: Any) -> None:
        self._make_folder(path, 0o755)
        self._finishing.append(lambda: _mount_proc(_NEW_ROOT + path))

    def _dev(self, path: str, *_: Any) -> None:
        self._tmpfs(path, 0o755, 0)
        for name in _DEVICES:
            tree = self._open_tree(f"/dev/{name}")
            _restrict(tree, allows_devices=True)
            self._attach(tree, f"{path}/{name}")
        for target, name in _DEVICE_LINKS:
            os.symlink(target, f"{_NEW_ROOT}{path}/{name}")
        for name in ("pts", "shm"):
            self._make_folder(f"{path}/{name}", 0o755)
        options = "newinstance,ptmxmode=0666,mode=620"
        _mount("devpts", f"{_NEW_ROOT}{path}/pts", "devpts", _NOSUID | _NOEXEC, options)

    def _tmpfs(self, path: str, mode: "int | None", size: int) -> None:
        mode = 0o755 if mode is None else mode
        self._make_folder(path, 0o755, like=mode)
        options = f"mode={mode:o}" + (f",size={size}" if size else "")
        _mount("tmpfs", _NEW_ROOT + path, "tmpfs", _NOSUID | _NODEV, options)

    def _dir(self, path: str, mode: "int | None", _: int) -> None:
        mode = 0o755 if mode is None else mode
        self._make_folder(path, mode, like=mode)

    def _symlink(self, target: str, path: str, *_: Any) -> None:
        self._make_parents(path, 0o755)
        os.symlink(target, _NEW_ROOT + path)

    def _file(self, source: str, path: str, mode: "int | None", _: int) -> None:
        mode = 0o666 if mode is None else mode
        self._make_parents(path, mode)
        self._write(source, path, mode)

    def _ro_bind_data(self, source: str, path: str, mode: "int | None", _: int) -> None:
        # In a folder that can still be written when the file is removed, which Linux wants done last.
        content = f"/tmp/content{len(self._trees)}"
        self._write(source, content, 0o600 if mode is None else mode)
        tree = self._open_tree(_NEW_ROOT + content)
        _restrict(tree, is_read_only=True)
        self._attach(tree, path, and_then=lambda: os.unlink(_NEW_ROOT + content))

    def _remount_ro(self, path: str, *_: Any) -> None:
        if path == "/proc":
            self._finishing.append(lambda: _make_read_only(_NEW_ROOT + path))
        else:
            _make_read_only(_NEW_ROOT + path)

    def _write(self, source: str, path: str, mode: int) -> None:
        reading, position = self._descriptors[int(source)], 0
        writing = os.open(_NEW_ROOT + path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
        try:
            while piece := os.pread(reading, 1 << 20, position):
                position += os.write(writing, piece)
        finally:
            os.close(writing)

    def _make_parents(self, path: str, mode: int) -> None:
        """Make the folders above a path: as bubblewrap does, closed to those who may not even see what is below."""
        parent = path.rpartition("/")[0]
        if parent and parent not in self._made:
            group, others = 0o050 * bool(mode & 0o070), 0o005 * bool(mode & 0o007)
            self._make_parents(parent, mode)
            self._make_one(parent, 0o700 | group | others)

    def _make_folder(self, path: str, mode: int, *, like: int = 0o755) -> None:
        self._make_parents(path, like)
        self._make_one(path, mode)

    def _make_one(self, path: str, mode: int) -> None:
        if path not in self._made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_NEW_ROOT + path, mode)
            self._made.add(path)

    def _make_file(self, path: str, mode: int) -> None:
        self._make_parents(path, 0o755)
        if not os.path.exists(_NEW_ROOT + path):
            os.close(os.open(_NEW_ROOT + path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, mode))


_BINDS = {
    # read-only, may lack its source, by descriptor
    "--bind": (False, False, False),
    "--ro-bind": (True, False, False),
    "--ro-bind-try": (True, True, False),
    "--bind-fd": (False, False, True),
    "--ro-bind-fd": (True, False, True),
}
_VALUES = {
    **dict.fromkeys((*_BINDS, "--symlink", "--file", "--ro-bind-data"), 2),
    **dict.fromkeys(("--proc", "--dev", "--tmpfs", "--dir", "--remount-ro"), 1),
}
"""bubblewrap's options that are known here, with the number of their values."""


def _parse(arguments: "list[str]") -> "list[tuple[str, list[str], int | None, int]]":
    """Return operations with their values, and the mode and the size that stood before each."""
    operations: list[tuple[str, list[str], int | None, int]] = []
    mode: int | None = None
    size = at = 0
    while at < len(arguments):
        option = arguments[at]
        if option == "--perms":
            mode, count = int(arguments[at + 1], 8), 1
        elif option == "--size":
            size, count = int(arguments[at + 1]), 1
        else:
            count = _VALUES[option]
            operations.append((option, arguments[at + 1 : at + 1 + count], mode, size))
            mode, size = None, 0
        at += 1 + count
    return operations


# Mounts


def _mount(source: str, path: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() or None for word in (source, path, kind, options)]
    _check(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {path}")


def _open_tree(path: str) -> int:
    """Return a copy of a mount with all below it, attached nowhere."""
    flags = ctypes.c_uint(_TREE_CLONE | _TREE_CLOEXEC | _AT_RECURSIVE)
    tree: int = _check(_libc.syscall(_OPEN_TREE, _AT_CWD, os.fsencode(path), flags), f"open_tree {path}")
    return tree


def _restrict(tree: int, *, is_read_only: bool = False, allows_devices: bool = False, recursive: bool = False) -> None:
    """Take from a mount what bubblewrap takes from every one, and more if wanted."""
    wanted = _ATTR_NOSUID | (0 if allows_devices else _ATTR_NODEV) | (_ATTR_READ_ONLY if is_read_only else 0)
    attributes = struct.pack("=4Q", wanted, 0, 0, 0)
    flags = ctypes.c_uint(_AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0))
    _call("syscall", _MOUNT_SETATTR, tree, b"", flags, attributes, ctypes.c_size_t(len(attributes)))


def _move(tree: int, path: str) -> None:
    """Attach a copy of mounts at a path."""
    flags = ctypes.c_uint(_MOVE_FROM_EMPTY_PATH | _MOVE_TO_LINKS)
    _check(_libc.syscall(_MOVE_MOUNT, tree, b"", _AT_CWD, os.fsencode(path), flags), f"move_mount {path}")


def _make_read_only(path: str) -> None:
    mounted = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _restrict(mounted, is_read_only=True)
    finally:
        os.close(mounted)


def _mount_proc(path: str) -> None:
    _mount("proc", path, "proc", _NOSUID | _NODEV | _NOEXEC)
    for name in _COVERED:
        if os.access(f"{path}/{name}", os.W_OK):
            tree = _open_tree(f"{path}/{name}")
            _restrict(tree, is_read_only=True, recursive=True)
            _move(tree, f"{path}/{name}")


# Rights


def _raise_loopback() -> None:
    """Bring up the loopback interface of a new network namespace; Linux gives it its addresses then."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        request = fcntl.ioctl(sock, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _drop_privileges(program: _Program) -> None:
    """Give up all capabilities, for what is executed too, and load the filter of system calls."""
    _call("prctl", _PR_SET_SECUREBITS, _NO_ROOT_LOCKED, 0, 0, 0)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _call("capset", _CAPABILITIES_OF_THIS_PROCESS, _NO_CAPABILITIES)


def _program(seccomp: bytes) -> _Program:
    buffer = ctypes.create_string_buffer(seccomp, len(seccomp))
    return _Program(len(seccomp) // _BYTES_PER_INSTRUCTION, ctypes.cast(buffer, ctypes.c_void_p))


def _enter(namespace: int) -> None:
    _call("setns", namespace, 0)


def _call(name: str, *arguments: Any) -> int:
    return _check(getattr(_libc, name)(*arguments), name)


def _check(answer: int, name: str) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
