"""Copies of a running process: how one is asked for, met on a wire of its own, and heard of when it ends."""

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
from belljar.kernels.base import KernelSnapshot
from belljar.kernels.wire import Wire
from belljar.sandboxes.base import ForkedSandbox, Sandbox
from belljar.sandboxes.child import open_pidfd

UNKNOWN_STATUS = 256
"""How a process ended that nobody could be asked about."""
# Deaf to what a session sends to every `sleep` there is.
HOLD = ("/bin/sh", "-c", "trap '' HUP INT TERM; exec sleep infinity")
_MOST_SAID = 65_536
_RETRY_S = 0.001
_REAPED_S = 1.0


@dataclass(frozen=True, slots=True)
class ForkIdentity:
    """What is different for a copy."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables to set; for a copy of a zygote, all there are."""
    moved: Mapping[str, str] = field(default_factory=dict[str, str])
    """Folders of packages that are elsewhere, old to new."""
    folder: str = "/"
    """Where it works, unless it already works somewhere that exists."""
    reseed: bool = False
    threads: int = 1
    """How many the linear algebra may use."""


class _StatusNote(BaseModel):
    status: int | None = None
    error: str = ""


class ForkedProcess:
    """A copy of a process: seen through its own descriptor where Linux tells how it ended, else through its keeper."""

    def __init__(self) -> None:
        self.pid = 0
        self.complaint = ""
        """Why there is no copy."""
        self.has_keeper = not tells_exits()
        self._status = UNKNOWN_STATUS
        self._said = bytearray()
        self._has_ended = asyncio.Event()
        self._is_silent_or_met = asyncio.Event()
        self._pidfd = -1
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._on_word)

    @property
    def child_end(self) -> int:
        """For who forks it."""
        return self._writing

    def close_child_end(self) -> None:
        """Once the other one has it."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def meet(self, pid: int) -> None:
        """It has shown itself; may be called twice."""
        if self.pid:
            return
        self.pid = pid
        self._is_silent_or_met.set()
        if self.has_keeper or self._has_ended.is_set():
            return
        if (pidfd := open_pidfd(pid)) is None:
            self.close()
            return
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    @property
    def listening_end(self) -> int:
        """Where its keeper tells how it ended; negative where it has none."""
        return self._reading if self.has_keeper else -1

    def restored(self, pid: int, pidfd: int, listening_end: int) -> None:
        """It was an earlier server's; the descriptors are its own now, the last one negative without a keeper."""
        self._stop_listening()
        self.close_child_end()
        loop = asyncio.get_running_loop()
        self.pid, self._pidfd, self.has_keeper = pid, pidfd, listening_end >= 0
        if self.has_keeper:
            self._reading = listening_end
            loop.add_reader(listening_end, self._on_word)
        else:
            loop.add_reader(pidfd, self._on_exit)

    async def wait(self) -> int:
        """Exit status when it ends; negative for a signal."""
        await self._is_silent_or_met.wait()
        if self.pid:
            await self._has_ended.wait()
        return self._status

    def _on_word(self) -> None:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self._reading, 4096)
            self._said += piece
            if piece and len(self._said) < _MOST_SAID:
                return
            self._hear()

    def _hear(self) -> None:
        with contextlib.suppress(ValidationError):
            told = _StatusNote.model_validate_json(bytes(self._said))
            self._status = UNKNOWN_STATUS if told.status is None else told.status
            self.complaint = told.error
        self._stop_listening()
        # Who forks it without a keeper falls silent at once: then it is over when its own descriptor says so.
        if self.has_keeper or self.complaint:
            self.close()

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._ask(loop.time() + _REAPED_S)

    def _ask(self, deadline: float) -> None:
        """It is known only when the first process of its sandbox has waited for it, which it does at once."""
        if self._pidfd < 0:
            return
        loop = asyncio.get_running_loop()
        status = exit_status(self._pidfd)
        if status is None and loop.time() < deadline:
            loop.call_later(_RETRY_S, self._ask, deadline)
            return
        self._status = UNKNOWN_STATUS if status is None else status
        self.close()

    def _stop_listening(self) -> None:
        if self._reading >= 0:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1
        self._is_silent_or_met.set()

    def close(self) -> None:
        """Hear no more of it; may be called twice."""
        self._stop_listening()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self.close_child_end()
        self._has_ended.set()


