"""The sandbox a kernel is to start in: opened when it is needed, or held open and empty before anyone asks."""

from dataclasses import dataclass

from belljar.kernels.copies import hold
from belljar.kernels.hatches import HatchedSandbox
from belljar.kernels.nursery import Zygote
from belljar.sandboxes.base import Branch


@dataclass(slots=True)
class Room:
    """A sandbox with its hatches. With a branch of a zygote's, the zygote can be forked into it."""

    sandbox: HatchedSandbox
    zygote: Zygote | None = None
    branch: Branch | None = None
    is_held: bool = False

    @property
    def can_be_entered(self) -> bool:
        """Whether there is a warm process to fork and a way for its copy to come in."""
        return self.branch is not None and self.zygote is not None and self.zygote.is_warm and self.zygote.is_alive()

    async def hold(self) -> None:
        """Have it made now; it is closed when that fails."""
        try:
            await hold(self.sandbox)
        except BaseException:
            await self.sandbox.aclose()
            raise
        self.is_held = True
