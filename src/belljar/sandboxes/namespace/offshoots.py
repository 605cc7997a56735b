"""A session's namespaces below those of another sandbox: how they are laid there, and the way in.

The sandbox it was branched from holds its namespaces, and stays until it is over.
"""

import os
from collections.abc import Callable

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Entrance, SandboxSpec
from belljar.sandboxes.limits import Enforcement
from belljar.sandboxes.namespace.branches import Ground, Origin, Resources
from belljar.sandboxes.namespace.bubblewrap import backdrop
from belljar.sandboxes.namespace.enclosure import NamespaceSandbox
from belljar.sandboxes.namespace.places import Place, Tools
from belljar.sandboxes.seccomp import ALL_NAMESPACES


class NamespaceBranch(NamespaceSandbox):
    """One session's namespaces, below those of another sandbox."""

    def __init__(
        self,
        tools: Tools,
        spec: SandboxSpec,
        enforcement: Enforcement,
        *,
        place: Place,
        origin: NamespaceSandbox,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(tools, spec, enforcement, place=place, lay=self._lay_below, on_close=on_close)
        self._origin = origin
        self._entrances: list[int] = []
        origin.adopt(self)

    @property
    def origin(self) -> NamespaceSandbox:
        """What it was branched from."""
        return self._origin

    async def _lay_below(self, resources: Resources) -> Ground:
        owner, stage, _ = self._origin.place
        async with self._origin.branching:
            origin = Origin(self._origin.holder(), stage, resources)
            if not isinstance(self._origin, NamespaceBranch):
                return await origin.ground(self.place.user, owner)
            bubblewrap = self._tools.bubblewrap
            return await origin.ground_out_of_sight(self.place.user, bubblewrap, backdrop(self.spec, bubblewrap))

    def entrance(self) -> Entrance:
        """The way in."""
        holder = self.holder()
        if holder.first is None:
            raise SandboxUnavailable(f"The sandbox of session {self.spec.session_id} has ended")
        if not self._entrances:
            self._entrances = self._enforcement.open_entrances()
        return Entrance(holder.first, ALL_NAMESPACES, self.place.user, self._entrances)

    def admit(self, pid: int) -> None:
        """A process that has entered is held to the limits from here on; what it inherits it has from the trunk."""
        self.holder().command_pid()
        self._enforcement.admit(pid, is_alone=self._is_alone)

    async def _finish(self) -> None:
        was_over = self._is_over
        while self._entrances:
            os.close(self._entrances.pop())
        await super()._finish()
        if not was_over:
            await self._origin.forget(self)
