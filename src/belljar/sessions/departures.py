"""How a session leaves its server: to disk, where it sleeps, or alive, for the next server to take over.

How it comes back is in `returns.py`.
"""

import asyncio

from belljar.files.handover import disarm
from belljar.kernels.keeping import StateReport
from belljar.sessions.hibernation import in_words, save
from belljar.sessions.roll import Roll
from belljar.sessions.session import Session

MEBIBYTE = 1024 * 1024
UNLIMITED_MB = 1024 * 1024


async def put_to_sleep(session: Session, roll: Roll, end: str) -> StateReport | None:
    """Write the variables to disk and end the kernel. Returns what was kept; None: nothing was."""
    session.queue.interrupt()
    await session.comms.aclose()
    if session.life.kernel is None:
        # Cells that wait for a kernel, or for its environment to be made, hear no interrupt and have nothing to lose.
        await session.queue.cancel()
    await session.queue.drain()
    report = None
    async with session.turn:
        if session.life.waking is None:
            report = await _save(session)
    await session.aclose()
    await asyncio.to_thread(disarm, session.folders.own)
    await asyncio.to_thread(session.veil.save, session.folders.vault)
    _enter(session, roll, end, report)
    return report


async def leave(session: Session, roll: Roll, end: str) -> None:
    """Let the kernel live for the next server; what runs goes on. Idle, it is written to disk as well."""
    await session.comms.aclose()
    session.close_aside()
    if not session.is_busy and session.settings.hibernate and session.life.kernel is not None:
        async with session.turn:
            report = await _save(session)
        await asyncio.to_thread(session.veil.save, session.folders.vault)
        _enter(session, roll, end, report)
    for execution in session.queue.running():
        if execution.has_started:
            execution.abandon()
        else:
            execution.interrupt()
    await session.queue.cancel()
    await session.life.leave()
    session.veil.close()


async def _save(session: Session) -> StateReport | None:
    if session.life.kernel is None:
        return None
    limit_mb = session.settings.disk_mb or session.settings.memory_mb or UNLIMITED_MB
    return await save(session.life.kernel, session.folders, limit_bytes=limit_mb * MEBIBYTE)


def _enter(session: Session, roll: Roll, end: str, report: StateReport | None) -> None:
    roll.put_to_sleep(session.id, end, [*map(in_words, report.lost)] if report else [])
