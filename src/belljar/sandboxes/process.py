"""The `process` provider: plain processes of this user, on this machine, without any isolation.

For machines that cannot isolate, and for code that is trusted. What a session starts is ended with it as far as
its search can find it, and with its control group where those can be written. Outside Linux only the process
group is ended, and nothing is limited. The folder for temporary files is a plain one, so its size is not limited. The
session's folder is at its own path, and at /mnt/data where `data_path.py` can show it there.
"""

import asyncio
import contextlib
import os
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import HostCheck, Incident, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.child import Child, open_pidfd, start_child
from belljar.sandboxes.data_path import DataPath, unlink
from belljar.sandboxes.defaults import SandboxBase, WithoutHostUsers
from belljar.sandboxes.limits.enforcement import Enforcement, Enforcer

MARK = "BELLJAR_SANDBOX"

_TIMEOUT_S = 10.0
_PROC = Path("/proc")


class ProcessProvider(WithoutHostUsers):
    """Makes sandboxes that do not isolate."""

    name = "process"
    isolates = False
    shows_folders = "as they are"
    shows_devices = True  # of the whole host
    _warning = (
        "The process sandbox does NOT isolate: code in a session can read, change and send away "
        "everything the user who runs this server can, and egress rules are not enforced"
    )

    def __init__(self, enforcer: Enforcer | None = None, data_path: DataPath | None = None) -> None:
        self._enforcer = enforcer or Enforcer()
        self._data_path = data_path or DataPath()

    @property
    def shows_workspace(self) -> bool:
        """See `HostPathProvider`."""
        return self._data_path.is_shown

    @property
    def warning(self) -> str:
        """That it isolates nothing, and what it cannot limit."""
        return ". ".join(filter(None, (self._warning, self._enforcer.warning)))

    def check(self) -> list[HostCheck]:
        """Return lines that are always ok, because it needs nothing of the host."""
        return [HostCheck("process", is_ok=True, detail="available, does not isolate"), self._enforcer.check()]

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet."""
        await asyncio.to_thread(lambda: self._data_path.is_shown)  # starts a process when first asked
        return ProcessSandbox(spec, self._enforcer.enforce(spec.session_id, spec.limits), self._data_path)


class ProcessSandbox(SandboxBase):
    """The processes of one session. They get one more variable, `BELLJAR_SANDBOX`, by which they are found again.

    A shell starts each command, so `PWD`, `OLDPWD` and `SHLVL` do not reach it, and some shells add `_`.
    """

    def __init__(self, spec: SandboxSpec, enforcement: Enforcement, data_path: DataPath) -> None:
        super().__init__(spec)
        self.workspace = str(spec.workspace)
        self.scratch = str(spec.scratch)
        self.home = str(spec.home)
        self.temporary = str(spec.home)
        self.can_spare = sys.platform == "linux"
        self.ends_with_command = False
        self._enforcement = enforcement
        self._data_path = data_path
        self._link = data_path.link(spec.workspace)
        self._mark = secrets.token_hex(16)
        self._children: list[Child] = []

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in the session folder."""
        self._check_open()
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            # The shell that starts it would report this only where nobody reads it.
            raise SandboxUnavailable(
                f"Cannot start {command[0]}: No such file", hint="Check that the file exists and may be executed"
            )
        stdin, line = os.pipe()
        try:
            child = start_child(
                self._enforcement.limited_command(self._data_path.command(self.workspace, command), waits=True),
                environment={**environment, MARK: self._mark},
                folder=self.workspace,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
            )
            self._children.append(child)
            # Without a control group their number is not limited, because other processes of the user would count too.
            self._enforcement.bind(child.pid, is_alone=False)
            # The shell has waited for this line until its limits were set; after it the command reads only end of file.
            with contextlib.suppress(BrokenPipeError):
                os.write(line, b"\n")
        finally:
            os.close(stdin)
            os.close(line)
        return child

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        return self._enforcement.incidents()

    def memory_peak_mb(self) -> float:
        """Return the most memory that all processes together held since the last call; 0 where not measured."""
        return self._enforcement.memory_peak_mb()

    async def kill(self, spare: Collection[int] = ()) -> None:
        """Kill every process that can be found except the spared; outside Linux none can be spared."""
        async with self._ending:
            if spare and sys.platform == "linux":
                for child in self._children:
                    await asyncio.to_thread(kill_process_tree, child.pid, self._mark, spare)
                return
            while self._children:
                child = self._children[-1]
                self._enforcement.kill()
                child.kill_group()
                if sys.platform == "linux":
                    await asyncio.to_thread(kill_process_tree, child.pid, self._mark)
                await child.wait()
                child.release()
                self._children.remove(child)

    async def aclose(self) -> None:
        """Kill everything and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()
        link, self._link = self._link, None
        if link is not None:
            unlink(link, self.spec.workspace)
        await self._enforcement.release()


@dataclass(frozen=True, slots=True)
class _ProcessEntry:
    pid: int
    parent: int
    session: int
    started: int
    is_dead: bool


def kill_process_tree(leader: int, mark: str, spare: Collection[int] = ()) -> None:
    """Kill all processes of the command `leader` except the spared, and wait. `leader` must not have been reaped."""
    deadline = time.monotonic() + _TIMEOUT_S
    untouchable = set(spare)
    # Each pass may miss a child that is being forked; the next one sees it.
    while members := [process for process in _members(leader, mark) if process.pid not in untouchable]:
        untouchable |= _kill(members, deadline)


def open_descendant(ancestor: int, name: str) -> int | None:
    """Return a pidfd of the descendant whose command line begins with this name; None when there is none."""
    living = {process.pid: process for process in _processes() if not process.is_dead}
    below = {ancestor}
    while more := {p.pid for p in living.values() if p.parent in below} - below:
        below |= more
    for pid in below:
        if _name(pid) == name and (pidfd := open_pidfd(pid)) is not None:
            if _is_same(living[pid]):
                return pidfd
            os.close(pidfd)
    return None


def _name(pid: int) -> str:
    try:
        return os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0])
    except OSError:
        return ""


def _members(leader: int, mark: str) -> list[_ProcessEntry]:
    living = {process.pid: process for process in _processes() if not process.is_dead and process.pid != os.getpid()}
    wanted = f"{MARK}={mark}".encode()
    found = {p.pid for p in living.values() if p.session == leader or wanted in _environment(p.pid)}
    while more := {p.pid for p in living.values() if p.parent in found} - found:
        found |= more
    return [living[pid] for pid in found]


def _processes() -> Iterator[_ProcessEntry]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (process := _read(int(folder.name))):
            yield process


def _read(pid: int) -> _ProcessEntry | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in brackets and may itself contain blanks and brackets, so the fields count from the last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    return _ProcessEntry(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(members: list[_ProcessEntry], deadline: float) -> set[int]:
    """Kill the processes, wait until they are gone, and return those that cannot be killed."""
    with contextlib.ExitStack() as stack:
        dying: dict[int, int] = {}
        survivors: set[int] = set()
        for process in members:
            if (pidfd := open_pidfd(process.pid)) is None:
                continue
            stack.callback(os.close, pidfd)
            if not _is_same(process):
                continue
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                dying[pidfd] = process.pid
            except ProcessLookupError:
                continue
            except PermissionError:
                survivors.add(process.pid)
        return survivors | _wait_gone(dying, deadline)


def _is_same(process: _ProcessEntry) -> bool:
    now = _read(process.pid)
    return now is not None and now.started == process.started


def _wait_gone(dying: dict[int, int], deadline: float) -> set[int]:
    poll = select.poll()
    for pidfd in dying:
        poll.register(pidfd, select.POLLIN)
    while dying and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            del dying[pidfd]
    return set(dying.values())
