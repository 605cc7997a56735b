"""One notebook, from its file through a fresh session to a report of what differs.

Stdout is the report; progress and what belljar has to say go to stderr.
"""

import asyncio
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from belljar.api import open_session
from belljar.cli.endings import INTERRUPTED
from belljar.cli.files import write_file
from belljar.cli.keeping import display_in
from belljar.cli.notebooks import StoredCell, StoredNotebook, read_notebook
from belljar.cli.pipes import put_out
from belljar.cli.progress import Progress
from belljar.cli.running import interrupting, prepare_environment
from belljar.cli.streams import log_to_stderr
from belljar.errors import BelljarError, InvalidArgument, LimitError, UsageError
from belljar.handles import SessionHandle
from belljar.models import ExecutionResult, OutputEvent
from belljar.outputs.comparison import Comparison, error_in
from belljar.outputs.event_budget import EventBudget
from belljar.outputs.notebook import NotebookCell, Shown, cell_outputs
from belljar.outputs.plain import as_plain
from belljar.settings import Settings

LIMIT_CHARS = 1_000_000
_PYTHON = ("", "python", "ipython", "python3")

Verdict = Literal["same", "different", "failed", "new", "skipped", "not run"]


@dataclass(frozen=True, slots=True)
class Replay:
    """What to replay, and what to do with it."""

    file: Path
    output: Path | None
    ignore: Sequence[str]
    keep_going: bool
    as_json: bool
    force: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one cell."""

    cell: int
    verdict: Verdict
    details: list[str]


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a cell gave this time."""

    result: ExecutionResult
    outputs: list[Any]


def replay(settings: Settings, chosen: Replay) -> int:
    """Run the notebook, print the report, tell the exit status."""
    level = logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING
    log_to_stderr(level)
    notebook = read_notebook(chosen.file)
    _check_language(chosen.file, notebook, settings)
    comparison = Comparison(_patterns(chosen.ignore))
    if chosen.output is not None and not chosen.force and os.path.lexists(chosen.output):
        raise InvalidArgument(f"{chosen.output} exists already", hint="Name another file, or add --force")
    try:
        fresh = asyncio.run(_run(settings, notebook, keep_going=chosen.keep_going))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    reports = [_report(comparison, cell, fresh.get(cell.number)) for cell in notebook.cells]
    if chosen.output is not None:
        write_file(chosen.output, _executed(notebook, fresh), force=chosen.force)
    as_json = json.dumps([asdict(report) for report in reports], indent=2) + "\n"
    broken = put_out(as_json if chosen.as_json else _text(reports))
    if any(run.result.status == "interrupted" for run in fresh.values()):
        return INTERRUPTED
    return broken or int(any(report.verdict in ("different", "failed", "not run") for report in reports))


def _check_language(path: Path, notebook: StoredNotebook, settings: Settings) -> None:
    if notebook.language not in _PYTHON and not settings.environment.startswith("kernel:"):
        raise InvalidArgument(
            f"{path} is written in {as_plain(notebook.language)[:40]}, and sessions run Python",
            hint="Name an installed Jupyter kernel with --environment kernel:NAME",
        )


def _patterns(ignored: Sequence[str]) -> list[re.Pattern[str]]:
    patterns: list[re.Pattern[str]] = []
    for pattern in ignored:
        try:
            patterns.append(re.compile(pattern, re.MULTILINE))
        except re.error as error:
            raise InvalidArgument(f"--ignore {pattern} is no regular expression: {error}") from error
    return patterns


async def _run(settings: Settings, notebook: StoredNotebook, *, keep_going: bool) -> dict[int, Fresh]:
    """The cells that ran, by number."""
    await prepare_environment(settings)
    runs: dict[int, Fresh] = {}
    shown: Shown = {}
    wanted = [cell for cell in notebook.cells if not cell.is_skipped]
    with closing(Progress(len(wanted))) as progress:
        async with open_session(settings=settings) as session:
            for cell in wanted:
                progress.step(f"cell {cell.number}")
                fresh = runs[cell.number] = await _run_or_refuse(session, cell.code, shown)
                has_failed = bool(error_in(fresh.outputs)) and not error_in(cell.outputs) and not cell.may_raise
                if fresh.result.status == "interrupted" or (has_failed and not keep_going):
                    break
    return runs


