"""A command in new namespaces, run by bubblewrap: waits for it, lets it start, kills it.

Another process ends what a killed server leaves. bubblewrap asks to be killed with its parent, but only some
milliseconds after its start, and what it has started in turn asks for the same later still. A server that is killed in
between would leave them to the host's init for good. Knows no arguments.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

from belljar.sandboxes.child import Started, children, open_pidfd, wait_readable

_ONE_PAGE = 4096
_RETRY_S = 0.001
_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 10.0
# The shell detaches from its parent, so that the server has no child to know of. A pid may be another process's by now:
# so a single pid, that of a sandbox's first process, is killed only if it is still bubblewrap, which that process
# remains for as long as it lives.
_EXECUTOR = """exec 3<&0
(
trap '' HUP INT QUIT TERM
named=' '
while read -r how what; do
    case $how in
    name) named="$named$what " ;;
    strike) named="${named%% $what *} ${named#* $what }" ;;
    esac
done
for one in $named; do
    case $one in
    -*) kill -s KILL -- "$one" ;;
    *) read -r program < "/proc/$one/comm" && [ "$program" = bwrap ] && kill -s KILL -- "$one" ;;
    esac
done
) <&3 3<&- &"""

log = logging.getLogger(__name__)


class OrphanReaper:
    """The pids to kill, and a shell that has them. It is started with the first pid, and again if it is gone."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        self._line: int | None = None
        self._lock = threading.Lock()

    def register(self, pid: int) -> None:
        """Have a process killed if the server dies, or, by a negative number, a process group."""
        with self._lock:
            if pid not in self._named:
                self._named.add(pid)
                self._say(f"name {pid}\n")

    def unregister(self, pid: int) -> None:
        """Forget a process or group that has ended; may be called twice."""
        with self._lock:
            if pid in self._named:
                self._named.discard(pid)
                self._say(f"strike {pid}\n")

    def _say(self, words: str) -> None:
        if self._line is not None:
            try:
                os.write(self._line, words.encode())
            except (BrokenPipeError, BlockingIOError):  # the shell was killed, or stopped
                os.close(self._line)
                self._line = None
            else:
                return
        self._start()

    def _start(self) -> None:
        """Start a shell that gets all pids so far."""
        reading, line = os.pipe()
        try:
            # In a session of its own, so that signals from the server's terminal do not reach it.
            subprocess.run(
                ["/bin/sh", "-c", _EXECUTOR],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                check=True,
            )
            os.set_blocking(line, False)
            os.write(line, "".join(f"name {pid}\n" for pid in self._named).encode())
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("what is being started would outlive this server, were it killed: %s", error)
            os.close(line)
        else:
            self._line = line
        finally:
            os.close(reading)


OF_THIS_SERVER = OrphanReaper()
"""One for this process, whichever provider makes the sandboxes."""


