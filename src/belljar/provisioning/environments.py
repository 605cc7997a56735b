"""Environments by name, each prepared once however many sessions wait for it. Knows nothing of sandboxes."""

import asyncio
import logging
from pathlib import Path

from belljar.environments import Environment, check_name, open_environment
from belljar.environments.managed import DEFAULT, folder, is_ready
from belljar.environments.selection import KERNEL_PREFIX
from belljar.errors import EnvironmentBroken, InvalidArgument
from belljar.settings import Settings

log = logging.getLogger(__name__)


class EnvironmentCache:
    """The environments of one runtime."""

    def __init__(self, settings: Settings, plugin_kernels: frozenset[str] = frozenset()) -> None:
        self._settings = settings
        self._plugin_kernels = plugin_kernels
        self._tasks: dict[str, asyncio.Task[Environment]] = {}

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
        name = self._settings.environment
        name = DEFAULT.name if name.startswith(KERNEL_PREFIX) else name
        task = self._tasks.get(name)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            return task.result().prefix
        root = folder(self._settings)
        return root if name == DEFAULT.name and is_ready(root) else None

    async def get(self, name: str) -> Environment:
        """Return the environment, prepared if need be; callers that come meanwhile wait for the same preparation."""
        task = self._tasks.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            opening = open_environment(self._settings, name, on_progress=log.info)
            task = self._tasks[name] = asyncio.get_running_loop().create_task(opening)
        return await asyncio.shield(task)

    async def for_packages(self, name: str) -> Environment:
        """Return the environment that a session's packages are resolved for; of a Jupyter kernel, its interpreter's."""
        if not name.startswith(KERNEL_PREFIX):
            return await self.get(name)
        from belljar.kernels import jupyter

        default = await self.get("default")
        kernel_name = name.removeprefix(KERNEL_PREFIX)
        spec = jupyter.find_kernelspec(kernel_name, [default.python.parent.parent / "share/jupyter/kernels"])
        environment = await asyncio.to_thread(jupyter.kernel_environment, spec)
        if environment is None:
            raise InvalidArgument(
                f"kernel {kernel_name} is not Python", hint="Packages can be installed for Python sessions only"
            )
        return environment

    async def aclose(self) -> None:
        """Cancel what is being prepared."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
