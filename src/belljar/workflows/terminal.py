"""A run of a workflow at the terminal: prints what happens to stderr, asks the person, and stops at Ctrl-C.

The run is driven by an engine of this process. Does not know which command began it, or how.
"""

import asyncio
import json
import logging
import shlex
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from belljar.cli.run import prepare_environment
from belljar.cli.streams import indented, log_to_stderr, one_line
from belljar.cli.terminal import INTERRUPTED, StandardInput, on_sigint, write
from belljar.errors import InvalidArgument
from belljar.http.server_socket import open_reachable_runtime
from belljar.questions.schema import choices_of, fields_of, typed_value
from belljar.runtime import Runtime
from belljar.settings import Settings
from belljar.workflows.definition import Definition
from belljar.workflows.live_run import LiveRun, RunEvent
from belljar.workflows.questions import RunQuestion
from belljar.workflows.run_views import RunInfo
from belljar.workflows.saved_files import RunFiles
from belljar.workflows.step_guards import guardrail_notes
from belljar.workflows.workflows import workflows_of

WAITING = 3
"""The exit status of a run that waits for a person."""
MAX_FIELDS = 10
_LONG_S = 3600.0

Begin = Callable[[Runtime], Awaitable[LiveRun | None]]
"""Starts a run, or goes on with one, in the engine of this process; None if a server drives it."""


