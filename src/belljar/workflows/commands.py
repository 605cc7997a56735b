"""`belljar workflow`: run lists of steps, look at their runs, answer their questions, go on with them.

Data goes to stdout: the value of the last step, lists, graphs. What happens meanwhile goes to stderr. An operator may
look at and answer every run of the data directory, whoever owns it.
"""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli.streams import one_line, table
from belljar.errors import InvalidArgument, RunNotFound
from belljar.journal.archive import open_archive
from belljar.journal.run_records import RunRecord
from belljar.questions.schema import fields_of, typed_value
from belljar.runtime import Runtime, configured_guardrails, open_plugins, open_runtime
from belljar.servers import is_living
from belljar.settings import Settings, load_command_settings
from belljar.settings.keys import LOCAL_PRINCIPAL
from belljar.workflows.checks import Checker
from belljar.workflows.definition import Definition, ToolCallStep, json_schema, step_types
from belljar.workflows.graph import as_mermaid, as_svg
from belljar.workflows.library import Library
from belljar.workflows.live_run import LiveRun
from belljar.workflows.run_views import RunInfo, run_info, run_text
from belljar.workflows.terminal import answer_hint, drive, print_notes
from belljar.workflows.workflows import workflows_of

# Lines of a run's text that name tools of MCP.
_FOR_MODELS = (
    "run_workflow(",
    "get_execution(",
    "A person has to decide: run_workflow(",
    "It goes on in the background",
)
# A command drives one run, in one session or a few forks of it. Making ready for forks takes two seconds.
# Its steps have `workspace/`, whose files it saves at the end.
_SINGLE_RUN = {"fork_start": False, "pool_size": 0, "checkpoints": 0, "workspace": "on"}
_FORKS = re.compile(r"parallel|type[\"']?\s*:\s*[\"']?workflow\b")
"""Finds parallel steps, which run in forks, and sub-workflows, which may have some."""

Run = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, or enough of its beginning.")]
Source = Annotated[str, typer.Argument(metavar="FILE|NAME", help="A file, or a name in workflows_directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Which = Annotated[str, typer.Option("--name", help="Which workflow, in a file that has several.")]
Config = Annotated[str | None, typer.Option("--mcp-config", help="File that lists the servers of tool_call steps.")]


# Commands


def run_command(
    source: Source,
    var: Annotated[
        list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="A variable; the value is JSON or text.")
    ] = None,
    which: Which = "",
    mcp_config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole run as JSON instead of its value.")] = False,
) -> None:
    """Run a workflow: steps and their output go to stderr, the value of the last step to stdout.

    What the steps leave in workspace/ is saved in a folder of that name here. Exits with 0, with 1 if it failed, with 3
    if it waits for a person: `belljar workflow answer` goes on then.
    """
    settings = _settings(_text(source), mcp_config=mcp_config)
    variables = dict(map(_variable, var or []))
    begin = partial(_start, source=source, which=which, variables=variables)
    raise typer.Exit(drive(settings, begin, mcp_config=mcp_config, as_json=as_json))


def resume_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, or enough of its beginning.")] = "",
    last: Annotated[bool, typer.Option("--last", help="The latest run that has not come to its end.")] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Go on with the text as it is now, although it has changed.")
    ] = False,
    mcp_config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole run as JSON instead of its value.")] = False,
) -> None:
    """Go on with a run that was interrupted, failed or was stopped; no finished step is run again."""
    if bool(run) == last:
        raise InvalidArgument("workflow resume takes either RUN or --last", hint="Pass one of them")
    record = _latest_open(load_command_settings()) if last else _record(load_command_settings(), run)
    settings = _settings(record.text, record.texts, mcp_config=mcp_config)
    begin = partial(_resume, record=record, accepts_change=changed)
    raise typer.Exit(drive(settings, begin, mcp_config=mcp_config, as_json=as_json))


def answer_command(
    run: Run,
    values: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="The fields of the answer.")] = None,
    step: Annotated[str, typer.Option(help="The step whose question is meant, if there are several.")] = "",
    decline: Annotated[bool, typer.Option("--decline", help="Say no.")] = False,
    mcp_config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole run as JSON instead of its value.")] = False,
) -> None:
    """Answer the question of a run and go on with it; without fields it means yes."""
    record = _record(load_command_settings(), run)
    settings = _settings(record.text, record.texts, mcp_config=mcp_config)
    given = None if decline else dict(map(_name_and_text, values or []))
    begin = partial(_answer, record=record, given=given, step=step)
    raise typer.Exit(drive(settings, begin, mcp_config=mcp_config, as_json=as_json))


