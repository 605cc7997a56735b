"""The loop of the process that makes sandboxes: a request for each, and how it is made.

`main(SOCKET, FILTER, USERS, MOUNTS, PIDS)`: the last three are the namespaces of the sandbox in which the others are
nested, and FILTER is a program for seccomp. Each packet that comes over SOCKET is a request for one sandbox, with
bubblewrap's own arguments for what it shows; the answer brings a pidfd of its first process, which holds it open.

A sandbox by bubblewrap takes 8 ms of processor time: it starts five programs, and bubblewrap reads the table of mounts
again for each mount. A sandbox by this process takes a third of that.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
from typing import Any

from .first_process import FirstProcesses
from .mounts import RECURSIVE, SLAVE, call, mount
from .root_folder import RootFolder

_PACKET_BYTES = 196_608
_MAX_DESCRIPTORS = 253  # the most that Linux passes in one message
_NUMBERS = array.array("i")

# Linux's numbers.
_NEW_MOUNTS, _NEW_CGROUP = 0x00020000, 0x02000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 28, 38
_NO_ROOT_LOCKED = 0x3
"""The secure bits with which a process gains no capabilities by being root, and cannot change that again."""
_SECCOMP_MODE_FILTER, _BYTES_PER_INSTRUCTION = 2, 8
_CAPABILITIES_OF_THIS_PROCESS, _NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


class _SeccompProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main(requests: str, program: str, *namespaces: str) -> None:
    """Enter the sandbox to nest in, and serve until the server hangs up or dies."""
    sock = socket.socket(fileno=int(requests))
    sock.set_inheritable(False)
    try:
        with os.fdopen(int(program), "rb") as file:
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
    call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
    for namespace in (users, mounts, pids):
        os.close(namespace)
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child:
        # Nothing of this process keeps the connection open, so the server sees the child's end.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.waitpid(child, 0)
        return False
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The first process of every sandbox inherits that SIGCHLD is ignored, so Linux reaps whatever ends inside: `sleep`
    # waits for no child.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0)
    # A mount namespace of its own, so that no other process sees the root folders that it puts together.
    call("unshare", _NEW_MOUNTS)
    mount("none", "/", "", RECURSIVE | SLAVE)
    return True


def _serve(sock: socket.socket, seccomp: _SeccompProgram) -> None:
    processes = FirstProcesses()
    sock.send(b"{}")
    while True:
        packet, received, is_whole = _receive(sock)
        if not packet:
            return
        pidfd = ctypes.c_int(-1)
        try:
            head, *arguments = os.fsdecode(packet).split("\0")
            error = "incomplete"
            if is_whole:
                error = _make(json.loads(head), arguments[:-1], received, seccomp, processes, pidfd)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        made = [pidfd.value] if pidfd.value >= 0 else []
        socket.send_fds(sock, [json.dumps({"error": error}).encode()], made)
        for descriptor in (*received, *made):
            os.close(descriptor)


def _receive(sock: socket.socket) -> "tuple[bytes, list[int], bool]":
    """Return a packet, its descriptors, and whether all of it came.

    `inside/supervisor/packets.py` does the same for the server. It cannot be imported here, because this package is
    loaded by its path, without the packages beside it.
    """
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
    seccomp: _SeccompProgram,
    processes: FirstProcesses,
    pidfd: ctypes.c_int,
) -> str:
    """Make a sandbox; return what is wrong with it, or nothing. `pidfd` becomes that of its first process."""
    descriptors = dict(zip(request["descriptors"], received))  # noqa: B905 - `strict` is Python 3.10's
    root = RootFolder(descriptors)
    try:
        root.build(arguments)
        pid = processes.start(lambda: _finish(request, descriptors, root, seccomp), pidfd)
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


def _finish(
    request: "dict[str, Any]", descriptors: "dict[int, int]", root: RootFolder, seccomp: _SeccompProgram
) -> bool:
    """Finish a sandbox, as its first process; return False if that failed.

    The status pipe closes when this process executes the program that holds the sandbox open. If it cannot, it writes
    the reason to the pipe first.
    """
    status = descriptors[request["status"]]
    try:
        os.setsid()
        if request["hostname"]:
            socket.sethostname(request["hostname"])
        _raise_loopback()
        _limit_counts(request["counts"])
        root.enter()
        # Join the groups late: whoever kills a group kills this process, and the maker exits if this process is killed
        # before this function has returned.
        for group in request["groups"]:
            os.write(descriptors[group], b"0")
        with contextlib.suppress(OSError):
            call("unshare", _NEW_CGROUP)
        _drop_privileges(seccomp)
        # The status pipe is close-on-exec. No other descriptor of the host's may stay open in the program either.
        os.closerange(0, status)
        os.closerange(status + 1, os.sysconf("SC_OPEN_MAX"))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(status, f"{type(error).__name__}: {error}".encode())
        return False
    return True


def _limit_counts(counts: "dict[str, int]") -> None:
    """Limit what Linux counts for the new user namespace, as far as the host has such limits."""
    for name, most in counts.items():
        with contextlib.suppress(OSError):
            limit = os.open(f"/proc/sys/user/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(limit, str(most).encode())
            finally:
                os.close(limit)


def _raise_loopback() -> None:
    """Bring up the loopback interface of a new network namespace; Linux gives it its addresses then."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        request = fcntl.ioctl(sock, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _drop_privileges(program: _SeccompProgram) -> None:
    """Give up all capabilities, for what is executed too, and load the filter of system calls."""
    call("prctl", _PR_SET_SECUREBITS, _NO_ROOT_LOCKED, 0, 0, 0)
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    call("capset", _CAPABILITIES_OF_THIS_PROCESS, _NO_CAPABILITIES)


def _program(seccomp: bytes) -> _SeccompProgram:
    buffer = ctypes.create_string_buffer(seccomp, len(seccomp))
    return _SeccompProgram(len(seccomp) // _BYTES_PER_INSTRUCTION, ctypes.cast(buffer, ctypes.c_void_p))


def _enter(namespace: int) -> None:
    call("setns", namespace, 0)