def drive(settings: Settings, begin: Begin, *, mcp_config: str | None = None, as_json: bool) -> int:
    """Begin or go on with a run in an engine of this process, follow it, and return the exit status.

    `mcp_config` is the option that the next command for this run needs, too.
    """
    options = f" --mcp-config {shlex.quote(str(Path(mcp_config).absolute()))}" if mcp_config else ""
    log_to_stderr(logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING)
    try:
        return asyncio.run(_driven(settings, begin, options, as_json=as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _driven(settings: Settings, begin: Begin, options: str, *, as_json: bool) -> int:
    await prepare_environment(settings)
    async with open_reachable_runtime(settings) as runtime:
        run = await begin(runtime)
        if run is None:
            print("the server that drives the run goes on with it", file=sys.stderr)
            return 0
        run.has_output_readers = True
        print(f"run {run.id} of {one_line(run.record.name)}", file=sys.stderr, flush=True)
        print_notes(run.definition)
        files = RunFiles(settings, run.record)
        async with _interruptible(runtime, run):
            await _follow(runtime, run, options)
        await files.save()
        info = workflows_of(runtime).show(run.id, run.record.principal, most=10_000)
        _print_end(info, options, as_json=as_json)
        return _status(info)


def print_notes(definition: Definition) -> None:
    """Tell what of a workflow's guardrails does less or something else than it says."""
    for note in guardrail_notes(definition):
        print(f"note: {one_line(note)}", file=sys.stderr, flush=True)


def _print_end(info: RunInfo, options: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(info.model_dump(mode="json"), indent=2))
    elif info.state == "done" and info.result is not None:
        print(info.result if isinstance(info.result, str) else json.dumps(info.result, ensure_ascii=False))
    if info.state == "waiting":
        _print_questions(info, options)
    elif info.state != "done":
        print(f"{info.state}: {indented(info.reason)}", file=sys.stderr)
        print(f"belljar workflow resume {info.run}{options} goes on from there", file=sys.stderr)


def _print_questions(info: RunInfo, options: str) -> None:
    for question in info.questions:
        print(f"waits for a person ({question.step}): {indented(question.message)}", file=sys.stderr)
    print(answer_hint(info, options), file=sys.stderr, flush=True)


def answer_hint(info: RunInfo, options: str = "") -> str:
    """Return the command that answers the first question of a run, with the names of its fields."""
    question = info.questions[0]
    names = [*fields_of(question.fields)][:MAX_FIELDS]
    step = ["--step", shlex.quote(one_line(question.step))] if len(info.questions) > 1 else []
    fields = [f"{shlex.quote(one_line(name))}=…" for name in names]
    return " ".join([f"belljar workflow answer {info.run}{options}", *step, *fields, "goes on with it"])


def _status(info: RunInfo) -> int:
    match info.state:
        case "done":
            return 0
        case "waiting":
            return WAITING
        case "interrupted":
            return INTERRUPTED
        case _:
            return 1


async def _follow(runtime: Runtime, run: LiveRun, options: str) -> None:
    """Tell what happens until the run has ended, or asks something that nobody here can answer.

    A cell that asks in its middle would end with this process, so its answer is waited for here.
    """
    printed = shown = 0
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    stdin = StandardInput()
    while True:
        is_over = run.is_over  # read first: what happens while its events are printed is printed in the next round
        for event in [each for each in run.events if each.number > printed]:
            printed = event.number
            await _tell(event)
        if is_over:
            return
        if run.state == "waiting":
            questions = workflows_of(runtime).questions(run.id, run.record.principal)
            if can_ask and questions:
                await _ask(runtime, run, *questions[0], stdin)
                continue
            if not run.has_waiting_cell:
                return
            if shown != (shown := run.number):
                info = workflows_of(runtime).show(run.id, run.record.principal)
                _print_questions(info, options)
                print("The cell that asks waits here: answer it from another terminal", file=sys.stderr, flush=True)
        if run.number == printed and not run.is_over:
            await run.wait_for_change(_LONG_S)


async def _tell(event: RunEvent) -> None:
    match event.kind:
        case "output":
            await write(sys.stderr, event.text)
        case "begin":
            print(f"▸ {one_line(event.path)}{': ' + event.text if event.text else ''}", file=sys.stderr, flush=True)
        case "end" | "note":
            if event.path:
                mark = "✓" if event.text.startswith("done") else "·" if event.kind == "note" else "✗"
                print(f"{mark} {one_line(event.path)}: {indented(event.text)}", file=sys.stderr, flush=True)
        case "ask":
            pass


async def _ask(runtime: Runtime, run: LiveRun, path: str, question: RunQuestion, stdin: StandardInput) -> None:
    """Ask the person at the terminal, and pass the answer on."""
    print(f"? {one_line(path)}: {indented(question.message)}", file=sys.stderr)
    fields = fields_of(question.schema)
    values: dict[str, Any] = {}
    is_declined = False
    for name, entry in fields.items():
        choices = f" ({' | '.join(str(value) for value, _ in choices_of(entry))})" if choices_of(entry) else ""
        print(f"  {one_line(str(entry.get('title', name)) + choices)}: ", end="", file=sys.stderr, flush=True)
        text = await stdin.answer("")
        if text is None:
            is_declined = True
            break
        values[name] = typed_value(entry, text)
    if not fields:
        print("  yes or no? ", end="", file=sys.stderr, flush=True)
        is_declined = (await stdin.answer("") or "").strip().lower() not in ("y", "yes")
    try:
        await workflows_of(runtime).answer(
            run.id,
            run.record.principal,
            values,
            action="decline" if is_declined else "accept",
            step=path,
            by="terminal",
            is_operator=True,
        )
    except InvalidArgument as error:
        print(f"  {indented(str(error))}", file=sys.stderr)
        return
    await run.wait_for_change(2)


@asynccontextmanager
async def _interruptible(runtime: Runtime, run: LiveRun) -> AsyncGenerator[None]:
    """Stop driving on Ctrl-C: what runs is interrupted, and the run can be resumed."""
    following, is_interrupted = asyncio.current_task(), False

    def interrupt() -> None:
        nonlocal is_interrupted
        if following is not None and not is_interrupted:
            is_interrupted = following.cancel()

    with on_sigint(interrupt):
        try:
            yield
        except asyncio.CancelledError:
            if following is None or not is_interrupted:
                raise
            following.uncancel()
            await workflows_of(runtime).interrupt(run)