def stop_command(run: Run) -> None:
    """Stop a run: what runs of it is interrupted, and nothing more begins."""
    settings = _settings()
    record = _record(settings, run)

    async def stop() -> None:
        async with open_runtime(settings) as runtime:
            await workflows_of(runtime).stop(record.id, record.principal)

    asyncio.run(stop())
    print(f"run {record.id} is stopped", file=sys.stderr)


def list_command(as_json: AsJson = False) -> None:
    """List the latest runs of workflows, and the workflows that have names."""
    settings = load_command_settings()
    runs = _all_runs(settings)
    if as_json:
        fields = ("run", "name", "state", "step", "question", "reason", "started_at")
        print(json.dumps([{key: info.model_dump(mode="json")[key] for key in fields} for _, info in runs], indent=2))
        return
    names = _library(settings).names()
    if names:
        print(f"workflows: {', '.join(map(one_line, names))}", file=sys.stderr)
    if not runs:
        print("no runs yet", file=sys.stderr)
        return
    titles = ("run", "name", "state", "step", "started", "owner", "question, or why it ended")
    rows = [
        (info.run, info.name, info.state, info.step, info.started_at, owner, _summary(info)) for owner, info in runs
    ]
    print(table([titles, *rows]))


def show_command(run: Run, as_json: AsJson = False) -> None:
    """Show a run step by step: states, results, errors, and what it asks."""
    settings = load_command_settings()
    with open_archive(settings.data_directory) as archive:
        record = _find(archive.runs.of_anyone(run, 2), run)
        info = run_info(archive.runs, record, _state(settings, record), most=10_000)
    print(json.dumps(info.model_dump(mode="json"), indent=2) if as_json else _for_person(info))


def validate_command(source: Source, which: Which = "", mcp_config: Config = None) -> None:
    """Check a workflow, or all of a file; exits with 2 and tells file, line and reason of what is wrong."""
    settings = _settings(mcp_config=mcp_config)
    library = _library(settings)
    names = [which] if which or not _is_file(source) else library.names_in(Path(source)) or [""]
    definitions = [_read(library, source, name) for name in names]
    asyncio.run(_check(settings, definitions))
    for definition in definitions:
        print_notes(definition)
        count = len(definition.walk())
        print(f"{source} is in order: {definition.name}, {count} step{'' if count == 1 else 's'}")


def schema_command() -> None:
    """Print the JSON Schema of workflow texts, for editors."""
    print(json.dumps(json_schema(step_types(open_plugins(load_command_settings()))), indent=2))


def graph_command(
    source: Source, which: Which = "", svg: Annotated[bool, typer.Option("--svg", help="Print a picture.")] = False
) -> None:
    """Print the steps of a workflow as a Mermaid diagram."""
    definition = _read(_library(load_command_settings()), source, which)
    print(as_svg(definition) if svg else as_mermaid(definition))


# What the commands share


def _settings(*texts: str, mcp_config: str | None = None) -> Settings:
    """Return the settings for one run; sessions are made ready for forks where a text may have parallel steps."""
    settings = load_command_settings({"mcp_config": mcp_config})
    unset = {name: value for name, value in _SINGLE_RUN.items() if name not in settings.model_fields_set}
    if any(_FORKS.search(text) for text in texts):
        unset.pop("fork_start", None)
    return settings.model_copy(update={"keep_alive": False, **unset})


