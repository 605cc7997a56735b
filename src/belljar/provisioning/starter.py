"""Starts kernels: from an environment's name to a running kernel in a new sandbox, forked, cold or Jupyter's.

Environments come from `environments.py`, specs and services of sandboxes from `sandbox_specs.py`, and the processes to
fork from `zygotes.py`. Knows of sessions nothing but their ids and folders.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from belljar import metrics
from belljar.egress.session_sockets import SessionSocket
from belljar.environments import Environment
from belljar.errors import BelljarError, CopyRefused, KernelDied, KernelStartFailed, SandboxUnavailable
from belljar.inside import FOLDER
from belljar.kernels.base import Kernel, KernelCheckpoint, KernelRequest
from belljar.kernels.forked_process import ForkIdentity, hold_open
from belljar.kernels.ipython import IPythonKernel, start_ipython
from belljar.kernels.launch import session_environment
from belljar.plugins import Plugins
from belljar.provisioning.confined_uv import UvSandbox
from belljar.provisioning.environments import EnvironmentCache, RemoteKernels, is_remote
from belljar.provisioning.form_targets import shown_targets
from belljar.provisioning.gpus import SessionGpus
from belljar.provisioning.host_folders import HostFolders, revoked
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.provisioning.sandbox_specs import SpecBuilder, limits_of, thread_count
from belljar.provisioning.session_services import ServicedSandbox
from belljar.provisioning.zygotes import ZygoteProcess, Zygotes
from belljar.sandboxes.base import ForkableProvider, ForkedSandbox, Provider, Sandbox, SandboxSpec
from belljar.sandboxes.defaults import SandboxBase
from belljar.settings import Settings
from belljar.settings.environments import KERNEL_PREFIX
from belljar.skills.session_view import ShownSkills
from belljar.toolbox.toolbox import Toolbox


@dataclass(slots=True)
class PreparedSandbox:
    """A sandbox with its services in which a kernel is to start, perhaps held open before a session needs it.

    If it is nested in a zygote's sandbox, the zygote can be forked into it.
    """

    sandbox: ServicedSandbox
    zygote: ZygoteProcess | None = None
    nested: ForkedSandbox | None = None
    is_open: bool = False

    @property
    def can_be_entered(self) -> bool:
        """Return whether there is a warm zygote that can be forked into this sandbox."""
        return self.nested is not None and self.zygote is not None and self.zygote.is_warm and self.zygote.is_alive()

    async def open_now(self) -> None:
        """Make the sandbox now and hold it open; close it when that fails."""
        try:
            await hold_open(self.sandbox)
        except BaseException:
            await self.sandbox.aclose()
            raise
        self.is_open = True


StartKernel = Callable[[KernelRequest], Awaitable[Kernel]]

log = logging.getLogger(__name__)


class KernelStarter:
    """Starts and forks the kernels of a runtime, and opens sandboxes for programs."""

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        folder: Path,
        run: str = "",
        toolbox: Toolbox | None = None,
        *,
        outlives_server: bool = False,
        plugins: Plugins | None = None,
        skills: ShownSkills | None = None,
        host_folders: HostFolders | None = None,
        remote: Mapping[str, RemoteKernels] | None = None,
    ) -> None:
        self._settings = settings
        self._remote = remote or {}
        self._plugin_kernels: dict[str, StartKernel] = plugins.named("kernels") if plugins is not None else {}
        self.provider = provider
        self._forkable = provider if isinstance(provider, ForkableProvider) else None
        self.toolbox = toolbox
        self._in_packets = outlives_server
        self.uv_sandbox = UvSandbox(settings, provider)
        self.environments = EnvironmentCache(settings, frozenset(self._plugin_kernels), self._remote)
        self.host_folders = host_folders or HostFolders(settings)
        targets = shown_targets(plugins, settings.data_directory) if plugins is not None else None
        self.gpus = SessionGpus(settings, provider, folder)
        self._spec_builder = SpecBuilder(
            settings, provider, self.uv_sandbox, self.gpus, toolbox, skills, targets, self.host_folders
        )
        self.zygotes = Zygotes(
            settings, provider, self._spec_builder, folder=folder, run=run, in_packets=outlives_server
        )
        self._prepared: dict[str, PreparedSandbox] = {}
        """Sandboxes held open for sessions whose kernel has not been started yet, by session id."""

    def forget(self, session_id: str) -> None:
        """Release what the toolbox has of a session that has ended, and its place on GPUs."""
        self.gpus.release(session_id)
        if self.toolbox is not None:
            self.toolbox.forget(session_id)

    async def restore_services(
        self, sandbox: Sandbox, folders: KernelFolders, environment: Environment, sockets: Mapping[str, SessionSocket]
    ) -> ServicedSandbox:
        """Serve the sockets of a sandbox that an earlier server opened, if it shows no folder that it should not."""
        shown = sandbox.spec.folders if isinstance(sandbox, SandboxBase) else ()
        if names := revoked(shown, self.host_folders.of(folders.principal)):
            raise SandboxUnavailable(f"it shows folders that the settings do not show it any more: {', '.join(names)}")
        return await self._spec_builder.with_services(sandbox, folders, environment.python, environment, sockets)

    async def start(self, name: str, folders: KernelFolders, *, is_ahead: bool = False) -> Kernel:
        """Open a sandbox and start a kernel in it; `is_ahead` when no session waits for it yet."""
        began_at = time.perf_counter()
        try:
            kernel, kind = await self._start(name, folders)
        except BelljarError:
            metrics.kernel_start_failures.add()
            raise
        metrics.kernel_starts.observe(time.perf_counter() - began_at, "refill" if is_ahead else kind)
        return kernel

    async def _start(self, name: str, folders: KernelFolders) -> tuple[Kernel, str]:
        if name.startswith(KERNEL_PREFIX):
            kernel_name = name.removeprefix(KERNEL_PREFIX)
            if (start := self._plugin_kernels.get(kernel_name)) is not None:
                return await self._start_by_plugin(start, kernel_name, folders), "plugin"
            return await self._start_jupyter(kernel_name, folders), "jupyter"
        if (remote := self._remote.get(name)) is not None:
            return await remote.start(self._settings, folders), remote.kind
        environment = await self.environments.get(name)
        prepared = await self._take_prepared(folders.session_id)
        prepared = prepared or await self._open_prepared(name, environment, folders)
        if (kernel := await self._forked(prepared, environment, folders)) is not None:
            return kernel, "forked"
        try:
            return await self._start_cold(prepared.sandbox, environment, folders), "cold"
        except SandboxUnavailable as error:
            if prepared.nested is None:
                raise
            # What it was nested in may have died since it was opened, and then no command starts in it. A sandbox
            # that is not nested depends on nothing else; the session cannot be forked.
            log.warning("session %s starts in a sandbox of its own: %s", folders.session_id, error.message)
        sandbox = await self.provider.open(self._spec(folders, environment))
        serviced = await self._with_services(sandbox, folders, environment)
        return await self._start_cold(serviced, environment, folders), "cold"

    async def _start_cold(
        self, sandbox: ServicedSandbox, environment: Environment, folders: KernelFolders
    ) -> IPythonKernel:
        """Start a kernel as a new process; the sandbox is closed when that fails."""
        return await start_ipython(
            sandbox,
            environment,
            layer=folders.layer,
            start_timeout_s=self._settings.start_timeout_s,
            in_packets=self._in_packets,
        )

    # Sandboxes

    async def prepare(self, name: str, folders: KernelFolders) -> None:
        """Hold a sandbox open for a session whose kernel is to be forked later. Call `wait_until_warm` before."""
        prepared = await self._open_prepared(name, await self.environments.get(name), folders)
        await prepared.open_now()
        self._prepared[folders.session_id] = prepared

    async def close_prepared(self, session_id: str) -> None:
        """Close the sandbox that is held open for a session; does nothing once its kernel has started."""
        if (prepared := self._prepared.pop(session_id, None)) is not None:
            await prepared.sandbox.aclose()

    async def _take_prepared(self, session_id: str) -> PreparedSandbox | None:
        prepared = self._prepared.get(session_id)
        if prepared is None or not prepared.can_be_entered:
            await self.close_prepared(session_id)
            return None
        return self._prepared.pop(session_id)

    async def _open_prepared(self, name: str, environment: Environment, folders: KernelFolders) -> PreparedSandbox:
        await self.gpus.place(folders.session_id, name)
        spec = self._spec(folders, environment)
        zygote = await self.zygotes.zygote(environment)
        nested = await self._open_nested(spec, zygote) if zygote is not None else None
        sandbox = await self._with_services(nested or await self.provider.open(spec), folders, environment)
        return PreparedSandbox(sandbox, zygote, nested)

    async def open_sandbox(
        self, environment: Environment, folders: KernelFolders, readable: Sequence[Path] = ()
    ) -> ServicedSandbox:
        """Return a new sandbox that shows the environment and in which nothing runs yet; the caller closes it."""
        trees = (*environment.readable, FOLDER, folders.layer, *readable)
        await self.gpus.place(folders.session_id, environment.name)
        try:
            sandbox = await self.provider.open(self._spec_builder.spec(folders, trees, has_tools=False))
            serviced = await self._spec_builder.with_services(
                sandbox, folders, environment.python, environment, has_tools=False
            )
        except BaseException:
            self.gpus.release(folders.session_id)
            raise
        serviced.resources.callback(self.gpus.release, folders.session_id)
        return serviced

    def _spec(self, folders: KernelFolders, environment: Environment) -> SandboxSpec:
        return self._spec_builder.spec(folders, (*environment.readable, FOLDER, folders.layer))

    async def _with_services(
        self, sandbox: Sandbox, folders: KernelFolders, environment: Environment
    ) -> ServicedSandbox:
        return await self._spec_builder.with_services(sandbox, folders, environment.python, environment)

    # Forks

    async def wait_until_warm(self, name: str) -> bool:
        """Wait until sessions of that environment can be forked; False when they will not be."""
        if is_remote(name):
            return False
        zygote = await self.zygotes.of(await self.environments.get(name))
        return zygote is not None and await zygote.warm()

    async def can_fork(self) -> bool:
        """Return whether any session can be forked here. Those with a GPU can: their variables are saved and loaded."""
        if self.gpus.is_on:
            return True
        provider = self._forkable if self._settings.fork_start else None
        return provider is not None and not await asyncio.to_thread(provider.no_nesting_reason)

    async def fork(
        self,
        kernel: Kernel,
        parent: KernelFolders,
        folders: KernelFolders,
        *,
        checkpoint: KernelCheckpoint | None = None,
        reseed: bool = False,
        runs_nothing: bool = False,
    ) -> tuple[Kernel, list[str]]:
        """Return a kernel with the memory of another, or of its checkpoint, in a new sandbox; also what it lacks.

        `runs_nothing` says that the other one runs no cells.
        """
        provider = self._forkable
        if not isinstance(kernel, IPythonKernel):
            raise CopyRefused(f"sessions of {kernel.name} cannot be forked", hint="Start a new session instead")
        if provider is None:
            raise CopyRefused(
                f"sessions in the sandbox {self.provider.name} cannot be forked", hint="Start a new session instead"
            )
        serviced = kernel.sandbox
        if not isinstance(serviced, ServicedSandbox) or not isinstance(serviced.inner, ForkedSandbox):
            reason = "" if self._settings.fork_start else "the server's setting fork_start is false"
            reason = (
                reason
                or await asyncio.to_thread(provider.no_nesting_reason)
                or "it was started with no place to fork from"
            )
            raise CopyRefused(f"this session cannot be forked: {reason}", hint="Start a new session instead")
        environment = kernel.environment
        if self.gpus.is_on:
            self.gpus.inherit(folders.session_id, parent.session_id)
        try:
            nested = await provider.open_nested(self._spec(folders, environment), serviced.inner)
        except SandboxUnavailable as error:
            # Each fork of a fork nests namespaces one level deeper, and Linux limits the depth.
            raise CopyRefused(
                f"this session cannot be forked: {error.message}", hint="Fork an earlier one, or start a new session"
            ) from error
        sandbox = await self._with_services(nested, folders, environment)
        change = ForkIdentity(
            environment=sandbox.variables,
            moved={str(parent.layer): str(folders.layer)},
            folder=sandbox.workspace,
            reseed=reseed,
        )
        try:
            return await kernel.fork(nested, sandbox, change, checkpoint, runs_nothing=runs_nothing)
        except BaseException:
            await sandbox.aclose()
            raise

    async def _open_nested(self, spec: SandboxSpec, zygote: ZygoteProcess) -> ForkedSandbox | None:
        provider = self._forkable
        try:
            return await provider.open_nested(spec, zygote.sandbox) if provider is not None else None
        except SandboxUnavailable as error:
            ids = {"session_id": spec.session_id}
            log.warning("session %s starts cold: %s", spec.session_id, error, extra=ids)
            return None

    async def _forked(
        self, prepared: PreparedSandbox, environment: Environment, folders: KernelFolders
    ) -> Kernel | None:
        """Fork a kernel into its sandbox; return None when it must start cold."""
        sandbox, zygote, nested = prepared.sandbox, prepared.zygote, prepared.nested
        if zygote is None or nested is None or not prepared.can_be_entered:
            return None
        change = ForkIdentity(
            environment=sandbox.complete(session_environment(sandbox, environment, folders.layer)),
            folder=sandbox.workspace,
        )
        threads = thread_count(limits_of(self._settings))
        try:
            return await zygote.fork(nested, sandbox, environment, change, threads=threads, is_open=prepared.is_open)
        except (KernelDied, KernelStartFailed, SandboxUnavailable, TimeoutError) as error:
            # The zygote died, or the fork did; the next session gets another zygote. The hint is not logged, because
            # it has the output of the process.
            log.warning("a session starts cold: %s", getattr(error, "message", "") or type(error).__name__)
            await sandbox.kill()
            return None
        except BaseException:
            await sandbox.aclose()
            raise

    async def _start_jupyter(self, kernel_name: str, folders: KernelFolders) -> Kernel:
        # jupyter_client and zmq take 150 ms to import, which only sessions that use them should pay.
        from belljar.kernels import jupyter

        environment = await self.environments.home()
        spec = jupyter.find_kernelspec(kernel_name, [environment.prefix / "share/jupyter/kernels"])
        trees = await asyncio.to_thread(jupyter.kernel_readable, spec)
        readable = (*environment.readable, *trees, FOLDER, folders.layer)
        packages = await asyncio.to_thread(jupyter.kernel_environment, spec)
        await self.gpus.place(folders.session_id, f"{KERNEL_PREFIX}{kernel_name}")
        sandbox = await self.provider.open(self._spec_builder.spec(folders, readable))
        sandbox = await self._spec_builder.with_services(sandbox, folders, environment.python, packages)
        return await jupyter.start_jupyter(
            sandbox,
            spec,
            scratch=folders.scratch,
            environment=session_environment(sandbox, environment, folders.layer),
            start_timeout_s=self._settings.start_timeout_s,
            bridge=environment,
        )

    async def _start_by_plugin(self, start: StartKernel, kernel_name: str, folders: KernelFolders) -> Kernel:
        environment = await self.environments.home()
        opened: list[Sandbox] = []

        async def open_sandbox(readable: Sequence[Path] = ()) -> Sandbox:
            trees = (*environment.readable, *readable, FOLDER, folders.layer)
            await self.gpus.place(folders.session_id, f"{KERNEL_PREFIX}{kernel_name}")
            sandbox = await self.provider.open(self._spec_builder.spec(folders, trees))
            opened.append(await self._with_services(sandbox, folders, environment))
            return opened[-1]

        request = KernelRequest(
            name=kernel_name,
            environment=environment,
            open_sandbox=open_sandbox,
            variables=lambda sandbox: session_environment(sandbox, environment, folders.layer),
            scratch=folders.scratch,
            layer=folders.layer,
            start_timeout_s=self._settings.start_timeout_s,
        )
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                return await start(request)
        except BaseException as error:
            for sandbox in opened:
                await sandbox.aclose()
            if isinstance(error, BelljarError) or not isinstance(error, Exception):
                raise
            raise KernelStartFailed(
                f"the plugin's kernel {kernel_name} did not start: {type(error).__name__}: {error}",
                hint="Only the operator can mend it; use another environment",
            ) from error

    async def aclose(self) -> None:
        """Cancel what is being prepared, close the sandboxes held open, and end the zygotes."""
        await self.environments.aclose()
        for session_id in [*self._prepared]:
            await self.close_prepared(session_id)
        await self.zygotes.aclose()
