"""`belljar replay`: run a notebook again in a fresh session, and report which outputs differ.

The report goes to stdout; progress and belljar's own messages go to stderr.
"""

import asyncio
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from belljar.api import open_session
from belljar.cli.notebooks import StoredCell, StoredNotebook, read_notebook
from belljar.cli.progress import ProgressBar
from belljar.cli.run import interrupt_on_sigint, prepare_environment, single_session_settings
from belljar.cli.saved_outputs import display_in, write_file
from belljar.cli.streams import log_to_stderr, write_output
from belljar.cli.terminal import INTERRUPTED
from belljar.errors import BelljarError, InvalidArgument, LimitError, UsageError
from belljar.handles import SessionHandle
from belljar.models import ExecutionResult, OutputEvent
from belljar.outputs.budget import EventBudget
from belljar.outputs.comparison import Comparison, error_in
from belljar.outputs.notebook import NotebookCell, Shown, cell_outputs
from belljar.outputs.terminal_text import as_plain
from belljar.settings import Settings, load_command_settings

_LIMIT_CHARS = 1_000_000
_PYTHON = ("", "python", "ipython", "python3")

Verdict = Literal["same", "different", "failed", "new", "skipped", "not run"]


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Which notebook to replay, and what to do with the result."""

    file: Path
    output: Path | None
    ignore: Sequence[str]
    keep_going: bool
    as_json: bool
    force: bool


@dataclass(frozen=True, slots=True)
class CellReport:
    """How the new output of one cell compares with the stored one."""

    cell: int
    verdict: Verdict
    details: list[str]


@dataclass(frozen=True, slots=True)
class CellRun:
    """The result and the outputs of a cell in this run."""

    result: ExecutionResult
    outputs: list[Any]


def command(
    file: Annotated[Path, typer.Argument(help="Notebook to run, .ipynb of version 4.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the notebook with its new output here.")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Run the cells after one that failed, too.")] = False,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Text that does not count as a difference; repeatable.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Interrupt each cell after this many seconds.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="namespace or process.")] = None,
    environment: Annotated[str | None, typer.Option(help="Environment to run in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,
) -> None:
    """Run a notebook in a fresh session and compare what it says with what is stored in it.

    Exits with 0 when nothing differs, with 1 when something does, with 2 for a file that is no notebook.
    """
    flags = {"sandbox": sandbox, "environment": environment, "execution_timeout_s": timeout}
    request = ReplayRequest(file, output, ignore=ignore or [], keep_going=keep_going, as_json=as_json, force=force)
    raise typer.Exit(_replay(single_session_settings(load_command_settings(flags)), request))


def _replay(settings: Settings, request: ReplayRequest) -> int:
    """Run the notebook, print the report and return the exit status."""
    level = logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING
    log_to_stderr(level)
    notebook = read_notebook(request.file)
    _check_language(request.file, notebook, settings)
    comparison = Comparison(_patterns(request.ignore))
    if request.output is not None and not request.force and os.path.lexists(request.output):
        raise InvalidArgument(f"{request.output} exists already", hint="Name another file, or add --force")
    try:
        runs = asyncio.run(_run(settings, notebook, keep_going=request.keep_going))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    reports = [_report(comparison, cell, runs.get(cell.number)) for cell in notebook.cells]
    if request.output is not None:
        write_file(request.output, _executed(notebook, runs), force=request.force)
    as_json = json.dumps([asdict(report) for report in reports], indent=2) + "\n"
    write_output(sys.stdout, as_json if request.as_json else _text(reports))
    if any(run.result.status == "interrupted" for run in runs.values()):
        return INTERRUPTED
    return int(any(report.verdict in ("different", "failed", "not run") for report in reports))


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


async def _run(settings: Settings, notebook: StoredNotebook, *, keep_going: bool) -> dict[int, CellRun]:
    """Run the cells in order; return those that ran, by number."""
    await prepare_environment(settings)
    runs: dict[int, CellRun] = {}
    shown: Shown = {}
    wanted = [cell for cell in notebook.cells if not cell.is_skipped]
    with closing(ProgressBar(len(wanted))) as progress:
        async with open_session(settings=settings) as session:
            for cell in wanted:
                progress.step(f"cell {cell.number}")
                run = runs[cell.number] = await _run_or_refuse(session, cell.code, shown)
                has_failed = bool(error_in(run.outputs)) and not error_in(cell.outputs) and not cell.may_raise
                if run.result.status == "interrupted" or (has_failed and not keep_going):
                    break
    return runs


async def _run_or_refuse(session: SessionHandle, code: str, shown: Shown) -> CellRun:
    """Run a cell; one that is refused, by a policy for example, counts as failed, so that a report is printed."""
    try:
        return await _run_cell(session, code, shown)
    except (UsageError, LimitError) as error:
        return CellRun(_refusal(session.id, error), [_error_output(error)])


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
    return {
        "output_type": "error",
        "ename": error.code,
        "evalue": str(error),
        "traceback": [f"{error.code}: {error}"],
    }


async def _run_cell(session: SessionHandle, code: str, shown: Shown) -> CellRun:
    budget = EventBudget(_LIMIT_CHARS)
    stream = session.stream(code)
    with interrupt_on_sigint(session):
        async for event in stream:
            budget.add(event)
    events = budget.events()
    contents = {uri: await session.display(uri) for event in events for uri in _uris(event)}
    ran = NotebookCell(code, stream.result, events)
    return CellRun(stream.result, cell_outputs(ran, contents.get, shown, limit_chars=_LIMIT_CHARS))


def _uris(event: OutputEvent) -> list[str]:
    """Return the addresses of the parts of an event that are stored as files."""
    display = display_in(event)
    forms = [form.uri for form in (display, *display.also)] if display else []
    whole = event.data.get("uri")
    return [uri for uri in (*forms, whole) if isinstance(uri, str)]


def _report(comparison: Comparison, cell: StoredCell, run: CellRun | None) -> CellReport:
    if cell.is_skipped:
        return CellReport(cell.number, "skipped", [])
    if run is None:
        return CellReport(cell.number, "not run", [])
    error = error_in(run.outputs)
    if error and not error_in(cell.outputs):
        verdict: Verdict = "new" if cell.may_raise and not cell.has_run else "failed"
        # A cell that timed out reports KeyboardInterrupt, which does not say that its time was up.
        reason = run.result.cause if run.result.status == "timeout" else error
        return CellReport(cell.number, verdict, as_plain(reason or error).splitlines()[:3])
    if not cell.has_run:
        return CellReport(cell.number, "new", [])
    differences = comparison.differences(comparison.said(cell.outputs), comparison.said(run.outputs))
    return CellReport(cell.number, "different" if differences else "same", differences)


def _executed(notebook: StoredNotebook, runs: dict[int, CellRun]) -> bytes:
    """Return the notebook file with the outputs of this run; cells that did not run have none."""
    for cell in notebook.cells:
        run = runs.get(cell.number)
        cell.document["outputs"] = run.outputs if run else []
        cell.document["execution_count"] = run.result.execution_count or None if run else None
    # The stored state of widgets belongs to the kernel of the earlier run.
    notebook.metadata.pop("widgets", None)
    text = json.dumps(notebook.document, indent=1, ensure_ascii=False)
    return f"{text}\n".encode(errors="replace")


def _text(reports: list[CellReport]) -> str:
    lines: list[str] = []
    for report in reports:
        lines += [f"cell {report.cell}: {report.verdict}", *(f"    {line}" for line in report.details)]
    counts = Counter(report.verdict for report in reports)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none to run"
    return "\n".join([*lines, f"{len(reports)} cell{'' if len(reports) == 1 else 's'}: {summary}\n"])
