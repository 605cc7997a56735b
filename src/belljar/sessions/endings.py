"""How a session ends: deleted, hibernated to disk, or left alive for the next server.

Releases everything that the session had. The registry decides when a session ends; how it comes back is in
`resumption.py`.
"""

import asyncio
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar import metrics
from belljar.change_signal import ChangeLog
from belljar.errors import Busy, JournalDamaged
from belljar.files.fd_walk import disarm, remove_tree
from belljar.journal.journal import Journal
from belljar.journal.retention import remove_outputs
from belljar.journal.search_index import forget_session, has_index
from belljar.journal.session_records import SessionRecord, SessionRecords, last_used
from belljar.kernels.base import StateReport
from belljar.logs import pseudonym
from belljar.provisioning.handover import Handover
from belljar.provisioning.starter import KernelStarter
from belljar.servers import is_living
from belljar.sessions.hibernation import loss_text, save
from belljar.sessions.session import Session
from belljar.settings import MEBIBYTE, Settings

DAY_S = 24 * 60 * 60
UNLIMITED_MB = 1024 * 1024
# Deleting this much output takes some 20 ms; more is deleted in a thread.
MUCH_OUTPUT_BYTES = 4 * 1024 * 1024

log = logging.getLogger(__name__)


class SessionEndings:
    """Ends sessions of a runtime, and removes them from `sessions`."""

    def __init__(
        self,
        sessions: dict[str, Session],
        *,
        settings: Settings,
        folder: Path,
        journal: Journal,
        records: SessionRecords,
        starter: KernelStarter,
        handover: Handover,
        changes: ChangeLog,
    ) -> None:
        self._changes = changes
        self._sessions = sessions
        self._settings = settings
        self._folder = folder
        self._journal = journal
        self._records = records
        self._starter = starter
        self._handover = handover
        self._hibernating: dict[str, str] = {}
        """Sessions that are being written to disk, and their principals."""
        self.on_change_on_disk: Callable[[], None] = lambda: None
        """Called when a session has fallen asleep, or what slept is over: a store has to hear of it."""
        self._opened_at, self._opened_ticks = time.time(), time.monotonic()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_short_of_room = False

    async def _run_to_end(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run to the end even if the caller is cancelled: a session that is half ended could be ended by nobody."""
        task = asyncio.get_running_loop().create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    async def wait_until_settled(self) -> None:
        """Wait for the sessions that are being ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    def check_not_hibernating(self, session_id: str, principal: str) -> None:
        """Refuse a session that is being written to disk, because it can be used neither here nor from disk."""
        if self._hibernating.get(session_id) == principal:
            raise Busy(
                f"session {session_id} is being put to sleep on disk",
                hint="Make the same call again in 5 seconds: it wakes the session",
            )

    async def delete(self, session: Session, end: str) -> None:
        """End a session and delete its files and executions; only why it ended stays on record."""
        self._sessions.pop(session.id, None)
        await self._run_to_end(self._end_and_delete(session, end))

    async def _end_and_delete(self, session: Session, end: str) -> None:
        await session.aclose()
        await self._starter.close_prepared(session.id)
        await self._delete(session.id, session.principal, end, is_piece=session.is_piece)
        self._release_identity(session)

    async def delete_asleep(self, entry: SessionRecord, end: str) -> None:
        """Delete a session that sleeps and was claimed for it, as `delete` deletes one that is open."""
        await self._run_to_end(self._delete(entry.id, entry.principal, end))

    async def _delete(self, session_id: str, principal: str, end: str, *, is_piece: bool = False) -> None:
        await asyncio.to_thread(remove_tree, self._folder / session_id)
        if is_piece:
            # Its result stays for as long as a session that has ended is known, so that it never runs again.
            self._records.record_end(session_id, end)
            return
        # Otherwise `forget_session` below deletes it, which takes longer.
        with suppress(sqlite3.Error, JournalDamaged):
            if self._journal.output_bytes(session_id) > MUCH_OUTPUT_BYTES:
                await asyncio.to_thread(remove_outputs, self._journal.path, session_id)
        self._journal.forget_session(session_id)
        self._records.record_end(session_id, end)
        await self._forget_texts(session_id, principal)
        self.on_change_on_disk()
        self._changes.publish("session", "gone", session_id, principal)
        ids = {"session_id": session_id, "principal": pseudonym(principal)}
        log.info("session %s %s", session_id, end, extra=ids)

    async def _forget_texts(self, session_id: str, principal: str) -> None:
        """Delete what the search of its owner knows of a session that the journal does not have any more."""
        if has_index(self._journal.path, principal):
            await asyncio.to_thread(forget_session, self._journal.path, principal, session_id)

    def has_room_for(self, session: Session) -> bool:
        """Return whether the disk has room for the session's memory; without it, its variables would be lost in sleep.

        They may take less, but that is known only when they are written.
        """
        kernel = session.session_kernel.kernel
        if kernel is None or not self._settings.hibernate or session.is_blank():
            return True
        has_room = shutil.disk_usage(self._folder).free > kernel.memory_mb() * MEBIBYTE
        if not has_room and not self._is_short_of_room:
            log.warning(
                "the disk of %s has too little room: idle sessions stay awake until there is more", self._folder
            )
        self._is_short_of_room = not has_room
        return has_room

    async def hibernate(self, session: Session, end: str, *, is_expected: bool = False) -> None:
        """Hibernate a session, or delete it where hibernation is off or nothing would be missed.

        With `is_expected` somebody will use its id later, also if it has run nothing yet.
        """
        if not self._settings.hibernate or session.is_piece or (session.is_blank() and not is_expected):
            await self.delete(session, end)
            return
        self._sessions.pop(session.id, None)
        self._hibernating[session.id] = session.principal
        await self._run_to_end(self._hibernate(session, end))

    async def _hibernate(self, session: Session, end: str) -> None:
        try:
            report = await save_and_end(session, self._records, end)
            await self._starter.close_prepared(session.id)
        finally:
            del self._hibernating[session.id]
        self._release_identity(session)
        self.on_change_on_disk()
        # A session that was to wake, and has not begun to, still has its variables on disk.
        saved = "its variables are still on disk" if session.folders.state.exists() else "its variables are lost"
        outcome = f"{len(report.kept)} variables kept" if report else saved
        self._changes.publish("session", "asleep", session.id, session.principal)
        metrics.hibernations.add("files" if report is None else "some" if report.lost else "all")
        log.info("session %s %s and sleeps, %s", session.id, end, outcome, extra=session.log_ids)

    async def leave_running(self, session: Session, end: str) -> None:
        """Leave a session alive for the next server, because this one stops; hibernate it where that fails."""
        if not self._handover.has(session.id) or session.is_piece or session.is_blank():
            await self.hibernate(session, end)
            return
        self._sessions.pop(session.id, None)
        await save_and_detach(session, self._records, end)
        self._changes.publish("session", "asleep", session.id, session.principal)
        log.info("session %s is left to the next server", session.id, extra=session.log_ids)

    async def forget_outdated(self) -> None:
        """Delete the sessions that were not used for `keep_days`."""
        # A clock that is set forward must not make all sessions old at once; one that is set back does no harm.
        now = min(time.time(), self._opened_at + time.monotonic() - self._opened_ticks)
        for record in self._records.outdated(now - self._settings.keep_days * DAY_S):
            await asyncio.to_thread(remove_tree, self._folder / record.id)
            if self._records.is_stored(record.id) and record.state == "asleep":
                # Forgotten later: the store has to be told first.
                self._records.record_end(record.id, "expired")
                self.on_change_on_disk()
            else:
                self._records.forget(record.id)
            await self._forget_texts(record.id, record.principal)
        await self._remove_unrecorded(now - self._settings.keep_days * DAY_S)

    async def _remove_unrecorded(self, before: float) -> None:
        """Delete the folders that no session is known of and nobody has used since `before`."""
        runs = self._settings.data_directory / "runs"
        if any(is_living(runs, folder.name) for folder in runs.iterdir() if folder.name != self._records.run):
            return  # that server may have the sessions open, with a journal that was removed
        for folder in self._records.unrecorded(self._folder):
            if folder.name not in self._sessions and last_used(folder) < before:
                await asyncio.to_thread(remove_tree, folder)
                log.warning("the folder of session %s, which the journal has no record of, is removed", folder.name)

    def _release_identity(self, session: Session) -> None:
        self._starter.forget(session.id)
        identity = session.folders.identity
        # A fork has the same user as its origin, so the user is released when the last of them has gone.
        if identity is not None and all(other.folders.identity != identity for other in self._sessions.values()):
            self._starter.provider.release_identity(identity)


# How a session leaves its server


async def save_and_end(session: Session, records: SessionRecords, end: str) -> StateReport | None:
    """Write the variables to disk and end the kernel; return what was saved, or None when nothing was."""
    session.queue.interrupt()
    await session.comms.aclose()
    if session.session_kernel.kernel is None:
        # Cells that wait for a kernel to start, or for its environment, get no interrupt and have nothing to lose.
        await session.queue.cancel()
    await session.queue.drain()
    report = None
    async with session.turn:
        if session.session_kernel.waking is None:
            report = await _save(session)
    await session.aclose()
    await asyncio.to_thread(disarm, session.folders.own)
    await asyncio.to_thread(session.redactor.save, session.folders.vault)
    _record_sleep(session, records, end, report)
    return report


async def save_and_detach(session: Session, records: SessionRecords, end: str) -> None:
    """Leave the kernel alive for the next server, with the cell it runs; an idle session is written to disk as well."""
    await session.comms.aclose()
    session.close_aside()
    if not session.is_busy and session.settings.hibernate and session.session_kernel.kernel is not None:
        async with session.turn:
            report = await _save(session)
        await asyncio.to_thread(session.redactor.save, session.folders.vault)
        _record_sleep(session, records, end, report)
    for execution in session.queue.running():
        if execution.has_started:
            execution.abandon()
        else:
            execution.interrupt()
    await session.queue.cancel()
    await session.session_kernel.detach()
    session.redactor.close()


async def save_variables(session: Session, target: Path) -> StateReport | None:
    """Write the variables of a session that goes on to a file; return None when its kernel cannot."""
    async with session.turn:
        return await _save(session, target)


async def _save(session: Session, target: Path | None = None) -> StateReport | None:
    if session.session_kernel.kernel is None:
        return None
    limit_mb = session.settings.disk_mb or session.settings.memory_mb or UNLIMITED_MB
    return await save(session.session_kernel.kernel, session.folders, limit_bytes=limit_mb * MEBIBYTE, target=target)


def _record_sleep(session: Session, records: SessionRecords, end: str, report: StateReport | None) -> None:
    records.put_to_sleep(session.id, end, [*map(loss_text, report.lost)] if report else [])
