"""Takes over, when a server starts, the sessions whose kernels outlived an earlier server, with their running cells.

Sessions that could not be taken over are recorded as lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from belljar.errors import BelljarError
from belljar.executions.transcript import output_uri
from belljar.files.fd_walk import remove_tree
from belljar.journal.journal import KILLED, ExecutionRecord, Journal
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.models import ExecutionResult, Usage
from belljar.outputs.summary import Summary
from belljar.privacy.vault import TokenLog
from belljar.provisioning.environments import is_remote
from belljar.provisioning.handover import Handover, RestoredKernel
from belljar.provisioning.starter import KernelStarter
from belljar.sessions import resumption
from belljar.sessions.folders import SessionFolders
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session

ZYGOTE = "zygote-"
log = logging.getLogger(__name__)


def recover(
    journal: Journal,
    records: SessionRecords,
    folder: Path,
    living: Collection[str],
    *,
    budget_chars: int,
    spared: Collection[str] = (),
    why_lost: Callable[[SessionRecord], str] = lambda _: "",
    ended_at: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Record as lost the sessions and executions of servers that are not among the living, and remove leftovers.

    The `spared` sessions are skipped, because they may be taken over. `why_lost` returns why a session that should
    have outlived its server did not, `ended_at` has when those servers were last known to run.
    """
    for entry in records.abandoned(living):
        if entry.id in spared:
            continue
        why = "" if entry.state == "unborn" else why_lost(entry)
        for record in journal.unfinished(entry.id):
            ended = ended_at.get(entry.run, 0.0)
            result = broken_off(journal, record, entry.variables, budget_chars, ended_at=ended, why=why)
            journal.finish(result)
        if entry.state == "unborn":
            remove_tree(folder / entry.id)
            if entry.principal:  # its result stays, as if its piece had ended
                records.record_end(entry.id, KILLED)
            else:
                records.forget(entry.id)
            continue
        end = f"{KILLED}, {why}" if why else KILLED
        records.put_to_sleep(entry.id, end)
        # Those of a session that had not woken yet when its server ended, or was saved in case its kernel would end.
        is_saved = SessionFolders(entry.id, folder / entry.id).state.exists()
        outcome = "files and variables are on disk" if is_saved else "files are kept, variables are lost"
        log.warning("session %s: %s; %s", entry.id, end, outcome, extra={"session_id": entry.id})
    for path in folder.glob(f"{ZYGOTE}*"):
        if path.name.split(".")[1:2] != [] and path.name.split(".")[1] not in living:
            remove_tree(path)


def broken_off(
    journal: Journal,
    record: ExecutionRecord,
    variables: tuple[str, ...],
    budget_chars: int,
    *,
    ended_at: float = 0.0,
    why: str = "",
) -> ExecutionResult:
    """Return the result of an execution whose server was killed: its output until then, and the cause.

    `ended_at` is when that server was last known to run, `why` says why the execution did not outlive it.
    """
    summary = Summary(budget_chars=budget_chars, uri=output_uri(record.id))
    sequence = 0
    for event in journal.events(record.id):
        summary.add(event)
        sequence = event.sequence
    output, notices = summary.texts()
    cause = f"{KILLED} before its turn came; it never ran"
    if record.has_begun:
        cause = f"{KILLED} while it ran, {why}" if why else f"{KILLED} while it ran"
    return ExecutionResult(
        success=False,
        status="died" if record.has_begun else "rejected",
        execution_id=record.id,
        session_id=record.session_id,
        execution_count=0,
        output=output,
        notices=notices,
        stdout=summary.stream("stdout"),
        stderr=summary.stream("stderr"),
        displays=summary.displays,
        error=cause,
        truncated=summary.truncation,
        state="lost",
        lost=list(variables),
        cause=cause,
        sequence=sequence,
        usage=Usage(wall_s=round(max(0.0, ended_at - record.started_at), 3) if record.started_at else 0.0),
    )


class Takeover:
    """Takes over what an earlier server left; does nothing where no session outlives its server."""

    def __init__(self, handover: Handover, starter: KernelStarter, folder: Path) -> None:
        self._handover = handover
        self._starter = starter
        self._folder = folder
        self._failures: dict[str, str] = {}

    async def take_over_all(self, registry: Registry, living: Collection[str]) -> None:
        """Take over every session that no other server has; end the kernels of the others."""
        for session_id in self._handover.left():
            entry = registry.records.find(session_id)
            if entry is None or not _is_free(entry, living):
                self._handover.withdraw(session_id)
                continue
            try:
                await self._take(registry, entry)
            except (BelljarError, OSError, LookupError, TypeError, ValueError) as error:
                # The server must start all the same, whatever an earlier version of belljar has left.
                self._failures[session_id] = reason = _reason(error)
                ids, fault = {"session_id": session_id}, None if reason in str(error) else error
                log.warning("session %s cannot be taken over: %s", session_id, reason, extra=ids, exc_info=fault)
                self._handover.withdraw(session_id)
        await self._handover.end_unclaimed()

    def why_lost(self, entry: SessionRecord) -> str:
        """Return why a session did not outlive its server; empty where no session does."""
        if not self._handover.is_on:
            return ""
        if failure := self._failures.get(entry.id) or self._handover.refusal:
            return f"and it could not be taken over: {failure}"
        if is_remote(entry.environment):
            return f"which a session of {entry.environment} does not outlive"
        return "and nobody had kept its process"

    async def _take(self, registry: Registry, entry: SessionRecord) -> None:
        identity = self._handover.identity_of(entry.id)
        folders = SessionFolders(entry.id, self._folder / entry.id, identity, entry.principal)
        environment = await self._starter.environments.get(entry.environment)
        restored = await self._handover.restore(entry.id, folders, environment, self._starter.restore_services)
        store = await asyncio.to_thread(_set_aside, folders.snapshots)
        token_log = TokenLog(restored.extra_descriptor) if restored.extra_descriptor >= 0 else None
        session = registry.take_over(entry, folders, restored.kernel, token_log)
        await session.session_kernel.inherit(restored.checkpoints, store)
        _resume_executions(session, restored)


def _reason(error: Exception) -> str:
    if isinstance(error, BelljarError):
        return error.message
    return str(error) if isinstance(error, OSError) else "what its server left of it cannot be read"


def _set_aside(store: Path) -> Path:
    """Move the earlier server's snapshots of files out of the way of this one's, and return their new path."""
    aside = store.with_name(f"{store.name}-left")
    if aside.exists():  # left by a server that ended during a takeover
        remove_tree(aside)
    if store.exists():
        store.rename(aside)
    return aside


def _is_free(entry: SessionRecord, living: Collection[str]) -> bool:
    return entry.state == "asleep" or (entry.state == "live" and entry.run not in living)


def _resume_executions(session: Session, restored: RestoredKernel) -> None:
    """Follow the execution that the kernel was given; record that those waiting behind it never ran."""
    note, is_busy = restored.note, False
    for record in session.journal.unfinished(session.id):
        if record.id == note.execution_id:
            is_busy = True
            resumption.follow(session, record, restored, max(0.0, note.deadline - time.time()))
            continue
        budget_chars = session.settings.output_budget_chars
        result = broken_off(session.journal, record, (), budget_chars)
        session.journal.finish(result.model_copy(update={"state": "kept"}))
    if not is_busy:
        resumption.catch_up(session, restored.kernel)
