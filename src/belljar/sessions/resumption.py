"""How a session that is older than its server comes back: from disk, or alive with the kernel of an earlier server."""

from belljar.executions.cell import Cell
from belljar.executions.execution import Execution
from belljar.journal.journal import ExecutionRecord
from belljar.journal.session_records import SessionRecord
from belljar.kernels.base import Kernel
from belljar.provisioning.handover import RestoredKernel, ResumableKernel
from belljar.sessions.hibernation import WakeReport
from belljar.sessions.session import Session


def wake(session: Session, entry: SessionRecord) -> None:
    """It was asleep on disk: what it was goes on, with the first kernel."""
    session.restore(entry, "the session has been asleep on disk since, where only its latest state is kept")
    session.session_kernel.waking = WakeReport(session.folders, entry)
    session.veil.restore(session.folders.vault)


def take_over(session: Session, entry: SessionRecord, kernel: Kernel) -> None:
    """It lives on with the kernel that an earlier server left."""
    session.restore(entry, "its server has ended since, and this state could not outlive it")
    for slept in (session.folders.state, session.folders.vault):
        slept.unlink(missing_ok=True)
    session.session_kernel.adopt(kernel)


def follow(session: Session, record: ExecutionRecord, restored: RestoredKernel, left_s: float) -> None:
    """Go on with an execution that its kernel was given by an earlier server; so much of its time is left."""
    note = restored.note
    cell = Cell(record.code, note.timeout_s, allow_input=note.allow_input)
    execution = Execution(record.id, session, cell, session.count)
    execution.resume(restored.kernel, session.journal.events(record.id), left_s, restored.calls)
    session.queue.add(execution)


def catch_up(session: Session, kernel: ResumableKernel) -> None:
    """Nothing ran when the earlier server ended: hear what was said since, before anything else is done."""
    session.queue.run_aside(_catch_up(session, kernel))


async def _catch_up(session: Session, kernel: ResumableKernel) -> None:
    async with session.turn:
        await session.session_kernel.catch_up(kernel)
    if session.tools is not None:
        session.tools.resume()
