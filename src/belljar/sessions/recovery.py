"""Cleans up after servers that are gone: unfinished executions, sessions without a process, leftover folders."""

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from belljar.executions.transcript import output_uri
from belljar.files.fd_walk import remove_tree
from belljar.journal.journal import KILLED, ExecutionRecord, Journal
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.models import ExecutionResult
from belljar.outputs.summary import Summary

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
) -> None:
    """Record as lost the sessions and executions of servers that are not among the living, and remove leftovers.

    The `spared` sessions are skipped, because they may be taken over. `why_lost` returns why a session that should
    have outlived its server did not.
    """
    for entry in records.abandoned(living):
        if entry.id in spared:
            continue
        if entry.state == "unborn":
            remove_tree(folder / entry.id)
            records.forget(entry.id)
            continue
        for record in journal.unfinished(entry.id):
            journal.finish(broken_off(journal, record, entry.variables, budget_chars))
        why = why_lost(entry)
        end = f"{KILLED}, {why}" if why else KILLED
        records.put_to_sleep(entry.id, end)
        log.warning("session %s: %s; files are kept, variables are lost", entry.id, end, extra={"session_id": entry.id})
    for path in folder.glob(f"{ZYGOTE}*"):
        if path.name.split(".")[1:2] != [] and path.name.split(".")[1] not in living:
            remove_tree(path)


def broken_off(
    journal: Journal, record: ExecutionRecord, variables: tuple[str, ...], budget_chars: int
) -> ExecutionResult:
    """Return the result of an execution whose server was killed: its output until then, and the cause."""
    summary = Summary(budget_chars=budget_chars, uri=output_uri(record.id))
    sequence = 0
    for event in journal.events(record.id):
        summary.add(event)
        sequence = event.sequence
    output, notices = summary.texts()
    cause = f"{KILLED} while it ran" if record.has_begun else f"{KILLED} before its turn came; it never ran"
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
    )
