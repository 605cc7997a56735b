"""From an environment's name to a running kernel in a fresh sandbox."""

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from belljar.egress.rules import PACKAGES, parse_rules
from belljar.environments import Environment, open_environment
from belljar.environments.index import index_variables
from belljar.errors import InvalidArgument
from belljar.kernels.base import Kernel
from belljar.kernels.hatches import Egress, open_hatches
from belljar.kernels.ipython import RUNNER, session_environment, start_ipython
from belljar.kernels.workshop import Workshop
from belljar.sandboxes.base import Identity, Limits, Provider, Sandbox, SandboxSpec
from belljar.settings import Settings

KERNEL_PREFIX = "kernel:"

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

    def __init__(self, settings: Settings, provider: Provider) -> None:
        self._settings = settings
        self._provider = provider
        self._environments: dict[str, asyncio.Task[Environment]] = {}
        self.workshop = Workshop(settings, provider)

    def check(self, name: str) -> None:
        """Refuse a name that no kernel can be started for, before a session is made for it."""
        if "\0" in name or len(name) > 4096:
            raise InvalidArgument(
                f"environment {name[:80]!r} is not a name",
                hint="Use 'default', or 'kernel:NAME' for an installed Jupyter kernel",
            )

    def take_identity(self) -> Identity | None:
        """A user of the host for a new session, where the provider has them."""
        return self._provider.take_identity()

    def release_identity(self, identity: Identity) -> None:
        """The session is over."""
        self._provider.release_identity(identity)

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

    async def _hatched(self, sandbox: Sandbox, folders: Folders, python: Path, packages: Environment | None) -> Sandbox:
        return await open_hatches(
            sandbox,
            session_id=folders.session_id,
            scratch=folders.scratch,
            python=python,
            environment=packages,
            layer=folders.layer,
            egress=await self._egress(),
            open_uv=self.workshop.uv_for(folders.session_id),
        )

    async def _egress(self) -> Egress:
        """What the settings let sessions reach; nothing of it where the provider could not hold them to it."""
        if not self._provider.isolates:
            return Egress()
        rules, variables = parse_rules(self._settings.egress), dict[str, str]()
        if PACKAGES in self._settings.egress:
            rules += await self.workshop.index_rules()
            variables = await asyncio.to_thread(index_variables)
        return Egress(rules, self._settings.egress_allow_private, variables)

    async def start(self, name: str, folders: Folders) -> Kernel:
        """Open a sandbox and start a kernel in it."""
        if name.startswith(KERNEL_PREFIX):
            return await self._start_jupyter(name.removeprefix(KERNEL_PREFIX), folders)
        environment = await self.environment(name)
        sandbox = await self._provider.open(self._spec(folders, (*environment.readable, RUNNER, folders.layer)))
        sandbox = await self._hatched(sandbox, folders, environment.python, environment)
        return await start_ipython(
            sandbox, environment, layer=folders.layer, start_timeout_s=self._settings.start_timeout_s
        )

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
        )

    def _spec(self, folders: Folders, readable: tuple[Path, ...]) -> SandboxSpec:
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
        """Stop preparing."""
        for task in self._environments.values():
            task.cancel()
        await asyncio.gather(*self._environments.values(), return_exceptions=True)


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