def _text(source: str) -> str:
    """Return the text of a file; of a workflow that has a name, one that may hold anything."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(source).read_text("utf-8")
    return "parallel"


def _library(settings: Settings) -> Library:
    folder = settings.workflows_directory
    return Library(Path(folder) if folder else None, step_types(open_plugins(settings)))


def _read(library: Library, source: str, which: str) -> Definition:
    return library.file(Path(source), which) if _is_file(source) else library.by_name(source)


def _is_file(source: str) -> bool:
    return bool(Path(source).suffix) or Path(source).exists() or "/" in source


async def _check(settings: Settings, definitions: list[Definition]) -> None:
    if any(isinstance(step.config, ToolCallStep) for each in definitions for step in _all_steps(each)):
        async with open_runtime(settings) as runtime:  # the tools are looked up at their servers
            for definition in definitions:
                await workflows_of(runtime).check(definition)
        return
    guard = configured_guardrails(settings).trial()
    for definition in definitions:
        await Checker(guard, settings.environment, max_code_bytes=settings.max_code_bytes).check(definition)


def _all_steps(definition: Definition) -> list[Any]:
    return [*definition.walk(), *(step for child in definition.children.values() for step in _all_steps(child))]


def _variable(text: str) -> tuple[str, Any]:
    name, value = _name_and_text(text)
    return name, typed_value({}, value)


def _name_and_text(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"{text[:100]!r} is no NAME=VALUE", hint="Write for example region=north or count=3")
    return name, value


def _state(settings: Settings, record: RunRecord) -> Any:
    is_driven = is_living(settings.data_directory / "runs", record.server)
    return "interrupted" if record.state == "running" and not is_driven else record.state


def _all_runs(settings: Settings) -> list[tuple[str, RunInfo]]:
    if not (settings.data_directory / "journal.sqlite").is_file():
        return []
    with open_archive(settings.data_directory) as archive:
        found = archive.runs.of_anyone("", 50)
        return [
            (record.principal, run_info(archive.runs, record, _state(settings, record), most=0)) for record in found
        ]


def _record(settings: Settings, run: str) -> RunRecord:
    with open_archive(settings.data_directory) as archive:
        return _find(archive.runs.of_anyone(run, 2), run)


def _find(records: Sequence[RunRecord], run: str) -> RunRecord:
    if len(records) > 1 and run:
        raise InvalidArgument(f"{run[:64]!r} begins the ids of several runs", hint="Give more of the id")
    if not records:
        raise RunNotFound(f"there is no run {run[:64]!r}", hint="belljar workflow list names the latest")
    return records[0]


def _latest_open(settings: Settings) -> RunRecord:
    with open_archive(settings.data_directory) as archive:
        for record in archive.runs.of_anyone("", 1_000):
            if record.state != "done":
                return record
    raise RunNotFound("there is no run to go on with", hint="belljar workflow list names the latest")


def _summary(info: RunInfo) -> str:
    return " ".join((info.question.message if info.question else info.reason).split())[:80]


def _for_person(info: RunInfo) -> str:
    lines = [line for line in run_text(info).split("\n") if not line.startswith(_FOR_MODELS)]
    if info.questions:
        lines.append(answer_hint(info))
    elif info.state in ("interrupted", "failed", "stopped"):
        lines.append(f"belljar workflow resume {info.run} goes on from there")
    return "\n".join(lines)


# How a command begins or goes on with a run


async def _start(runtime: Runtime, source: str, which: str, variables: dict[str, Any]) -> LiveRun:
    definition = _read(workflows_of(runtime).library, source, which)
    return await workflows_of(runtime).start(definition, LOCAL_PRINCIPAL, variables=variables, source=_place(source))


async def _resume(runtime: Runtime, record: RunRecord, accepts_change: bool) -> LiveRun:
    text = _text_now(workflows_of(runtime).library, record)
    return await workflows_of(runtime).resume(record.id, record.principal, text=text, accepts_change=accepts_change)


def _place(source: str) -> str:
    """Return where a text is found again: an absolute path, or a name."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


def _text_now(library: Library, record: RunRecord) -> Definition | None:
    """Return the workflow of a run as its source has it now; None if the source is gone."""
    if Path(record.source).is_file():
        return library.file(Path(record.source), record.name)
    return library.by_name(record.source) if record.source in library.names() else None


async def _answer(runtime: Runtime, record: RunRecord, given: dict[str, str] | None, step: str) -> LiveRun | None:
    answer = None if given is None else _typed(workflows_of(runtime).show(record.id, record.principal), given, step)
    return await workflows_of(runtime).answer(
        record.id,
        record.principal,
        answer,
        action="decline" if answer is None else "accept",
        step=step,
        by="belljar workflow answer",
        is_operator=True,
    )


def _typed(info: RunInfo, given: dict[str, str], step: str) -> dict[str, Any]:
    """Return the fields of an answer: text where the question wants text, so that 21 may be one; JSON elsewhere."""
    question = next((each for each in info.questions if not step or each.step == step), None)
    fields = fields_of(question.fields) if question is not None else {}
    return {name: typed_value(fields.get(name, {}), text) for name, text in given.items()}