class NamespaceProcess:
    """A command in new namespaces; `pid` is the process that the host can wait for."""

    def __init__(self, child: Started, *, launcher_depth: int = 0, reaper: OrphanReaper | None = None) -> None:
        self.pid = child.pid
        self.command: Sequence[str] = ()
        self.first_pid = 0
        """The pid, on the host, of the namespaces' first process; the command waits behind it for `release_command`."""
        self.first: int | None = None
        """A pidfd of the first process, while it is ours to kill."""
        self.proc_mount: int | None = None
        """The mount namespace in which bubblewrap starts to nest a sandbox in this one, once there was one to nest."""
        self._command_pid = 0
        self._launcher_depth = launcher_depth
        self._bubblewrap: int | None = None
        self._has_ended: asyncio.Event | None = None
        self._child = child
        self._is_held = False
        self._reaper = reaper
        if reaper is not None:
            reaper.register(-child.pid)
        self._start_gate: int | None = None
        self._info = bytearray()
        self._is_reported = asyncio.Event()

    def listen(self, info: int, start_gate: int) -> None:
        """Read bubblewrap's report and hold the command back until `release_command`; takes over both descriptors."""
        self._start_gate = start_gate
        # Read by the loop, not by `spawn`, because a spawn that is cancelled still leaves a first process to be killed.
        asyncio.get_running_loop().add_reader(info, self._on_info, info)

    async def wait_for_first_process(self) -> bool:
        """Wait for bubblewrap's report; return whether there was a first process inside."""
        await self._is_reported.wait()
        return self.first_pid != 0

    def release_command(self) -> None:
        """Let the command start."""
        if self._start_gate is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._start_gate, b"\n")
        self._close_gate()

    async def release_command_and_wait_for_mounts(self) -> bool:
        """Let the command start, and return whether all mounts and namespaces were made before."""
        if self._start_gate is None:
            return False
        # Duplicate the descriptor, because `kill_all` may close the original while we wait.
        start_gate = os.dup(self._start_gate)
        try:
            # One byte fills a pipe of one page, so it is writable again when bubblewrap, all done, has read that byte.
            fcntl.fcntl(start_gate, fcntl.F_SETPIPE_SZ, _ONE_PAGE)
            with contextlib.suppress(BrokenPipeError):
                os.write(start_gate, b"\n")
            await _wait_taken(start_gate)
            return _unread(start_gate) == 0
        finally:
            os.close(start_gate)
            self._close_gate()

    async def leave_alone(self) -> None:
        """Kill what made the namespaces, and nothing in them. How the command ends cannot be known from then on."""
        if self.first is None:
            return
        self._watch(self.first)
        if self._bubblewrap is not None:
            # Only this process, not its group, because what it has made may not have left the group yet.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._bubblewrap, signal.SIGKILL)
        await self._child.wait()
        self._release()

    def _watch(self, first: int) -> None:
        """Watch the first process alone for the end."""
        self._has_ended = ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            loop.remove_reader(first)
            ended.set()

        loop.add_reader(first, on_end)

    @property
    def is_alone(self) -> bool:
        """Return whether what made the namespaces is gone."""
        return self._has_ended is not None

    @property
    def launcher_depth(self) -> int:
        """How many processes are between the one that was started and bubblewrap."""
        return self._launcher_depth

    def restored(self, first_pid: int, first: int, command_pid: int, *, is_alone: bool) -> None:
        """Take over a command that another process started and let in; the descriptor is then its own."""
        self.first_pid, self.first, self._command_pid = first_pid, first, command_pid
        self._is_reported.set()
        if is_alone:
            self._watch(first)

    def detach(self) -> None:
        """Stop watching it and let it live; may be called twice."""
        self._child.detach()
        if self.first is not None:
            asyncio.get_running_loop().remove_reader(self.first)
            os.close(self.first)
            self.first = None
        self._close_nesting()

    def command_pid(self, besides: int = 0) -> int:
        """Return the pid of the command itself on the host; 0 until it has been started.

        Called before anything else but `besides` runs inside, when it is the first process's oldest child; orphans come
        later.
        """
        self._command_pid = self._command_pid or next((one for one in children(self.first_pid) if one != besides), 0)
        return self._command_pid

    async def wait_for_command(self) -> int:
        """Return the command's pid on the host once it has been started; 0 if that never happens."""
        # The command starts some 100 µs after bubblewrap's last message, and nothing reports it.
        while not self.command_pid() and self.is_there():  # noqa: ASYNC110
            await asyncio.sleep(_RETRY_S)
        return self._command_pid

    def is_there(self) -> bool:
        """Return whether the first process lives."""
        if self.first is None:
            return False
        poll = select.poll()
        poll.register(self.first, select.POLLIN)
        return not poll.poll(0)

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal. After `leave_alone` it is always -SIGKILL."""
        if self._has_ended is not None:
            await self._has_ended.wait()
            return -signal.SIGKILL
        status = await self._child.wait()
        # bubblewrap reports a signal as shells do.
        return 128 - status if status - 128 in signal.valid_signals() else status

    async def kill_all(self) -> None:
        """Kill the namespaces' first process, which ends all others, then bubblewrap; may be called twice."""
        # bubblewrap reports or dies soon; if it were killed before, it would leave its child to the host's init.
        await self._is_reported.wait()
        if self.first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
            # It is killed; whatever hides its end must not keep everyone else waiting.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await (self._has_ended.wait() if self._has_ended else wait_readable(self.first))
            asyncio.get_running_loop().remove_reader(self.first)
            os.close(self.first)
            self.first = None
            if self._launcher_depth:
                # Each process in between ends with its child and reaps it. If killed, it would leave that to the host's
                # init, and until init reaps the child, the parent's pid namespace cannot end.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._child.wait(), _TIMEOUT_S)
        elif not self._is_held:
            self._kill_by_number()
        self._child.kill_group()
        await self._child.wait()
        self._release()
        if self._reaper is not None:
            self._reaper.unregister(self.first_pid)
        self._close_gate()
        self._close_bubblewrap()
        self._close_nesting()

    def _kill_by_number(self) -> None:
        """Kill the first process by pid, where there are no pidfds. An unreaped parent that has it proves the pid."""
        parent = self.pid
        for _ in range(self._launcher_depth):
            parent = only_child(parent)
        if self.first_pid in children(parent):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.first_pid, signal.SIGKILL)

    def _release(self) -> None:
        # Unregister first, because after the release the pid may become another process's.
        if self._reaper is not None:
            self._reaper.unregister(-self.pid)
        self._child.release()

    def _close_nesting(self) -> None:
        if self.proc_mount is not None:
            os.close(self.proc_mount)
            self.proc_mount = None

    def _close_gate(self) -> None:
        if self._start_gate is not None:
            start_gate, self._start_gate = self._start_gate, None
            os.close(start_gate)

    def _close_bubblewrap(self) -> None:
        if self._bubblewrap is not None:
            os.close(self._bubblewrap)
            self._bubblewrap = None

    def _on_info(self, info: int) -> None:
        piece = os.read(info, 4096)
        self._info += piece
        try:
            reported_pid = int(json.loads(self._info)["child-pid"])
        except ValueError:  # incomplete, or empty because bubblewrap died
            if piece:
                return
        else:
            self._find_first(reported_pid)
        # Not read to end of file, because what entered other namespaces before bubblewrap still holds the pipe.
        asyncio.get_running_loop().remove_reader(info)
        os.close(info)
        self._is_reported.set()

    def _find_first(self, reported_pid: int) -> None:
        """Find the first process. Behind launchers, bubblewrap reports a pid of another namespace: go by children."""
        parent, first = self.pid, reported_pid
        for _ in range(self._launcher_depth):
            grandparent, parent = parent, only_child(parent)
            first = only_child(parent)
            self._close_bubblewrap()
            self._bubblewrap = _open_child(parent, of=grandparent)
        self.first_pid = first
        self.first = _open_child(first, of=parent)
        self._is_held = self.first is not None
        if self._reaper is not None and self.first is not None:
            self._reaper.register(first)
        if not first:
            # It lives but cannot be found, so nothing else would ever end it.
            self._child.kill_group()


async def _wait_taken(start_gate: int) -> None:
    loop = asyncio.get_running_loop()
    is_writable = loop.create_future()
    loop.add_writer(start_gate, lambda: is_writable.done() or is_writable.set_result(None))
    try:
        await is_writable
    finally:
        loop.remove_writer(start_gate)


def _unread(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def only_child(pid: int) -> int:
    """Return the child of a process that has one child and one thread; 0 when it is gone."""
    return next(iter(children(pid)), 0)


def _open_child(pid: int, *, of: int) -> int | None:
    """Return a pidfd of that child; None if the pid is by now another process's, because commands can end quickly."""
    if (pidfd := open_pidfd(pid)) is None:
        return None
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        if int(text[text.rindex(")") + 2 :].split()[1]) == of:
            return pidfd
    os.close(pidfd)
    return None
