"""Starts a child of this process on the event loop's thread, and waits for it without blocking the loop.

`asyncio.create_subprocess_exec` is not used, because it makes transports that nobody reads and, on Python 3.11, a
thread for each child. A child stays unreaped until `release`, so the kernel cannot give its pid or its process group to
another process meanwhile. Also runs a program of the host for its answer, for callers that may block. Knows nothing of
sandboxes.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from belljar.errors import InvalidArgument, SandboxUnavailable


class Started(Protocol):
    """A started process, until `release`."""

    pid: int

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        ...

    def kill_group(self) -> None:
        """Send SIGKILL to the process and its process group."""
        ...

    def release(self) -> None:
        """Reap the process, once it has ended; may be called twice."""
        ...

    def detach(self) -> None:
        """Stop watching the process and let it live; may be called twice. For a child of another process."""
        ...


class StartChild(Protocol):
    """Starts a command, as a child of the server or of the supervisor."""

    async def __call__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
    ) -> Started:
        """Start the command in a session and process group of its own."""
        ...


def start_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int],
) -> "Child":
    """Start a command in a session and process group of its own; call it from a coroutine."""
    try:
        # Only `pass_fds` cross the exec; every other descriptor of the server is closed.
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=folder,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    except ValueError as error:
        raise InvalidArgument(f"Cannot start {command[0]!r}: {error}") from error
    except OSError as error:
        raise SandboxUnavailable(
            f"Cannot start {command[0]}: {error.strerror}", hint="Check that the file exists and may be executed"
        ) from error
    return Child(process)


async def start_own_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int],
) -> "Child":
    """Start a command with `start_child`, in the form of a `StartChild`."""
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    return start_child(command, environment=environment, folder=folder, pass_fds=pass_fds, **streams)


class Child:
    """A started child of this process, until `release`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._status = 0
        self._has_ended = asyncio.Event()
        self._pidfd = open_pidfd(process.pid)
        if self._pidfd is None:
            threading.Thread(target=self._wait_in_thread, name=f"wait-{self.pid}", daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit, self._pidfd)

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        await self._has_ended.wait()
        return self._status

    def kill_group(self) -> None:
        """Send SIGKILL to the child and its process group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Reap the child, once it has ended; may be called twice."""
        if self._pidfd is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._process.wait()

    async def reap(self) -> None:
        """Wait for a child that is about to end, and release it; a caller that is cancelled meanwhile has it killed."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.kill_group()
            raise
        finally:
            self.release()

    def detach(self) -> None:
        """Do nothing, because the server's own children end with it."""

    def _on_exit(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        outcome = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # Nobody else reaps our children; but where the server ignores SIGCHLD, the kernel has no status to return.
        status = 0 if outcome is None else outcome.si_status
        self._end(status if outcome is None or outcome.si_code == os.CLD_EXITED else -status)

    def _wait_in_thread(self) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            self._loop.call_soon_threadsafe(self._end, status)

    def _end(self, status: int) -> None:
        self._status = status
        self._has_ended.set()


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor of this process that never means a later one with its pid; None where that is impossible."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def children(pid: int) -> list[int]:
    """Return the children of a process with one thread, oldest first, then those it inherited. Linux only."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def wait_readable(descriptor: int) -> None:
    """Wait until a read would not block. A descriptor can have one waiter."""
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    loop.add_reader(descriptor, lambda: is_readable.done() or is_readable.set_result(None))
    try:
        await is_readable
    finally:
        loop.remove_reader(descriptor)


@asynccontextmanager
async def open_output_pipe() -> AsyncGenerator[tuple[int, asyncio.StreamReader]]:
    """Open a pipe for a command's output; yield its write end, which the caller closes, and what reads it."""
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    try:
        yield writing, reader
    finally:
        transport.close()


class ProgramAnswer(NamedTuple):
    """How a program of the host ended, and what it printed."""

    status: int
    output: str
    errors: str


class ProgramSilent(Exception):
    """Raised when a program does not run, or gives no answer in time; the message says which, and why."""


def run_program(
    command: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    umask: int = -1,
) -> ProgramAnswer:
    """Run a program of the host, with an empty stdin and, unless told otherwise, our variables; blocks."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
            start_new_session=True,
            umask=umask,
        )
    except OSError as error:
        raise ProgramSilent(f"{command[0]} does not run: {error.strerror}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            # Kill the whole process group, because children of a wrapper script hold the pipes too, and leaving the
            # `with process` block would wait for them.
            with contextlib.suppress(ProcessLookupError):
                _kill_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ProgramSilent(f"{command[0]} gave no answer in {timeout_s:g} s") from None
            raise
    return ProgramAnswer(process.returncode, output, errors)


def _kill_group(process: "subprocess.Popen[str]") -> None:
    if sys.platform == "win32":  # where container engines are asked, too
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
