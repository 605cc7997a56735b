"""How a cell ended, in the words callers rely on: by itself, stopped, or with its kernel."""

from dataclasses import dataclass

from belljar.errors import KernelDied
from belljar.models import State, Status
from belljar.outputs.events import Finished
from belljar.sandboxes.base import Incident
from belljar.sessions.causes import killed, survived
from belljar.sessions.quota import DiskQuota
from belljar.sessions.stopping import Stopper


@dataclass(slots=True)
class Outcome:
    """Of one execution; `running` until it is known."""

    status: Status = "running"
    state: State = "kept"
    lost: tuple[str, ...] = ()
    cause: str | None = None
    count: int = 0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0

    def conclude(self, finished: Finished, stopper: Stopper, timeout_s: float, quota: DiskQuota) -> None:
        """The kernel says that the cell is over."""
        self.status = stopped_status(stopper) or ("ok" if finished.is_ok else "error")
        self.count = finished.execution_count
        self.cpu_s = finished.cpu_s
        self.peak_memory_mb = finished.peak_memory_mb
        if stopper.reason == "timeout":
            self.cause = f"timeout: interrupted after {timeout_s:g} s; variables are kept"
        elif stopper.reason == "interrupted":
            self.cause = f"interrupted {stopper.asked}; variables are kept"
        elif stopper.reason == "disk_full":
            self.cause = survived(Incident("disk_full", f"folder {quota.detail}, so the cell was interrupted"))


def stopped_status(stopper: Stopper) -> Status | None:
    """The status of a cell that was stopped."""
    return "interrupted" if stopper.reason == "disk_full" else stopper.reason


def cause_of_death(death: KernelDied, stopper: Stopper, timeout_s: float, quota: DiskQuota) -> str:
    """Why a kernel died with its cell, where no limit of the sandbox and nobody else ended it."""
    if not stopper.was_killed:
        return f"{KernelDied.code}: {death.message}"
    match stopper.reason:
        case "disk_full":
            return killed(Incident("disk_full", f"folder {quota.detail}, and the cell went on"))
        case "timeout":
            return f"timeout: killed after {timeout_s:g} s, because it ignored the interrupt"
        case _:
            return f"killed {stopper.asked}, because it ignored the interrupt"
