"""Cleans up after servers that are gone: unfinished executions, sessions without a process, leftover folders."""

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from belljar.executions.transcript import output_uri
from belljar.files.fd_walk import remove_tree
from belljar.journal.journal import KILLED, ExecutionRecord, Journal
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.models import ExecutionResult, Usage
from belljar.outputs.summary import Summary
from belljar.sessions.folders import SessionFolders

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
        if entry.state == "unborn":
            remove_tree(folder / entry.id)
            records.forget(entry.id)
            continue
        why = why_lost(entry)
        for record in journal.unfinished(entry.id):
            ended = ended_at.get(entry.run, 0.0)
            result = broken_off(journal, record, entry.variables, budget_chars, ended_at=ended, why=why)
            journal.finish(result)
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
