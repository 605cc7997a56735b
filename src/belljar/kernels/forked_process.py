"""Forks of a running process: asking for one, admitting it to a sandbox, and learning how it ended.

A fork has a wire of its own and is no child of the server. Owns `ForkedProcess`, which tells the exit status of such a
process, and `CheckpointProcess`, a fork that runs nothing until a kernel is restored from it. Does not know what the
forked process runs.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from belljar.errors import CopyRefused, SandboxUnavailable
from belljar.kernels import protocol
from belljar.kernels.base import KernelCheckpoint
from belljar.kernels.wire import Wire
from belljar.sandboxes.base import HOLD, ForkedSandbox, NamespaceEntry, Sandbox
from belljar.sandboxes.child import open_pidfd
from belljar.sandboxes.limits.enforcement import OOM_SCORE

UNKNOWN_STATUS = 256
"""The exit status of a process whose end nobody could report."""
_MAX_NOTE_BYTES = 65_536
_RETRY_S = 0.001
_REAP_TIMEOUT_S = 1.0
_PARENT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ForkIdentity:
    """What a fork has that differs from the process it was forked from.

    It is told to the fork alone, once that is in its sandbox: what the process that forks had read, every later fork of
    it would have in its memory.
    """

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables to set; for a fork of a zygote, all that it has."""
    moved: Mapping[str, str] = field(default_factory=dict[str, str])
    """Package folders that have another path in the fork's sandbox, old to new."""
    folder: str = "/"
    """The working directory, unless the fork already has one that exists."""
    reseed: bool = False

    def message(self) -> dict[str, Any]:
        """Return the first message that a fork reads."""
        return {
            "environment": dict(self.environment),
            "moved": dict(self.moved),
            "folder": self.folder,
            "reseed": self.reseed,
        }


class _StatusNote(BaseModel):
    status: int | None = None
    error: str = ""


class ForkedProcess:
    """A forked process and how it ended.

    Where Linux tells the exit status to any holder of a pidfd, it is read from there. Elsewhere a *keeper*, a process
    inside that waits for the fork, writes the status into a pipe.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.complaint = ""
        """Why the fork failed; empty if it did not."""
        self.has_keeper = not tells_exits()
        self._status = UNKNOWN_STATUS
        self._received = bytearray()
        self._has_ended = asyncio.Event()
        self._is_closed_or_watched = asyncio.Event()
        self._pidfd = -1
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._on_pipe_data)

    @property
    def child_end(self) -> int:
        """Return the write end of the status pipe, for the process that forks."""
        return self._writing

    def close_child_end(self) -> None:
        """Close our copy of the write end, once the forking process has it; may be called twice."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def watch_pid(self, pid: int) -> None:
        """Watch the process that the fork's first message came from; may be called twice."""
        if self.pid:
            return
        self.pid = pid
        self._is_closed_or_watched.set()
        if self.has_keeper or self._has_ended.is_set():
            return
        if (pidfd := open_pidfd(pid)) is None:
            self.close()
            return
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    async def wait_left_parent(self) -> None:
        """Wait until the process that forks is done with it, or the fork has reported; for a second at most."""
        if self.has_keeper:
            return  # the keeper has the pipe open for as long as the fork lives
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PARENT_TIMEOUT_S):
                await self._is_closed_or_watched.wait()

    @property
    def listening_end(self) -> int:
        """Return the pipe on which the keeper reports how the fork ended; negative where it has no keeper."""
        return self._reading if self.has_keeper else -1

    def take_over(self, pid: int, pidfd: int, listening_end: int) -> None:
        """Take over a process that an earlier server forked, with its descriptors.

        `listening_end` is negative without a keeper.
        """
        self._stop_listening()
        self.close_child_end()
        loop = asyncio.get_running_loop()
        self.pid, self._pidfd, self.has_keeper = pid, pidfd, listening_end >= 0
        if self.has_keeper:
            self._reading = listening_end
            loop.add_reader(listening_end, self._on_pipe_data)
        else:
            loop.add_reader(pidfd, self._on_exit)

    async def wait(self) -> int:
        """Wait for the end and return the exit status; negative for a signal."""
        await self._is_closed_or_watched.wait()
        if self.pid:
            await self._has_ended.wait()
        return self._status

    def _on_pipe_data(self) -> None:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self._reading, 4096)
            self._received += piece
            if piece and len(self._received) < _MAX_NOTE_BYTES:
                return
            self._read_status_note()

    def _read_status_note(self) -> None:
        with contextlib.suppress(ValidationError):
            note = _StatusNote.model_validate_json(bytes(self._received))
            self._status = UNKNOWN_STATUS if note.status is None else note.status
            self.complaint = note.error
        self._stop_listening()
        # Without a keeper the forking process closes the pipe at once, and only the pidfd tells when the fork ends.
        if self.has_keeper or self.complaint:
            self.close()

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._poll_status(loop.time() + _REAP_TIMEOUT_S)

    def _poll_status(self, deadline: float) -> None:
        """Read the exit status, and try again until the deadline.

        Linux knows it only once the first process of the sandbox has waited for the fork, which happens at once.
        """
        if self._pidfd < 0:
            return
        loop = asyncio.get_running_loop()
        status = exit_status(self._pidfd)
        if status is None and loop.time() < deadline:
            loop.call_later(_RETRY_S, self._poll_status, deadline)
            return
        self._status = UNKNOWN_STATUS if status is None else status
        self.close()

    def _stop_listening(self) -> None:
        if self._reading >= 0:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1
        self._is_closed_or_watched.set()

    def close(self) -> None:
        """Stop watching the process and release the descriptors; may be called twice."""
        self._stop_listening()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self.close_child_end()
        self._has_ended.set()