async def _run_or_refuse(session: SessionHandle, code: str, shown: Shown) -> Fresh:
    """What is not run, by a policy or for its form, has failed like what raised: the cells before it have a report."""
    try:
        return await _run_cell(session, code, shown)
    except (UsageError, LimitError) as error:
        return Fresh(_refusal(session.id, error), [_error_output(error)])


def _refusal(session_id: str, error: BelljarError) -> ExecutionResult:
    return ExecutionResult(
        success=False,
        status="rejected",
        execution_id="",
        session_id=session_id,
        execution_count=0,
        output=[],
        stdout="",
        stderr="",
        error=f"{error.code}: {error}",
    )


def _error_output(error: BelljarError) -> dict[str, Any]:
    told = f"{error.code}: {error}"
    return {"output_type": "error", "ename": error.code, "evalue": str(error), "traceback": [told]}


async def _run_cell(session: SessionHandle, code: str, shown: Shown) -> Fresh:
    budget = EventBudget(LIMIT_CHARS)
    stream = session.stream(code)
    with interrupting(session):
        async for event in stream:
            budget.add(event)
    events = budget.events()
    contents = {uri: await session.display(uri) for event in events for uri in _uris(event)}
    ran = NotebookCell(code, stream.result, events)
    return Fresh(stream.result, cell_outputs(ran, contents.get, shown, limit_chars=LIMIT_CHARS))


def _uris(event: OutputEvent) -> list[str]:
    """Where the parts of an event are that are kept as files."""
    display = display_in(event)
    forms = [form.uri for form in (display, *display.also)] if display else []
    whole = event.data.get("uri")
    return [uri for uri in (*forms, whole) if isinstance(uri, str)]


def _report(comparison: Comparison, cell: StoredCell, fresh: Fresh | None) -> Report:
    if cell.is_skipped:
        return Report(cell.number, "skipped", [])
    if fresh is None:
        return Report(cell.number, "not run", [])
    error = error_in(fresh.outputs)
    if error and not error_in(cell.outputs):
        verdict: Verdict = "new" if cell.may_raise and not cell.has_run else "failed"
        # The interrupt that a cell saw does not say that its time was up.
        told = fresh.result.cause if fresh.result.status == "timeout" else error
        return Report(cell.number, verdict, as_plain(told or error).splitlines()[:3])
    if not cell.has_run:
        return Report(cell.number, "new", [])
    differences = comparison.differences(comparison.said(cell.outputs), comparison.said(fresh.outputs))
    return Report(cell.number, "different" if differences else "same", differences)


def _executed(notebook: StoredNotebook, fresh: dict[int, Fresh]) -> bytes:
    """The notebook with what its cells gave this time; those that did not run have no output."""
    for cell in notebook.cells:
        run = fresh.get(cell.number)
        cell.document["outputs"] = run.outputs if run else []
        cell.document["execution_count"] = run.result.execution_count or None if run else None
    # The state of widgets belongs to the kernel that made it.
    notebook.metadata.pop("widgets", None)
    text = json.dumps(notebook.document, indent=1, ensure_ascii=False)
    return f"{text}\n".encode(errors="replace")


def _text(reports: list[Report]) -> str:
    lines: list[str] = []
    for report in reports:
        lines += [f"cell {report.cell}: {report.verdict}", *(f"    {line}" for line in report.details)]
    counts = Counter(report.verdict for report in reports)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none to run"
    return "\n".join([*lines, f"{len(reports)} cell{'' if len(reports) == 1 else 's'}: {told}\n"])
