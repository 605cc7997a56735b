"""From an environment's name to a running kernel in a fresh sandbox."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from belljar import measures
from belljar.egress.listening import Door
from belljar.egress.rules import PACKAGES, parse_rules
from belljar.environments import Environment, check_name, open_environment
from belljar.environments.index import index_variables
from belljar.errors import BelljarError, CopyRefused, InvalidArgument, KernelDied, KernelStartFailed, SandboxUnavailable
from belljar.kernels.base import Asleep, Kernel
from belljar.kernels.copies import Change
from belljar.kernels.hatches import Egress, HatchedSandbox, open_hatches
from belljar.kernels.ipython import IPythonKernel, start_ipython
from belljar.kernels.launching import RUNNER, session_environment
from belljar.kernels.nursery import Nursery, Zygote
from belljar.kernels.rooms import Room
from belljar.kernels.workshop import Workshop
from belljar.sandboxes.base import Branch, Branching, Identity, Limits, Provider, Sandbox, SandboxSpec
from belljar.settings import Settings
from belljar.toolbox.broker import Broker
from belljar.toolbox.opening import Toolbox

KERNEL_PREFIX = "kernel:"
StartKind = Literal["cold", "forked", "jupyter"]

log = logging.getLogger(__name__)


class Folders(Protocol):
    """The session's places on the host, as far as a kernel needs them."""

    @property
    def session_id(self) -> str:
        """Whose they are."""
        ...

    @property
    def workspace(self) -> Path:
        """Working directory."""
        ...

    @property
    def scratch(self) -> Path:
        """Sockets."""
        ...

    @property
    def home(self) -> Path:
        """HOME."""
        ...

    @property
    def layer(self) -> Path:
        """The session's own packages."""
        ...

    @property
    def identity(self) -> Identity | None:
        """Whose they are, where the session is a user of its own."""
        ...


