"""One session's namespaces: starts commands in them, lets forked processes enter, and ends them.

`bwrap_args.py` says what is visible inside, `namespaces.py` where bubblewrap is started. A sandbox that others were
nested in holds their namespaces: when it is closed it kills its own processes, and it is released with the
last of them.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import HOLD, Incident, NamespaceEntry, SandboxProcess, SandboxSpec
from belljar.sandboxes.defaults import SandboxBase
from belljar.sandboxes.limits.enforcement import Enforcement, counts_processes_of_namespace, rank_for_oom_killer
from belljar.sandboxes.namespace.bwrap_args import (
    BwrapCommand,
    bubblewrap_command,
    minimal_root,
)
from belljar.sandboxes.namespace.namespaces import (
    BwrapLaunch,
    NamespaceLevel,
    NamespaceTools,
    ParentSandbox,
    Resources,
)
from belljar.sandboxes.namespace.pid_namespace import SparedProcesses, kill_all_except
from belljar.sandboxes.namespace.process import NamespaceProcess
from belljar.sandboxes.namespace.trial import advice, try_bubblewrap
from belljar.sandboxes.namespace.user_namespaces import WRITER, session_counts
from belljar.sandboxes.seccomp import ALL_NAMESPACES

_MAKING_S = 30.0


class NamespaceSandbox(SandboxBase):
    """One session's namespaces. bubblewrap adds one variable to the environment, `PWD`."""

    can_spare = True

    def __init__(
        self,
        tools: NamespaceTools,
        spec: SandboxSpec,
        enforcement: Enforcement,
        *,
        level: NamespaceLevel,
        launch: BwrapLaunch | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec)
        self.level = level
        self.key = ""
        """The key under which it is deposited for the next server; empty if it is not."""
        self._tools = tools
        self._enforcement = enforcement
        self._launch = launch
        self._on_close = [on_close]
        self._processes: list[NamespaceProcess] = []
        self._nested: set[NamespaceSandbox] = set()
        self.nesting = asyncio.Lock()
        """Held while a nested sandbox of it is prepared."""
        self._is_released = False

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a command in new namespaces; return once they are made."""
        self._check_open()
        async with contextlib.AsyncExitStack() as resources:
            launch = await self._prepare_launch(resources)
            # Checked again, because after a close meanwhile nobody would end what is started now.
            self._check_open()
            held, go = _open_pipe(resources)
            with contextlib.ExitStack() as stack:
                bwrap = self._bwrap_command(launch, command, environment, pass_fds, stack)
                if launch.maps:
                    # Without `--sync-fd` the command would inherit the descriptor.
                    waiting = ["--userns-block-fd", str(held), "--sync-fd", str(held)]
                    bwrap = bwrap.after(BwrapCommand(waiting, [held]))
                process = await self._start(launch, bwrap, (stdout, stderr), pass_fds, stack)
                process.command = command
                # The command line names descriptors of the resources. If this is cancelled, they stay open until they
                # have been used, because other descriptors, of another sandbox's namespaces, may get their numbers.
                resources.push_async_callback(process.wait_for_first_process)
            if process not in self._processes:
                # The sandbox was closed while this process started, and that did not kill it.
                await process.kill_all()
                self._check_open()
            try:
                async with asyncio.timeout(_MAKING_S):
                    await self._release_command(process, launch, go)
            except TimeoutError:
                # A process was killed while it made the sandbox, for example because memory ran out.
                await process.kill_all()
                raise SandboxUnavailable(
                    f"bubblewrap has not made the sandbox in {_MAKING_S:g} s", hint="Try again"
                ) from None
            return process

    async def _prepare_launch(self, _resources: Resources) -> BwrapLaunch:
        """Return how bubblewrap is started; what has to be open until then goes into the resources."""
        if self._launch is None:
            raise SandboxUnavailable("A sandbox of an earlier server starts no more commands")
        return self._launch

    def _bwrap_command(
        self,
        launch: BwrapLaunch,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> BwrapCommand:
        user_map = launch.user_map.for_holder() if tuple(command) == HOLD else launch.user_map
        return bubblewrap_command(self._tools.hardening, self.spec, user_map, command, environment, stack)

    def _bind(self, pid: int, *, is_alone: bool) -> None:
        self._enforcement.bind(pid, is_alone=is_alone)

    def _diagnose(self) -> str:
        return try_bubblewrap(self._tools.bubblewrap, self._tools.hardening)

    async def _start(
        self,
        launch: BwrapLaunch,
        bwrap: BwrapCommand,
        streams: tuple[int, int],
        pass_fds: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> NamespaceProcess:
        # The command's stdin is an empty pipe, not /dev/null, because a session that is root could chmod the host's.
        stdin, line = _open_pipe(stack)
        info, info_end = _open_pipe(stack)
        start_gate_end, start_gate = _open_start_gate(stack)
        bubblewrap = [str(self._tools.bubblewrap), "--info-fd", str(info_end), "--block-fd", str(start_gate_end)]
        if not launch.kills_bubblewrap:
            bubblewrap.append("--die-with-parent")
        # Do not make the command wait for a line on stdin if it has its own stdin.
        waits = launch.changes_user or (self._tools.reaper is not None and bwrap.stdin is None)
        child = await self._tools.start(
            self._enforcement.limited_command([*launch.prefix, *bubblewrap, *bwrap.command], waits=waits),
            environment={},
            folder="/",
            stdin=stdin if bwrap.stdin is None else bwrap.stdin,
            stdout=streams[0],
            stderr=streams[1],
            pass_fds=[*pass_fds, info_end, start_gate_end, *launch.descriptors, *bwrap.descriptors],
        )
        rank_for_oom_killer(child.pid)
        process = NamespaceProcess(child, launcher_depth=launch.launcher_depth, reaper=self._tools.reaper)
        process.listen(os.dup(info), os.dup(start_gate))
        if not self._is_closed:
            self._processes.append(process)
        if launch.changes_user:
            # Set here what its children inherit, because the server may not limit another user's process later.
            self._enforcement.bind(child.pid, is_alone=False)
        with contextlib.suppress(BrokenPipeError):
            os.write(line, b"\n")
        return process

    async def _release_command(self, process: NamespaceProcess, launch: BwrapLaunch, go: int) -> None:
        if not await process.wait_for_first_process():
            await self._raise_start_failure(process)
        counts = {} if launch.is_shared else session_counts()
        await WRITER.write(process.first_pid, maps=launch.maps, counts=counts)
        if launch.maps:
            os.write(go, b"\n")
        # Nothing runs inside until its limits hold.
        if not launch.changes_user:
            with contextlib.suppress(ProcessLookupError):
                # Linux counts processes over nested user namespaces together. Where others will enter, set no limit
                # on their number here: `admit` sets it for each process that enters.
                self._bind(process.first_pid, is_alone=self._is_alone and not launch.waits_for_mounts)
        if not launch.waits_for_mounts:
            process.release_command()
        elif not await process.release_command_and_wait_for_mounts():
            await self._raise_start_failure(process)
        if launch.kills_bubblewrap:
            await process.leave_alone()

    @property
    def _is_alone(self) -> bool:
        return self.spec.identity is not None or (os.geteuid() != 0 and counts_processes_of_namespace())

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        return self._enforcement.incidents()

    def memory_peak_mb(self) -> float:
        """Return the most memory that all processes together held since the last call; 0 where not measured."""
        return self._enforcement.memory_peak_mb()

    async def kill(self, spare: Collection[int] = ()) -> None:
        """Kill every process inside and wait. Holders of nested sandboxes or of spared processes are not killed."""
        async with self._ending:
            if spare or self._nested:
                await self._kill_inside(spare, is_last=False)
            else:
                await self._end_all()

    async def aclose(self) -> None:
        """Kill all and start nothing more; may be called twice. What holds nested ones open goes with the last of
        them."""
        self._is_closed = True
        async with self._ending:
            if self._nested:
                await self._kill_inside((), is_last=True)
            else:
                await self._finish()

    async def _kill_inside(self, spare: Collection[int], *, is_last: bool) -> None:
        # A nested one is made by a child of the server that entered this namespace; while that starts, it is not known
        # yet.
        async with self.nesting:
            makers = [process.pid for nested in self._nested for process in nested.processes()]
            for process in [process for process in self._processes if process.is_there()]:
                # Forks of the command that are not the command itself are relays; none of them is a session's code.
                forks_of = () if is_last else process.command
                spared = SparedProcesses([*spare, await process.wait_for_command()], makers, forks_of)
                with self._enforcement.without_forks():
                    await asyncio.to_thread(kill_all_except, process.first_pid, spared)

    async def _end_all(self) -> None:
        while self._processes:
            process = self._processes[-1]
            await process.kill_all()
            self._processes.remove(process)

    async def _finish(self) -> None:
        if self._is_released:
            return
        await self._end_all()
        await self._enforcement.release()
        self._is_released = True
        for on_close in self._on_close:
            on_close()

    async def _raise_start_failure(self, process: NamespaceProcess) -> None:
        """Raise why bubblewrap made no namespaces. It is run again, because its message went to the caller's stderr."""
        status = await process.wait()
        complaint = "" if self._is_closed else await asyncio.to_thread(self._diagnose)
        raise SandboxUnavailable(
            f"bubblewrap ended with status {status} before the sandbox was made{complaint and f': {complaint}'}",
            hint=advice(),
        )

    def holder(self) -> NamespaceProcess:
        """Return the command that holds the namespaces open, for processes that enter and for nested sandboxes."""
        found = next((process for process in reversed(self._processes) if process.is_there()), None)
        if found is None:
            raise SandboxUnavailable(f"Nothing holds the sandbox of session {self.spec.session_id} open")
        return found

    # Handing over to the next server

    def when_closed(self, on_close: Callable[[], None]) -> None:
        """Register a function that is called when the sandbox is closed."""
        self._on_close.append(on_close)

    def processes(self) -> list[NamespaceProcess]:
        """Return the commands that were started in it and that this sandbox has not killed."""
        return [*self._processes]

    @property
    def enforcement(self) -> Enforcement:
        """The limits in force."""
        return self._enforcement

    def restored(self, processes: Sequence[NamespaceProcess]) -> None:
        """Take over an earlier server's commands. The sandbox is closed, except for those nested in it, until
        `claim`."""
        self._processes = [*processes]
        self._is_closed = True

    def claim(self) -> None:
        """Open a restored sandbox, because a session uses it again."""
        self._is_closed = False

    def detach(self) -> None:
        """Release it and let it live, with those it was nested in; may be called twice."""
        for process in self._processes:
            process.detach()
        self._enforcement.detach()

    def adopt(self, nested: "NamespaceSandbox") -> None:
        """Stay until the nested sandbox is over."""
        self._nested.add(nested)

    async def forget(self, nested: "NamespaceSandbox") -> None:
        """Drop a nested sandbox that is over, and finish if this sandbox was closed."""
        self._nested.discard(nested)
        if self._is_closed:
            await self.aclose()