async def ask_for_copy(
    wire: Wire, copy: Wire, kept: ForkedProcess, change: ForkIdentity, *, is_elsewhere: bool, **more: Any
) -> None:
    """Ask a runner or a zygote for a copy of itself that runs, in the same sandbox or where `show_in` will say."""
    message = {
        "op": "fork",
        "is_elsewhere": is_elsewhere,
        "has_keeper": kept.has_keeper,
        "environment": dict(change.environment),
        "moved": dict(change.moved),
        "folder": change.folder,
        "reseed": change.reseed,
        "threads": change.threads,
        **more,
    }
    await wire.send(message, [*copy.child_ends, kept.child_end])
    copy.close_child_ends()
    kept.close_child_end()


async def show_in(
    copy: Wire, branch: ForkedSandbox, sandbox: Sandbox, *, is_session: bool, is_held: bool = False
) -> None:
    """Open a branch, which `sandbox` is to the kernel, unless it is held open, and have the copy enter it.

    The copy was asked for first: it is forked while bubblewrap makes the sandbox, which takes as long.
    """
    if not is_held:
        await hold_open(sandbox)
    entrance = branch.entrance()
    user = entrance.identity
    message = {"flags": entrance.flags, "uid": user.uid, "gid": user.gid}
    # Code of a session's could keep the way into a control group, and leave its own by it: the host moves its copies.
    await copy.send(message, [entrance.holder, *(() if is_session else entrance.groups)])


async def hold_open(sandbox: Sandbox) -> None:
    """Open a sandbox and keep it open, with nothing inside yet."""
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
    """Whether memory that runs out is taken from this process before all others."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000" if is_expendable else "0")


def parent_of(pid: int) -> int:
    """The process that would be told of this one's end; 0 when it cannot be told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])


def private_memory_mb(pid: int) -> float:
    """What a process holds that no other one shares; 0 when it cannot be told."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    kilobytes = sum(
        int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Dirty:", "Private_Clean:"))
    )
    return kilobytes / 1024


# Copies of kernels that sleep: processes that run nothing until a kernel is woken from them, and what may go wrong.

COPY_PATIENCE_S = 10.0


class SnapshotProcess:
    """A copy of a kernel as it once was."""

    def __init__(self, wire: Wire, lost: list[str]) -> None:
        self.wire = wire
        self.lost = lost
        self.pid = wire.peer_pid
        # Memory that runs out is taken from copies first; a woken one starts as important as any.
        set_expendable(self.pid, is_expendable=True)

    def is_alive(self) -> bool:
        """Whether it can still be woken."""
        return not self.wire.is_hung_up()

    def memory_mb(self) -> float:
        """What it costs beside the kernel."""
        return private_memory_mb(self.pid)


def ours(copy: KernelSnapshot) -> SnapshotProcess:
    """A copy that was made here."""
    if not isinstance(copy, SnapshotProcess):
        raise TypeError(f"{copy!r} is a copy of another kind of kernel")
    return copy


def check_copied(answer: protocol.ForkedMessage) -> protocol.ForkedMessage:
    """Refuse what the runner could not copy, in its words."""
    if answer.error:
        raise CopyRefused(
            f"the session cannot be copied: {answer.error}", hint="End those threads first, or start a new session"
        )
    return answer


@asynccontextmanager
async def patience() -> AsyncGenerator[None]:
    """For an answer of a session, whose code may see to it that there is none."""
    try:
        async with asyncio.timeout(COPY_PATIENCE_S):
            yield
    except TimeoutError:
        raise CopyRefused(
            f"the session cannot be copied: it gave no answer in {COPY_PATIENCE_S:g} s", hint="Start a new session"
        ) from None


# How a process ended that is no child of ours, as Linux tells it from 6.15 on to whoever has a descriptor of it.

_PIDFD_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3
_WORDS = struct.Struct("=Q52xi")


def exit_status(pidfd: int) -> int | None:
    """The status, negative for a signal; None while the process lives or nobody has waited for it yet."""
    answer = bytearray(_WORDS.size)
    _WORDS.pack_into(answer, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    known, code = _WORDS.unpack(answer)
    return os.waitstatus_to_exitcode(code) if known & _INFO_EXIT else None


@cache
def tells_exits() -> bool:
    """Whether this kernel of the operating system does; tried once, with a process of our own."""
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
