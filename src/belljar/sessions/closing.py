"""Ends of sessions: for good, asleep on disk, or left alive to the next server, with all that has to be given back.

Whoever decides that one ends is the registry.
"""

import asyncio
import logging
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from belljar import measures
from belljar.errors import Busy
from belljar.files.fd_walk import remove_tree
from belljar.files.ownership import disarm
from belljar.journal.journal import Journal
from belljar.journal.retention import remove_outputs
from belljar.journal.session_records import SessionRecords
from belljar.kernels.base import StateReport
from belljar.logs import pseudonym
from belljar.provisioning.handover import Handover
from belljar.provisioning.starter import KernelStarter
from belljar.sessions.hibernation import in_words, save
from belljar.sessions.session import Session
from belljar.settings import Settings

DAY_S = 24 * 60 * 60
# Deleting it takes some 20 ms.
MUCH_OUTPUT_BYTES = 4 * 1024 * 1024

log = logging.getLogger(__name__)


class SessionCloser:
    """Of all sessions of a runtime, which are taken out of `sessions`."""

    def __init__(
        self,
        sessions: dict[str, Session],
        *,
        settings: Settings,
        folder: Path,
        journal: Journal,
        roll: SessionRecords,
        starter: KernelStarter,
        handover: Handover,
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._folder = folder
        self._journal = journal
        self._roll = roll
        self._starter = starter
        self._handover = handover
        self._leaving: dict[str, str] = {}
        """Sessions on their way to disk, and whose they are."""
        self._opened_at, self._opened_ticks = time.time(), time.monotonic()

    def check_not_leaving(self, session_id: str, principal: str) -> None:
        """Refuse a session that can be used neither here any more, nor from disk yet."""
        if self._leaving.get(session_id) == principal:
            raise Busy(
                f"session {session_id} is being put to sleep on disk",
                hint="Make the same call again in 5 seconds: it wakes the session",
            )

    async def close(self, session: Session, end: str) -> None:
        """For good; nothing of it stays."""
        self._sessions.pop(session.id, None)
        await session.aclose()
        await self._starter.vacate(session.id)
        await asyncio.to_thread(session.remove_files)
        if self._journal.output_bytes(session.id) > MUCH_OUTPUT_BYTES:
            with suppress(sqlite3.Error):  # then it takes longer below
                await asyncio.to_thread(remove_outputs, self._journal.path, session.id)
        self._release_identity(session)
        self._journal.forget_session(session.id)
        self._roll.record_end(session.id, end)
        log.info("session %s %s", session.id, end, extra=about(session))

    async def retire(self, session: Session, end: str) -> None:
        """It goes to sleep, unless that is switched off."""
        if not self._settings.hibernate or session.is_blank():
            await self.close(session, end)
            return
        self._sessions.pop(session.id, None)
        self._leaving[session.id] = session.principal
        try:
            report = await put_to_sleep(session, self._roll, end)
            await self._starter.vacate(session.id)
        finally:
            del self._leaving[session.id]
        self._release_identity(session)
        kept = f"{len(report.kept)} variables kept" if report else "its variables are lost"
        measures.hibernations.add("files" if report is None else "some" if report.lost else "all")
        log.info("session %s %s and sleeps, %s", session.id, end, kept, extra=about(session))

    async def detach(self, session: Session, end: str) -> None:
        """The server stops: it lives on for the next one where that is possible, else it is retired."""
        if not self._handover.has(session.id) or session.is_blank():
            await self.retire(session, end)
            return
        self._sessions.pop(session.id, None)
        await detach_session(session, self._roll, end)
        log.info("session %s is left to the next server", session.id, extra=about(session))

    async def forget_outdated(self) -> None:
        """Delete what has slept too long."""
        # A clock that is set forward must not make everything old at once; one that is set back does no harm.
        now = min(time.time(), self._opened_at + time.monotonic() - self._opened_ticks)
        for entry in self._roll.outdated(now - self._settings.keep_days * DAY_S):
            await asyncio.to_thread(remove_tree, self._folder / entry.id)
            self._roll.forget(entry.id)

    def _release_identity(self, session: Session) -> None:
        self._starter.forget(session.id)
        identity = session.folders.identity
        # A fork is its origin's user: the number is free when the last of them has gone.
        if identity is not None and all(other.folders.identity != identity for other in self._sessions.values()):
            self._starter.provider.release_identity(identity)


def about(session: Session) -> dict[str, str]:
    """The ids that a log line about a session carries."""
    return {"session_id": session.id, "principal": pseudonym(session.principal)}


# How a session leaves its server: to disk, where it sleeps, or alive, for the next server to take over.
# How it comes back is in `returns.py`.

MEBIBYTE = 1024 * 1024
UNLIMITED_MB = 1024 * 1024


async def put_to_sleep(session: Session, roll: SessionRecords, end: str) -> StateReport | None:
    """Write the variables to disk and end the kernel. Returns what was kept; None: nothing was."""
    session.queue.interrupt()
    await session.comms.aclose()
    if session.session_kernel.kernel is None:
        # Cells that wait for a kernel, or for its environment to be made, hear no interrupt and have nothing to lose.
        await session.queue.cancel()
    await session.queue.drain()
    report = None
    async with session.turn:
        if session.session_kernel.waking is None:
            report = await _save(session)
    await session.aclose()
    await asyncio.to_thread(disarm, session.folders.own)
    await asyncio.to_thread(session.veil.save, session.folders.vault)
    _enter(session, roll, end, report)
    return report


async def detach_session(session: Session, roll: SessionRecords, end: str) -> None:
    """Let the kernel live for the next server; what runs goes on. Idle, it is written to disk as well."""
    await session.comms.aclose()
    session.close_aside()
    if not session.is_busy and session.settings.hibernate and session.session_kernel.kernel is not None:
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
    await session.session_kernel.detach()
    session.veil.close()


async def _save(session: Session) -> StateReport | None:
    if session.session_kernel.kernel is None:
        return None
    limit_mb = session.settings.disk_mb or session.settings.memory_mb or UNLIMITED_MB
    return await save(session.session_kernel.kernel, session.folders, limit_bytes=limit_mb * MEBIBYTE)


def _enter(session: Session, roll: SessionRecords, end: str, report: StateReport | None) -> None:
    roll.put_to_sleep(session.id, end, [*map(in_words, report.lost)] if report else [])
