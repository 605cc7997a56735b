"""What is written into a new user namespace while bubblewrap waits: the maps of its users, and limits for them.

`inside/user_namespaces.py` writes it, a process of the server's that enters the namespace.

The limits are of what Linux counts for a user of the host over all of its processes: the instances and watches of
inotify. Sessions of an ordinary user's server, and forks of one zygote, are counted as one user there, so that one of
them could take all. Linux also counts for each user namespace what is in it and below it, by limits of its own, which a
process with capabilities in that namespace may set. Each session gets a share of what the host lets a user have.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.inside import FOLDER, package_command
from belljar.sandboxes.child import ProgramSilent, run_program, wait_readable

MODULE = "user_namespaces"
_NS_GET_USERNS = 0xB701
_PARTS = 8
"""A session may have this part of what the host lets a user have: 16 instances of 128 that Linux allows by itself."""
_TRIAL_S = 10


class UserNamespaceWriter:
    """The process that writes into user namespaces: started when first needed, and again if it was killed."""

    def __init__(self) -> None:
        # In the trial of a host, a thread of its own may ask while the server does.
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    async def write(self, pid: int, *, maps: str, counts: Mapping[str, int]) -> None:
        """Write the maps, unless they are empty, and the limits, of the user namespace that a process's pid namespace
        belongs to.

        Maps that cannot be written raise SandboxUnavailable. Limits are set as far as the host lets us: a sandbox
        without a user namespace of its own has a user of the host to itself, and needs none.
        """
        if not maps and not counts:
            return
        with contextlib.ExitStack() as stack:
            try:
                users = _open_owner(pid, stack)
                if users < 0:
                    return
                answer, answer_end = os.pipe()
                stack.callback(os.close, answer)
                try:
                    self._send({"pid": pid, "maps": maps, "counts": dict(counts)}, users, answer_end)
                finally:
                    os.close(answer_end)
                await wait_readable(answer)
                said = os.read(answer, 4096).decode(errors="replace")
            except OSError as error:
                said = str(error.strerror)
        if maps and said != "done":
            raise SandboxUnavailable(f"The users of a sandbox cannot be mapped: {said or 'who maps them was killed'}")

    def _send(self, request: Mapping[str, object], *descriptors: int) -> None:
        packet = json.dumps(request).encode()
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(self._sock, [packet], descriptors)
                    return
                self._end()
            self._sock = self._start()
            socket.send_fds(self._sock, [packet], descriptors)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            nowhere = subprocess.DEVNULL
            process = subprocess.Popen(
                [*package_command(os.path.realpath(sys.executable), FOLDER, MODULE), str(theirs.fileno())],
                env={},
                cwd="/",
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # When the server is killed, it ends by itself, because nobody has the other end of its socket.
        self._end = weakref.finalize(self, _end, process, ours)
        return ours


WRITER = UserNamespaceWriter()
"""One for this process, whichever provider makes the sandboxes."""


def _end(process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()


def _open_owner(pid: int, stack: contextlib.ExitStack) -> int:
    """Return the user namespace that a process's pid namespace belongs to; -1 if it is ours.

    bubblewrap's own process may go on to another one below it, where nobody is root.
    """
    pids = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, pids)
    users = fcntl.ioctl(pids, _NS_GET_USERNS)
    stack.callback(os.close, users)
    return -1 if os.path.samestat(os.fstat(users), Path("/proc/self/ns/user").stat()) else users


@cache
def session_counts() -> dict[str, int]:
    """Return the most that a session may have, by the name of the file in /proc/sys/user; empty on other systems."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for kind in ("instances", "watches"):
            of_user = int(Path(f"/proc/sys/fs/inotify/max_user_{kind}").read_text())
            found[f"max_inotify_{kind}"] = max(1, of_user // _PARTS)
    return found


@cache
def why_uncounted() -> str:
    """Return why sessions are not limited on this host, tried in a user namespace; empty where they are."""
    if not find_tool("unshare"):
        return "unshare is not installed (util-linux)"
    lines = [f"echo {most} > /proc/sys/user/{name}" for name, most in session_counts().items()]
    writing = ["/bin/sh", "-c", " && ".join(lines) or "false"]
    command = [find_tool("unshare"), "--user", "--map-root-user", "--", *writing]
    try:
        trial = run_program(command, timeout_s=_TRIAL_S, environment={})
    except ProgramSilent as silence:
        return str(silence)
    return "" if trial.status == 0 else trial.errors.strip().rpartition("\n")[2] or f"status {trial.status}"


@cache
def find_tool(name: str) -> str:
    """Return the path of one of util-linux's programs; empty where it is not installed."""
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") or ""
