"""Zygotes: for each environment a process that has imported everything, and is forked into a sandbox for each session.

The zygote is confined as a session is, because it runs the environment's code, which is not ours. Until it is warm, and
where there is none, kernels start cold. Knows nothing of sessions.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from belljar.environments.base import Environment
from belljar.errors import BelljarError
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, way_mode
from belljar.kernels import protocol
from belljar.kernels.forked_process import ForkedProcess, ForkIdentity, hold_open, request_fork
from belljar.kernels.ipython import IPythonKernel, await_fork
from belljar.kernels.launch import runner_command, session_environment
from belljar.kernels.wire import Wire
from belljar.provisioning.sandbox_specs import SpecBuilder
from belljar.sandboxes.base import ForkableProvider, ForkedSandbox, Provider, Sandbox, SandboxSpec
from belljar.settings import Settings

# The forks of a zygote share its hash seed and its memory layout, so it is replaced after this many. Until its
# successor is warm it goes on, because sessions would start cold meanwhile; but not for more than twice as many.
RECYCLE_AFTER = 1_000
RETIRE_AFTER_S = 60.0
TIMEOUT_S = 60.0
RETRY_AFTER_S = 30.0
# A fork does not get the zygote's threads, so its libraries must not start any.
_SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # The threads that a fork starts would spin for 2^26 cycles before they sleep: 25 ms of a processor when a session
    # begins, in which each of its page faults has to interrupt them.
    "OPENBLAS_THREAD_TIMEOUT": "18",
    # The zygote's forks are made by a process in its memory, in which Linux no longer updates glibc's note of the
    # processor that it runs on (rseq). Without that note, glibc asks.
    "GLIBC_TUNABLES": "glibc.pthread.rseq=0",
}

log = logging.getLogger(__name__)


class ZygoteProcess:
    """One zygote in its sandbox, in which those of sessions are nested: importing, warm, or ended."""

    def __init__(self, sandbox: Sandbox, folder: Path, *, in_packets: bool = False) -> None:
        self.sandbox = sandbox
        self.is_warm = False
        self.failed: dict[str, str] = {}
        """The modules that it could not import, and why."""
        self.forks = 0
        self.warming: asyncio.Task[None] | None = None
        """Waits until it is warm, and says why it is not."""
        self._folder = folder
        self._in_packets = in_packets
        self._wire = Wire()
        self._forking = asyncio.Lock()

    async def start(self, environment: Environment, modules: Sequence[str], variables: Mapping[str, str] = {}) -> None:
        """Start the process, with further environment variables.

        From then on sessions that start cold can already be nested in its sandbox.
        """
        wire = self._wire
        await self.sandbox.spawn(
            runner_command(environment, "zygote", str(wire.child_socket), ",".join(_SINGLE_THREADED), *modules),
            environment={**session_environment(self.sandbox, environment, None), **_SINGLE_THREADED, **variables},
            stdout=wire.child_stdout,
            stderr=wire.child_stderr,
            pass_fds=[wire.child_socket],
        )
        wire.close_child_ends()

    async def warm_up(self) -> None:
        """Wait until everything is imported."""
        async with asyncio.timeout(TIMEOUT_S):
            self.failed = (await self._wire.expect(protocol.WarmMessage)).failed
        self.is_warm = True

    def is_alive(self) -> bool:
        """Return whether it can still fork."""
        return not self._wire.is_hung_up()

    async def fork(
        self,
        nested: ForkedSandbox,
        sandbox: Sandbox,
        environment: Environment,
        change: ForkIdentity,
        *,
        threads: int,
        is_open: bool,
    ) -> IPythonKernel:
        """Fork a kernel into the nested sandbox. `sandbox` is the same one as the kernel sees it, perhaps held open.

        `threads` is how many the linear algebra libraries may use.
        """
        fork_wire, forked = Wire(in_packets=self._in_packets), ForkedProcess()
        try:
            if not is_open:
                await hold_open(sandbox)
            async with self._forking:
                self.forks += 1
                await request_fork(
                    self._wire, fork_wire, forked, in_other_sandbox=True, entry=nested.entry(), threads=threads
                )
            try:
                kernel = await await_fork(fork_wire, forked, sandbox, environment, change, entered=nested)
            except BaseException:
                # The caller closes the sandbox, and so kills what is entering it. That process uses the zygote's
                # memory, and the zygote would end with it.
                await forked.wait_left_parent()
                raise
        except BaseException:
            fork_wire.close()
            forked.close()
            raise
        return kernel

    async def aclose(self) -> None:
        """End the process; sessions that were forked from it go on."""
        if self.warming is not None:
            self.warming.cancel()
            await asyncio.gather(self.warming, return_exceptions=True)
        self._wire.close()
        await self.sandbox.aclose()
        await asyncio.to_thread(remove_tree, self._folder)


class EnvironmentZygote:
    """The current zygote of one environment, and its successor: it is replaced when it dies or after many forks."""

    def __init__(
        self,
        provider: ForkableProvider,
        environment: Environment,
        *,
        folder: Path,
        name: str,
        modules: Sequence[str],
        make_spec: Callable[[str, Path], SandboxSpec],
        make_variables: Callable[[], Mapping[str, str]] = dict[str, str],
        in_packets: bool = False,
    ) -> None:
        self.complaint = ""
        """Why there is no warm zygote, or what it could not import."""
        self._provider = provider
        self._environment = environment
        self._folder = folder
        self._name = name
        self._modules = modules
        self._make_spec = make_spec
        self._make_variables = make_variables
        self._in_packets = in_packets
        self._zygote: ZygoteProcess | None = None
        self._successor: ZygoteProcess | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._is_closing = asyncio.Event()
        self._retry_at = 0.0

    async def zygote(self) -> ZygoteProcess | None:
        """Return the zygote to fork or to nest in, started if need be; None while there can be none."""
        async with self._opening:
            if self._zygote is not None and self._zygote.forks >= RECYCLE_AFTER:
                await self._prepare_successor()
            if self._zygote is not None and not self._is_usable(self._zygote):
                self._replace(self._zygote)
            if self._zygote is None:
                self._zygote = await self._start()
            return self._zygote

    async def warm(self) -> bool:
        """Wait until there is a warm zygote; False when there will be none."""
        zygote = await self.zygote()
        if zygote is not None and zygote.warming is not None:
            await asyncio.gather(zygote.warming, return_exceptions=True)
        return zygote is not None and zygote.is_warm

    def _is_usable(self, zygote: ZygoteProcess) -> bool:
        is_replaced = self._successor is not None and self._successor.is_warm
        return zygote.is_alive() and zygote.forks < (RECYCLE_AFTER if is_replaced else 2 * RECYCLE_AFTER)

    async def _prepare_successor(self) -> None:
        successor = self._successor
        if successor is not None and not successor.is_warm and (successor.warming is None or successor.warming.done()):
            await successor.aclose()
            self._successor = None
        if self._successor is None:
            self._successor = await self._start()

    def _replace(self, zygote: ZygoteProcess) -> None:
        self._zygote, self._successor = self._successor, None
        retirement = asyncio.get_running_loop().create_task(self._retire(zygote))
        self._retiring.add(retirement)
        retirement.add_done_callback(self._retiring.discard)

    async def _retire(self, zygote: ZygoteProcess) -> None:
        """End a zygote, but not before the sessions that are being forked from it."""
        try:
            if zygote.is_alive():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETIRE_AFTER_S):
                        await self._is_closing.wait()
        finally:
            await zygote.aclose()

    async def _start(self) -> ZygoteProcess | None:
        if asyncio.get_running_loop().time() < self._retry_at:
            return None
        name = f"{self._name}{secrets.token_hex(8)}"
        folder = self._folder / name
        make_folder(folder, way_mode())
        for part in ("workspace", "scratch", "home"):
            make_folder(folder / part)
        try:
            sandbox = await self._provider.open_forkable(self._make_spec(name, folder))
            zygote = ZygoteProcess(sandbox, folder, in_packets=self._in_packets)
        except BelljarError as error:
            self._fail(f"no sandbox for it: {error}")
            await asyncio.to_thread(remove_tree, folder)
            return None
        try:
            await zygote.start(self._environment, self._modules, self._make_variables())
        except BaseException as error:
            await zygote.aclose()
            if not isinstance(error, BelljarError):
                raise
            self._fail(str(error))
            return None
        zygote.warming = asyncio.get_running_loop().create_task(self._warm_up(zygote))
        return zygote

    async def _warm_up(self, zygote: ZygoteProcess) -> None:
        try:
            await zygote.warm_up()
        except (BelljarError, TimeoutError) as error:
            # Keep its sandbox, because those of sessions may have been nested in it by now.
            self._fail(str(error) or f"not ready after {TIMEOUT_S:g} s")
        else:
            self.complaint = "; ".join(f"{name} does not import ({why})" for name, why in zygote.failed.items())
            if self.complaint:
                log.warning("zygote of %s: %s", self._environment.python, self.complaint)

    def _fail(self, complaint: str) -> None:
        self.complaint = complaint
        self._retry_at = asyncio.get_running_loop().time() + RETRY_AFTER_S
        has_other = self._zygote is not None and self._zygote.is_warm
        effect = "the old one goes on for a while" if has_other else "sessions start cold"
        log.warning("zygote of %s: %s; %s", self._environment.python, complaint, effect)

    async def aclose(self) -> None:
        """End the zygote, its successor and its predecessors."""
        async with self._opening:
            # Not by cancelling them, because one that has not begun would then end nothing.
            self._is_closing.set()
            await asyncio.gather(*self._retiring, return_exceptions=True)
            for zygote in (self._zygote, self._successor):
                if zygote is not None:
                    await zygote.aclose()
            self._zygote = self._successor = None


class Zygotes:
    """The zygotes of a runtime, by the interpreter of their environment.

    Their folders are below `folder` and have the name of the run, `run`, in theirs.
    """

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        spec_builder: SpecBuilder,
        *,
        folder: Path,
        run: str,
        in_packets: bool,
    ) -> None:
        self._settings = settings
        # Looked at once, because Python 3.11 takes 0.1 ms to compare a class with a protocol.
        self._provider = provider if isinstance(provider, ForkableProvider) else None
        self._spec_builder = spec_builder
        self._folder = folder
        self._run = run
        self._in_packets = in_packets
        self._by_python: dict[Path, EnvironmentZygote] = {}

    async def zygote(self, environment: Environment) -> ZygoteProcess | None:
        """Return a zygote to fork, or at least to nest in; None where that is off or does not work."""
        zygote = await self.of(environment)
        return await zygote.zygote() if zygote else None

    async def of(self, environment: Environment) -> EnvironmentZygote | None:
        """Return the zygote of an environment; None where sessions are not forked."""
        provider = self._provider
        if not self._settings.fork_start or provider is None:
            return None
        if environment.python in self._by_python:
            return self._by_python[environment.python]
        if await asyncio.to_thread(provider.no_nesting_reason):
            return None
        # Look again, because another task may have made it during the wait.
        if environment.python not in self._by_python:
            self._by_python[environment.python] = EnvironmentZygote(
                provider,
                environment,
                folder=self._folder,
                name=f"zygote-.{self._run}.",
                modules=self._settings.preload,
                make_spec=partial(self._spec_builder.zygote_spec, environment),
                make_variables=self._spec_builder.gpus.loader_variables,
                in_packets=self._in_packets,
            )
        return self._by_python[environment.python]

    async def aclose(self) -> None:
        """End all zygotes."""
        for zygote in self._by_python.values():
            await zygote.aclose()
