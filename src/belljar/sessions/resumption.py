"""Continues sessions of earlier servers: from disk, or with the kernel that an earlier server left alive."""

import shutil
import time
from pathlib import Path

from belljar.executions.cell import Cell
from belljar.executions.execution import Execution
from belljar.journal.journal import ExecutionRecord
from belljar.journal.session_records import SessionRecord
from belljar.kernels.base import Kernel
from belljar.provisioning.handover import RestoredKernel, ResumableKernel
from belljar.sessions.hibernation import SavedStateLoader
from belljar.sessions.session import Session


def wake(session: Session, entry: SessionRecord) -> None:
    """Continue a session that was asleep on disk; its variables are loaded when its first kernel starts."""
    session.restore(entry, "the session has been asleep on disk since, where only its latest state is kept")
    session.session_kernel.waking = SavedStateLoader(session.folders, entry)
    session.redactor.restore(session.folders.vault)


def reload(session: Session, entry: SessionRecord, saved: Path) -> None:
    """Have the next kernel of a session that has none start with the variables of a file, which stays."""
    shutil.copyfile(saved, session.folders.state)
    session.session_kernel.waking = SavedStateLoader(session.folders, entry)


def take_over(session: Session, entry: SessionRecord, kernel: Kernel) -> None:
    """Continue a session with the kernel that an earlier server left alive."""
    session.restore(entry, "its server has ended since, and this state could not outlive it")
    for path in (session.folders.state, session.folders.vault):
        path.unlink(missing_ok=True)
    session.session_kernel.adopt(kernel)


def follow(session: Session, record: ExecutionRecord, restored: RestoredKernel, left_s: float) -> None:
    """Continue an execution that an earlier server gave to the kernel; `left_s` of its timeout are left."""
    note = restored.note
    cell = Cell(record.code, note.timeout_s, allow_input=note.allow_input)
    execution = Execution(record.id, session, cell, session.count)
    begun_at = record.started_at or time.time()
    execution.resume(
        restored.kernel,
        session.journal.events(record.id),
        left_s,
        restored.calls,
        queued_s=max(0.0, begun_at - record.submitted_at),
        ran_s=max(0.0, time.time() - begun_at),
    )
    session.queue.add(execution)


def catch_up(session: Session, kernel: ResumableKernel) -> None:
    """Read what the kernel sent since the earlier server ended, before anything else, because no cell ran then."""
    session.queue.run_aside(_catch_up(session, kernel))


async def _catch_up(session: Session, kernel: ResumableKernel) -> None:
    async with session.turn:
        await session.session_kernel.catch_up(kernel)
    if session.tools is not None:
        session.tools.resume()