async def request_fork(
    wire: Wire,
    fork_wire: Wire,
    forked: ForkedProcess,
    *,
    in_other_sandbox: bool,
    entry: NamespaceEntry | None = None,
    **more: Any,
) -> None:
    """Ask a runner or a zygote to fork a kernel. The request says nothing that later forks must not know.

    The fork of a zygote enters the sandbox of `entry`. That of a session stays in the same one, or with
    `in_other_sandbox` waits for `move_into_sandbox` to name another.
    """
    descriptors = [*fork_wire.child_ends, forked.child_end]
    if entry is not None:
        descriptors += [entry.holder, *entry.groups]
        more["entry"] = _entry_fields(entry)
    message = {
        "op": "fork",
        "is_elsewhere": in_other_sandbox,
        "has_keeper": forked.has_keeper,
        "descriptors": len(descriptors),
        **more,
    }
    await wire.send(message, descriptors)
    fork_wire.close_child_ends()
    forked.close_child_end()


async def move_into_sandbox(wire: Wire, nested: ForkedSandbox, sandbox: Sandbox) -> None:
    """Open a nested sandbox, and have a fork of a session enter it. `sandbox` is the same one as the kernel sees it.

    The fork was asked for before, so that it is forked while bubblewrap makes the sandbox.
    """
    await hold_open(sandbox)
    entry = nested.entry()
    # Code of a session could keep the descriptor of a control group and leave its own group by it. So the fork gets
    # none, and the host moves it.
    await wire.send(_entry_fields(entry), [entry.holder])


def _entry_fields(entry: NamespaceEntry) -> dict[str, int]:
    return {"flags": entry.flags, "uid": entry.identity.uid, "gid": entry.identity.gid}


async def hold_open(sandbox: Sandbox) -> None:
    """Open a sandbox and keep it open with a command that only waits."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        await sandbox.spawn(HOLD, environment={"PATH": "/usr/bin:/bin"}, stdout=writing, stderr=writing)
    except SandboxUnavailable as error:
        with contextlib.suppress(BlockingIOError):
            error.hint = os.read(reading, 2_000).decode(errors="replace").strip() or error.hint
        raise
    finally:
        os.close(reading)
        os.close(writing)


def set_expendable(pid: int, *, is_expendable: bool) -> None:
    """Set whether Linux kills this process before all others, or only before the server, when memory runs out."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000" if is_expendable else OOM_SCORE)


def parent_of(pid: int) -> int:
    """Return the pid of the parent process; 0 when it is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])


def private_memory_mb(pid: int) -> float:
    """Return the memory of a process that it shares with no other; 0 when it is unknown."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    kilobytes = sum(
        int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Dirty:", "Private_Clean:"))
    )
    return kilobytes / 1024


# Checkpoints: forks of a kernel that run nothing until a kernel is restored from them

FORK_TIMEOUT_S = 10.0


class CheckpointProcess:
    """The process of a `KernelCheckpoint`: it waits on its wire for a request to fork, and runs nothing."""

    def __init__(self, wire: Wire, lost: list[str]) -> None:
        self.wire = wire
        self.lost = lost
        self.pid = wire.peer_pid
        # When memory runs out, Linux kills checkpoints first. A kernel that is restored from one is reset to normal.
        set_expendable(self.pid, is_expendable=True)

    def is_alive(self) -> bool:
        """See `KernelCheckpoint`."""
        return not self.wire.is_hung_up()

    def memory_mb(self) -> float:
        """See `KernelCheckpoint`."""
        return private_memory_mb(self.pid)


def as_checkpoint_process(checkpoint: KernelCheckpoint) -> CheckpointProcess:
    """Return a checkpoint as the class of this module; TypeError for another kernel's."""
    if not isinstance(checkpoint, CheckpointProcess):
        raise TypeError(f"{checkpoint!r} is a checkpoint of another kind of kernel")
    return checkpoint


def check_forked(answer: protocol.ForkedMessage) -> protocol.ForkedMessage:
    """Return the runner's answer; CopyRefused with the runner's reason when it could not fork."""
    if answer.error:
        hint = "End some of them first, or start a new session" if "threads" in answer.error else ""
        raise CopyRefused(f"the session cannot be copied: {answer.error}", hint=hint or "Start a new session instead")
    return answer


@asynccontextmanager
async def fork_timeout() -> AsyncGenerator[None]:
    """Limit the wait for a session's answer, because its code may see to it that none comes."""
    try:
        async with asyncio.timeout(FORK_TIMEOUT_S):
            yield
    except TimeoutError:
        raise CopyRefused(
            f"the session cannot be copied: it gave no answer in {FORK_TIMEOUT_S:g} s", hint="Start a new session"
        ) from None


# The exit status of a process that is no child of ours: Linux 6.15 and later tell it to whoever holds its pidfd

_PIDFD_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3
_EXIT_INFO = struct.Struct("=Q52xi")


def exit_status(pidfd: int) -> int | None:
    """Return the status, negative for a signal; None while the process lives or nobody has waited for it yet."""
    answer = bytearray(_EXIT_INFO.size)
    _EXIT_INFO.pack_into(answer, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    known, code = _EXIT_INFO.unpack(answer)
    return os.waitstatus_to_exitcode(code) if known & _INFO_EXIT else None


@cache
def tells_exits() -> bool:
    """Return whether this Linux tells the exit status of foreign processes; tried once, with a child of our own."""
    if sys.platform != "linux":
        return False
    try:
        with subprocess.Popen(["/bin/false"], stdin=subprocess.DEVNULL) as child:
            pidfd = os.pidfd_open(child.pid)
    except OSError:
        return False
    try:
        return exit_status(pidfd) == 1
    finally:
        os.close(pidfd)
