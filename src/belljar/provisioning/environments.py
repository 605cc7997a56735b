"""Environments by name, each prepared once however many sessions wait for it. Knows nothing of sandboxes.

Whoever waits for one that is being made can follow what is said about it. Its packages are compiled in the background
once it can be used.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from belljar.environments import Environment, check_name, open_environment
from belljar.environments.managed import DEFAULT, compile_packages, is_compiled, is_ready, recipe_folder
from belljar.errors import BelljarError, EnvironmentBroken, InvalidArgument
from belljar.kernels.base import Kernel
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.settings import Settings
from belljar.settings.azure import AZURE
from belljar.settings.environments import KERNEL_PREFIX

log = logging.getLogger(__name__)


def is_remote(name: str) -> bool:
    """Return whether sessions of that name use none of the environments that belljar prepares."""
    return name == AZURE or name.startswith(KERNEL_PREFIX)


@dataclass(frozen=True, slots=True)
class RemoteKernels:
    """Kernels of an environment that is not on this host."""

    kind: str
    """What metrics call their starts."""
    check: Callable[[Settings], None]
    """Refuses the environment where the settings do not say where it is."""
    start: Callable[[Settings, KernelFolders], Awaitable[Kernel]]


class EnvironmentCache:
    """The environments of one runtime."""

    def __init__(
        self,
        settings: Settings,
        plugin_kernels: frozenset[str] = frozenset(),
        remote: Mapping[str, RemoteKernels] | None = None,
    ) -> None:
        self._settings = settings
        self._plugin_kernels = plugin_kernels
        self._remote = remote or {}
        self._tasks: dict[str, asyncio.Task[Environment]] = {}
        self._compilations: dict[Path, asyncio.Task[None]] = {}
        self._progress: dict[str, str] = {}
        """What was said last about each environment that is being made; nothing about those that are there."""
        self._followers: dict[str, list[Callable[[str], None]]] = {}

    def check(self, name: str) -> None:
        """Refuse a name that no kernel can be started for, before a session is made for it."""
        if "\0" in name or len(name) > 4096:
            raise InvalidArgument(
                f"environment {name[:80]!r} is not a name",
                hint="Use 'default', or 'kernel:NAME' for an installed Jupyter kernel",
            )
        if name.startswith(KERNEL_PREFIX) and name.removeprefix(KERNEL_PREFIX) in self._plugin_kernels:
            return
        if name.startswith(KERNEL_PREFIX):
            self._check_kernel(name.removeprefix(KERNEL_PREFIX))
        elif (remote := self._remote.get(name)) is not None:
            remote.check(self._settings)
        else:
            check_name(self._settings, name)

    def _check_kernel(self, kernel_name: str) -> None:
        """Refuse a kernel that is not installed, unless an environment that is not made yet may bring it."""
        # jupyter_client takes 150 ms to import, which only sessions of such a kernel should pay.
        from belljar.kernels import jupyter

        home = self._kernel_home()
        try:
            jupyter.find_kernelspec(kernel_name, [home / "share/jupyter/kernels"] if home else [])
        except EnvironmentBroken:
            if home is not None:
                raise

    def _kernel_home(self) -> Path | None:
        """Return the prefix of the environment whose kernels come before Jupyter's own; None while it is unknown."""
        name = self._home_name()
        if (environment := self.find_ready(name)) is not None:
            return environment.prefix
        root = recipe_folder(self._settings)
        return root if name == DEFAULT.name and is_ready(root) else None

    def _home_name(self) -> str:
        """Return the environment that sessions of Jupyter's kernels have beside their own."""
        name = self._settings.environment
        return DEFAULT.name if is_remote(name) else name

    async def home(self) -> Environment:
        """Return the environment whose Python runs our helpers beside a foreign kernel: the configured one."""
        return await self.get(self._home_name())

    async def get(self, name: str) -> Environment:
        """Return the environment, prepared if need be; callers that come meanwhile wait for the same preparation."""
        task = self._tasks.get(name)
        if task is None or (task.done() and self.find_ready(name) is None):
            task = self._tasks[name] = asyncio.get_running_loop().create_task(self._open(name))
        return await asyncio.shield(task)

    async def _open(self, name: str) -> Environment:
        try:
            environment = await open_environment(self._settings, name, on_progress=partial(self._tell, name))
        finally:
            self._progress.pop(name, None)
        root = environment.prefix
        if environment.kind == "managed" and root not in self._compilations and not is_compiled(root):
            compiling = asyncio.get_running_loop().create_task(_compile(root))
            self._compilations[root] = compiling
        return environment

    def _tell(self, name: str, line: str) -> None:
        log.info("%s", line)
        self._progress[name] = line
        for follower in self._followers.get(name, ()):
            follower(line)

    @contextmanager
    def following(self, name: str, on_progress: Callable[[str], None]) -> Generator[None]:
        """Call `on_progress` with what was said last, and is said next, while the environment is being made."""
        name = self._home_name() if is_remote(name) else name
        followers = self._followers.setdefault(name, [])
        followers.append(on_progress)
        try:
            if line := self._progress.get(name):
                on_progress(line)
            yield
        finally:
            followers.remove(on_progress)
            if not followers:
                self._followers.pop(name, None)

    def find_ready(self, name: str) -> Environment | None:
        """Return an environment that is in use already; None for one that would have to be made, or is not ours."""
        task = self._tasks.get(name)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def for_packages(self, name: str) -> Environment:
        """Return the environment that a session's packages are resolved for; of a Jupyter kernel, its interpreter's."""
        if name == AZURE:
            raise InvalidArgument(
                "packages of a session in an Azure pool are the pool's own",
                hint="Run `%pip install NAME` in a cell, where the pool has a way to the package index",
            )
        if not name.startswith(KERNEL_PREFIX):
            return await self.get(name)
        from belljar.kernels import jupyter

        default = await self.get("default")
        kernel_name = name.removeprefix(KERNEL_PREFIX)
        spec = jupyter.find_kernelspec(kernel_name, [default.prefix / "share/jupyter/kernels"])
        environment = await asyncio.to_thread(jupyter.kernel_environment, spec)
        if environment is None:
            raise InvalidArgument(
                f"kernel {kernel_name} is not Python", hint="Packages can be installed for Python sessions only"
            )
        return environment

    async def aclose(self) -> None:
        """Cancel what is being prepared or compiled; the next server goes on with it."""
        tasks: list[asyncio.Task[Any]] = [*self._tasks.values(), *self._compilations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _compile(root: Path) -> None:
    """Compile in the background; a failure is logged only, because the environment works without."""
    try:
        await compile_packages(root, is_aside=True, on_progress=lambda line: log.debug("%s: %s", root.name, line))
    except (BelljarError, OSError) as error:
        log.warning("the packages in %s could not be compiled: %s", root, error)
    else:
        log.info("the packages in %s are compiled", root)
