"""The maps of a sandbox's users: written while bubblewrap waits, by the server or by a helper in a namespace above."""

import asyncio
import os
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.child import Child, start_child, wait_readable
from belljar.sandboxes.namespace.bwrap_args import BwrapCommand


class UserMapWriter:
    """Writes the maps of a new user namespace while bubblewrap waits.

    Call `map` once bubblewrap has reported its first process.
    """

    def __init__(self, maps: str, helper: "UserMapHelper | None") -> None:
        self._maps = maps
        self._helper = helper
        self._gate: int | None = None

    def arguments(self, stack: ExitStack) -> BwrapCommand:
        """Return the arguments that make bubblewrap wait, if it has to."""
        if not self._maps:
            return BwrapCommand([], [])
        gate_end, self._gate = os.pipe()
        stack.callback(os.close, gate_end)
        # `--sync-fd` makes bubblewrap close it for the command, which the first option alone would let inherit it.
        return BwrapCommand(["--userns-block-fd", str(gate_end), "--sync-fd", str(gate_end)], [gate_end])

    async def map(self, pid: int) -> None:
        """Write the maps of a process's user namespace, if there are any, and let bubblewrap continue."""
        if self._gate is None:
            return
        try:
            if self._helper is None:
                _write(pid, self._maps)
            else:
                await self._helper.write(pid, self._maps)
            is_mapped = all(_read(pid, kind) for kind in _KINDS)
        except OSError as error:
            raise SandboxUnavailable(f"The users of a sandbox cannot be mapped: {error.strerror}") from error
        if not is_mapped:
            raise SandboxUnavailable("The users of a sandbox cannot be mapped from the one it is nested in")
        os.write(self._gate, b"\n")

    def close(self) -> None:
        """Release bubblewrap; called once."""
        if self._gate is not None:
            os.close(self._gate)


# The helper echoes the pid, so that `write` can skip answers to requests that were cancelled.
_WRITE_MAPS = (
    "echo ready; while read -r pid maps; do "
    '{ printf "$maps" > "/proc/$pid/uid_map" && printf "$maps" > "/proc/$pid/gid_map"; } 2> /dev/null; '
    'echo "$pid"; done'
)


class UserMapHelper:
    """A shell in a sandbox's user namespace that writes the maps of namespaces below, which Linux wants done there.

    One for each sandbox that others are nested in, because starting one for every nested one takes 7 ms of processor
    time. It sees the host's pids, and no session sees it. It ends with its input, and so with the server.
    """

    def __init__(self, entering: Sequence[str]) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self._lock = asyncio.Lock()
        self._received = b""
        try:
            self._child = start_child(
                [*entering, "/bin/sh", "-c", _WRITE_MAPS],
                environment={},
                folder="/",
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=(),
            )
        except BaseException:
            os.close(self._stdin)
            os.close(self._stdout)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        self.has_ended = False
        # A sandbox whose loop ends before it, as in a trial of this host, is not closed. Not `__del__`, because that of
        # the child's `Popen`, which warns, may be called first.
        self._end = weakref.finalize(self, _end, self._child, self._stdin, self._stdout)
        self._end.atexit = False  # it ends by itself then

    async def wait_entered(self) -> None:
        """Wait until it is in its namespace, and needs none of the descriptors by which it got there."""
        await self._answer()

    async def write(self, pid: int, maps: str) -> None:
        """Have the maps of a process's user namespace written; whether they are is for the caller to look at."""
        async with self._lock:
            escaped = maps.replace("\n", "\\n")
            try:
                os.write(self._stdin, f"{pid} {escaped}\n".encode())
            except OSError as error:
                self.has_ended = True
                raise SandboxUnavailable("The process that maps the users of a sandbox has ended") from error
            while await self._answer() != str(pid):
                continue

    async def _answer(self) -> str:
        while b"\n" not in self._received:
            await wait_readable(self._stdout)
            piece = os.read(self._stdout, 4096)
            if not piece:
                self.has_ended = True
                raise SandboxUnavailable("The process that maps the users of a sandbox has ended")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def close(self) -> None:
        """End it; may be called twice."""
        self.has_ended = True
        self._end()


def _end(child: Child, stdin: int, stdout: int) -> None:
    os.close(stdin)
    os.close(stdout)
    child.kill_group()
    child.release()


async def open_map_helper(entering: Sequence[str]) -> UserMapHelper:
    """Start a helper; `entering` is the command that enters the user namespace, and may name descriptors of ours."""
    helper = UserMapHelper(entering)
    try:
        await helper.wait_entered()
    except BaseException:
        helper.close()
        raise
    return helper


_KINDS = ("uid_map", "gid_map")


def _write(pid: int, maps: str) -> None:
    for kind in _KINDS:
        descriptor = os.open(f"/proc/{pid}/{kind}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, maps.encode())
        finally:
            os.close(descriptor)


def _read(pid: int, kind: str) -> bytes:
    descriptor = os.open(f"/proc/{pid}/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