class KernelStarter:
    """Knows the settings and the provider; opens each environment once."""

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        folder: Path,
        run: str = "",
        toolbox: Toolbox | None = None,
        *,
        outlives_server: bool = False,
    ) -> None:
        self._settings = settings
        self._toolbox = toolbox
        self._in_packets = outlives_server
        self._run = run
        self._provider = provider
        self._folder = folder
        self._nurseries: dict[Path, Nursery] = {}
        self._environments: dict[str, asyncio.Task[Environment]] = {}
        self._rooms: dict[str, Room] = {}
        """Held open for sessions whose kernel has not been started yet."""
        self.workshop = Workshop(settings, provider)

    def check(self, name: str) -> None:
        """Refuse a name that no kernel can be started for, before a session is made for it."""
        if "\0" in name or len(name) > 4096:
            raise InvalidArgument(
                f"environment {name[:80]!r} is not a name",
                hint="Use 'default', or 'kernel:NAME' for an installed Jupyter kernel",
            )
        if not name.startswith(KERNEL_PREFIX):
            check_name(self._settings, name)

    def take_identity(self) -> Identity | None:
        """A user of the host for a new session, where the provider has them."""
        return self._provider.take_identity()

    def release_identity(self, identity: Identity) -> None:
        """The session is over."""
        self._provider.release_identity(identity)

    def broker(self, session_id: str) -> Broker | None:
        """Where a session calls tools, if there are any."""
        return self._toolbox.broker(session_id) if self._toolbox else None

    def forget(self, session_id: str) -> None:
        """A session is over."""
        if self._toolbox is not None:
            self._toolbox.forget(session_id)

    async def environment(self, name: str) -> Environment:
        """The environment, prepared if need be; callers that come meanwhile wait for the same preparation."""
        task = self._environments.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            opening = open_environment(self._settings, name, on_progress=log.info)
            task = self._environments[name] = asyncio.get_running_loop().create_task(opening)
        return await asyncio.shield(task)

    async def package_environment(self, name: str) -> Environment:
        """The environment that packages for a session are chosen for: of a Jupyter kernel, its own interpreter's."""
        if not name.startswith(KERNEL_PREFIX):
            return await self.environment(name)
        from belljar.kernels import jupyter

        default = await self.environment("default")
        kernel_name = name.removeprefix(KERNEL_PREFIX)
        spec = jupyter.find_kernelspec(kernel_name, [default.python.parent.parent / "share/jupyter/kernels"])
        environment = await asyncio.to_thread(jupyter.kernel_environment, spec)
        if environment is None:
            raise InvalidArgument(
                f"kernel {kernel_name} is not Python", hint="Packages can be installed for Python sessions only"
            )
        return environment

    async def _hatched(
        self,
        sandbox: Sandbox,
        folders: Folders,
        python: Path,
        packages: Environment | None,
        doors: Mapping[str, Door] | None = None,
        *,
        has_tools: bool = True,
    ) -> HatchedSandbox:
        return await open_hatches(
            sandbox,
            session_id=folders.session_id,
            scratch=folders.scratch,
            python=python,
            environment=packages,
            layer=folders.layer,
            egress=await self._egress(),
            open_uv=self.workshop.uv_for(folders.session_id),
            toolbox=self._toolbox if has_tools else None,
            doors=doors,
        )

    async def rehatch(
        self, sandbox: Sandbox, folders: Folders, environment: Environment, doors: Mapping[str, Door]
    ) -> HatchedSandbox:
        """Answer at the doors of a sandbox that an earlier server opened."""
        return await self._hatched(sandbox, folders, environment.python, environment, doors)

    async def _egress(self) -> Egress:
        """What the settings let sessions reach; nothing of it where the provider could not hold them to it."""
        if not self._provider.isolates:
            return Egress()
        rules, variables = parse_rules(self._settings.egress), dict[str, str]()
        if PACKAGES in self._settings.egress:
            rules += await self.workshop.index_rules()
            variables = await asyncio.to_thread(index_variables)
        return Egress(rules, self._settings.egress_allow_private, variables)

    async def start(self, name: str, folders: Folders, *, is_ahead: bool = False) -> Kernel:
        """Open a sandbox and start a kernel in it, for someone who waits or ahead of their asking."""
        began_at = time.perf_counter()
        try:
            kernel, kind = await self._start(name, folders)
        except BelljarError:
            measures.kernel_start_failures.add()
            raise
        measures.kernel_starts.observe(time.perf_counter() - began_at, "refill" if is_ahead else kind)
        return kernel

    async def _start(self, name: str, folders: Folders) -> tuple[Kernel, StartKind]:
        if name.startswith(KERNEL_PREFIX):
            return await self._start_jupyter(name.removeprefix(KERNEL_PREFIX), folders), "jupyter"
        environment = await self.environment(name)
        room = await self._held_room(folders.session_id) or await self._open_room(environment, folders)
        if (kernel := await self._forked(room, environment, folders)) is not None:
            return kernel, "forked"
        kernel = await start_ipython(
            room.sandbox,
            environment,
            layer=folders.layer,
            start_timeout_s=self._settings.start_timeout_s,
            in_packets=self._in_packets,
        )
        return kernel, "cold"

    # Rooms

    async def prepare(self, name: str, folders: Folders) -> None:
        """Hold a sandbox open for a session whose kernel is to be forked later, where `is_warm`."""
        room = await self._open_room(await self.environment(name), folders)
        await room.hold()
        self._rooms[folders.session_id] = room

    async def vacate(self, session_id: str) -> None:
        """Close what was held open for a session; nothing was, once its kernel has started."""
        if (room := self._rooms.pop(session_id, None)) is not None:
            await room.sandbox.aclose()

    async def _held_room(self, session_id: str) -> Room | None:
        room = self._rooms.get(session_id)
        if room is None or not room.can_be_entered:
            await self.vacate(session_id)
            return None
        return self._rooms.pop(session_id)

    async def _open_room(self, environment: Environment, folders: Folders) -> Room:
        spec = self._spec(folders, (*environment.readable, RUNNER, folders.layer))
        zygote = await self._zygote(environment)
        branch = await self._open_branch(spec, zygote) if zygote is not None else None
        sandbox = await self._hatched(
            branch or await self._provider.open(spec), folders, environment.python, environment
        )
        return Room(sandbox, zygote, branch)

    async def open_sandbox(
        self, environment: Environment, folders: Folders, readable: Sequence[Path] = ()
    ) -> HatchedSandbox:
        """A fresh sandbox that shows the environment, and in which nothing runs yet; whoever asks closes it."""
        trees = (*environment.readable, RUNNER, folders.layer, *readable)
        sandbox = await self._provider.open(self._spec(folders, trees, has_tools=False))
        return await self._hatched(sandbox, folders, environment.python, environment, has_tools=False)

    # Warm starts

    async def _zygote(self, environment: Environment) -> Zygote | None:
        """A process to fork from or at least to branch from; None where that is off or does not work."""
        nursery = await self.nursery(environment)
        return await nursery.zygote() if nursery else None

    async def nursery(self, environment: Environment) -> Nursery | None:
        """The environment's; None where sessions are not forked."""
        provider = self._provider
        if not self._settings.fork_start or not isinstance(provider, Branching):
            return None
        if environment.python in self._nurseries:
            return self._nurseries[environment.python]
        if await asyncio.to_thread(provider.branching_gap):
            return None
        # Looked up after the wait: others may have waited for the same.
        if environment.python not in self._nurseries:
            self._nurseries[environment.python] = Nursery(
                provider,
                environment,
                folder=self._folder,
                name=f"zygote-.{self._run}.",
                modules=self._settings.preload,
                make_spec=partial(self._zygote_spec, environment),
                in_packets=self._in_packets,
            )
        return self._nurseries[environment.python]

    async def is_warm(self, name: str) -> bool:
        """Wait until sessions of that environment are forked; False when they will not be."""
        if name.startswith(KERNEL_PREFIX):
            return False
        nursery = await self.nursery(await self.environment(name))
        return nursery is not None and await nursery.warm()

    def _zygote_spec(self, environment: Environment, name: str, folder: Path) -> SandboxSpec:
        return SandboxSpec(
            session_id=name,
            workspace=folder / "workspace",
            scratch=folder / "scratch",
            home=folder / "home",
            # A branch can be shown only what its trunk was.
            readable=(*environment.readable, RUNNER, *(self._toolbox.readable if self._toolbox else ())),
            limits=limits_of(self._settings),
        )

    async def fork(
        self, kernel: Kernel, origin: Folders, folders: Folders, *, copy: Asleep | None = None, reseed: bool = False
    ) -> tuple[Kernel, list[str]]:
        """A kernel with another one's memory, or a sleeping copy's, in a sandbox of its own; and what it lacks."""
        provider = self._provider
        if not isinstance(kernel, IPythonKernel):
            raise CopyRefused(f"sessions of {kernel.name} cannot be forked", hint="Start a new session instead")
        if not isinstance(provider, Branching):
            raise CopyRefused(
                f"sessions in the sandbox {provider.name} cannot be forked", hint="Start a new session instead"
            )
        hatched = kernel.sandbox
        if not isinstance(hatched, HatchedSandbox) or not isinstance(hatched.inner, Branch):
            gap = "" if self._settings.fork_start else "the server's setting fork_start is false"
            gap = gap or await asyncio.to_thread(provider.branching_gap) or "it was started with no place to fork from"
            raise CopyRefused(f"this session cannot be forked: {gap}", hint="Start a new session instead")
        environment = kernel.environment
        spec = self._spec(folders, (*environment.readable, RUNNER, folders.layer))
        try:
            branch = await provider.open_branch(spec, hatched.inner)
        except SandboxUnavailable as error:
            # Forks of forks of forks: Linux nests namespaces only so deep.
            raise CopyRefused(
                f"this session cannot be forked: {error.message}", hint="Fork an earlier one, or start a new session"
            ) from error
        sandbox = await self._hatched(branch, folders, environment.python, environment)
        change = Change(
            environment=sandbox.variables,
            moved={str(origin.layer): str(folders.layer)},
            folder=sandbox.workspace,
            reseed=reseed,
        )
        try:
            return await kernel.fork(branch, sandbox, change, copy)
        except BaseException:
            await sandbox.aclose()
            raise

    async def _open_branch(self, spec: SandboxSpec, zygote: Zygote) -> Branch | None:
        provider = self._provider
        try:
            return await provider.open_branch(spec, zygote.trunk) if isinstance(provider, Branching) else None
        except SandboxUnavailable as error:
            ids = {"session_id": spec.session_id}
            log.warning("session %s starts cold: %s", spec.session_id, error, extra=ids)
            return None

    async def _forked(self, room: Room, environment: Environment, folders: Folders) -> Kernel | None:
        """A kernel forked into its sandbox; None when a cold one must do."""
        sandbox, zygote, branch = room.sandbox, room.zygote, room.branch
        if zygote is None or branch is None or not room.can_be_entered:
            return None
        change = Change(
            environment=sandbox.complete(session_environment(sandbox, environment, folders.layer)),
            folder=sandbox.workspace,
            threads=thread_count(limits_of(self._settings)),
        )
        try:
            return await zygote.fork(branch, sandbox, environment, change, is_held=room.is_held)
        except (KernelDied, KernelStartFailed, SandboxUnavailable, TimeoutError) as error:
            # The zygote died, or its copy did: the next session gets another one.
            # Without its hint, which has the last words of the process.
            log.warning("a session starts cold: %s", getattr(error, "message", "") or type(error).__name__)
            await sandbox.kill()
            return None
        except BaseException:
            await sandbox.aclose()
            raise

    async def _start_jupyter(self, kernel_name: str, folders: Folders) -> Kernel:
        # jupyter_client and zmq take 150 ms to import: only sessions that use them pay.
        from belljar.kernels import jupyter

        # The configured environment, unless that is itself a kernel's name: preparing another may take a minute.
        name = self._settings.environment
        environment = await self.environment("default" if name.startswith(KERNEL_PREFIX) else name)
        spec = jupyter.find_kernelspec(kernel_name, [environment.python.parent.parent / "share/jupyter/kernels"])
        trees = await asyncio.to_thread(jupyter.kernel_readable, spec)
        readable = (*environment.readable, *trees, RUNNER, folders.layer)
        packages = await asyncio.to_thread(jupyter.kernel_environment, spec)
        sandbox = await self._provider.open(self._spec(folders, readable))
        sandbox = await self._hatched(sandbox, folders, environment.python, packages)
        return await jupyter.start_jupyter(
            sandbox,
            spec,
            scratch=folders.scratch,
            environment=session_environment(sandbox, environment, folders.layer),
            start_timeout_s=self._settings.start_timeout_s,
            bridge=environment,
        )

    def _spec(self, folders: Folders, readable: tuple[Path, ...], *, has_tools: bool = True) -> SandboxSpec:
        if self._toolbox is not None and has_tools:
            self._toolbox.show_in(folders.workspace, folders.identity)
            readable = (*readable, *self._toolbox.readable)
        return SandboxSpec(
            session_id=folders.session_id,
            workspace=folders.workspace,
            scratch=folders.scratch,
            home=folders.home,
            readable=readable,
            limits=limits_of(self._settings),
            identity=folders.identity,
        )

    async def aclose(self) -> None:
        """Stop preparing, and end the processes that sessions are forked from."""
        for task in self._environments.values():
            task.cancel()
        await asyncio.gather(*self._environments.values(), return_exceptions=True)
        for session_id in [*self._rooms]:
            await self.vacate(session_id)
        for nursery in self._nurseries.values():
            await nursery.aclose()


def thread_count(limits: Limits) -> int:
    """How many threads a session can make use of."""
    available = len(os.sched_getaffinity(0))
    return min(available, math.ceil(limits.cpus)) if limits.cpus else available


def limits_of(settings: Settings) -> Limits:
    """What each session may use."""
    return Limits(
        memory_mb=settings.memory_mb or 0,
        cpus=settings.cpus or 0,
        processes=settings.max_processes or 0,
        disk_mb=settings.disk_mb or 0,
        temporary_mb=settings.temporary_mb or 0,
        open_files=settings.max_open_files or 0,
    )
