"""The nurseries of a runtime, one for each environment whose sessions are forked, where they can be."""

import asyncio
from functools import partial
from pathlib import Path

from belljar.environments import Environment
from belljar.kernels.furnishing import Furnishing
from belljar.kernels.nursery import Nursery, Zygote
from belljar.sandboxes.base import Branching, Provider
from belljar.settings import Settings


class Nurseries:
    """By interpreter. Their zygotes live in folders of the named run's, below `folder`."""

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        furnishing: Furnishing,
        *,
        folder: Path,
        run: str,
        in_packets: bool,
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._furnishing = furnishing
        self._folder = folder
        self._run = run
        self._in_packets = in_packets
        self._nurseries: dict[Path, Nursery] = {}

    async def zygote(self, environment: Environment) -> Zygote | None:
        """A process to fork from or at least to branch from; None where that is off or does not work."""
        nursery = await self.of(environment)
        return await nursery.zygote() if nursery else None

    async def of(self, environment: Environment) -> Nursery | None:
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
                make_spec=partial(self._furnishing.zygote_spec, environment),
                in_packets=self._in_packets,
            )
        return self._nurseries[environment.python]

    async def aclose(self) -> None:
        """End the processes that sessions are forked from."""
        for nursery in self._nurseries.values():
            await nursery.aclose()