def _open_start_gate(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Open a pipe whose reader also holds a write end, so that a dead server is silence and not a go-ahead."""
    start_gate_end, start_gate = _open_pipe(stack)
    both = os.open(f"/proc/self/fd/{start_gate_end}", os.O_RDWR | os.O_CLOEXEC)
    stack.callback(os.close, both)
    return both, start_gate


def _open_pipe(stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


class NestedSandbox(NamespaceSandbox):
    """One session's namespaces, below those of the sandbox it was nested in, which stays until this is over."""

    def __init__(
        self,
        tools: NamespaceTools,
        spec: SandboxSpec,
        enforcement: Enforcement,
        *,
        level: NamespaceLevel,
        parent: NamespaceSandbox,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(tools, spec, enforcement, level=level, on_close=on_close)
        self._parent = parent
        self._procs_files: list[int] = []
        parent.adopt(self)

    @property
    def parent(self) -> NamespaceSandbox:
        """The sandbox it was nested in."""
        return self._parent

    async def _prepare_launch(self, resources: Resources) -> BwrapLaunch:
        owner, root_view, _ = self._parent.level
        async with self._parent.nesting:
            parent = ParentSandbox(self._parent.holder(), root_view, resources)
            if not isinstance(self._parent, NestedSandbox):
                return await parent.launch(self.level.user, owner)
            bubblewrap = self._tools.bubblewrap
            return await parent.launch_inside_session(self.level.user, bubblewrap, minimal_root(self.spec, bubblewrap))

    def entry(self) -> NamespaceEntry:
        """See `ForkedSandbox`."""
        holder = self.holder()
        if holder.first is None:
            raise SandboxUnavailable(f"The sandbox of session {self.spec.session_id} has ended")
        if not self._procs_files:
            self._procs_files = self._enforcement.open_procs_files()
        return NamespaceEntry(holder.first, ALL_NAMESPACES, self.level.user, self._procs_files)

    async def admit(self, pid: int) -> None:
        """See `ForkedSandbox`. The process inherited its other limits in the forkable sandbox."""
        # Find the holder's pid now: with another process inside, it is no longer the only child.
        self.holder().command_pid(besides=pid)
        await self._enforcement.admit(pid, is_alone=self._is_alone)

    async def _finish(self) -> None:
        was_over = self._is_released
        while self._procs_files:
            os.close(self._procs_files.pop())
        await super()._finish()
        if not was_over:
            await self._parent.forget(self)
