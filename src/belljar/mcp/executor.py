"""The `executor` surface: code is kept in files, and each run is a fresh sandboxed process in a chosen environment.

Its nine tools have the names and JSON answers that its clients expect. The operator chooses the environment by
variables. A path from a caller is never followed, because looking at an environment runs its interpreter outside the
sandbox: callers choose among what the operator has named and what conda's own tools list.
"""

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from belljar.environments import Environment, list_conda, open_entry, open_environment
from belljar.environments.installed_check import check_installed
from belljar.environments.installs import check_requirements
from belljar.environments.selection import find_entry
from belljar.errors import BelljarError, InvalidArgument, KernelDied, SettingsError, TooLarge
from belljar.http.auth import current_principal
from belljar.mcp.execution_wait import stopping_when_cancelled
from belljar.mcp.tools import (
    CHANGES,
    ENDS,
    READS,
    REPLACES,
    Answer,
    Ctx,
    add_tools,
    connection_of,
    idempotent,
    note_refusal,
    stage_reporter,
)
from belljar.outputs.events import Notice
from belljar.outputs.spoofed_notices import disarmed
from belljar.outputs.summary import TextBudget
from belljar.outputs.terminal_text import folded
from belljar.provisioning.program_process import ProgramEnd
from belljar.runtime import Runtime
from belljar.servers import shared_folder
from belljar.sessions.programs import ProgramRunner
from belljar.settings import EnvironmentEntry, Settings
from belljar.settings.keys import LOCAL_PRINCIPAL

Kind = Literal["conda", "venv", "venv-uv"]

# The field of each kind, in the variables and in the arguments of `configure_environment`.
_VARIABLES: dict[Kind, str] = {"conda": "CONDA_ENV_NAME", "venv": "VENV_PATH", "venv-uv": "UV_VENV_PATH"}
_KINDS: dict[str, Kind] = {"conda": "conda", "venv": "venv", "venv-uv": "venv-uv"}
_FIELDS: dict[Kind, str] = {"conda": "conda_name", "venv": "venv_path", "venv-uv": "uv_venv_path"}

P = ParamSpec("P")
Fields = dict[str, Any]
Code = Annotated[str, Field(description="Python")]
FileName = Annotated[str, Field(description="Name for the code file, without folders; a suffix is added")]
FilePath = Annotated[str, Field(description="file_path of an earlier answer")]
Packages = Annotated[list[str], Field(min_length=1, max_length=100, description="Such as pandas>=2, scikit-learn")]

EXECUTOR_INSTRUCTIONS = (
    "Runs Python files, each in a fresh sealed process: variables do not stay between runs, files in the working "
    "directory do. Build long programs with initialize_code_file and append_to_code_file."
)
MAX_CONNECTIONS = 1_000
_PLAIN = "is_plain"
"""Key in the fields of a failed program for which the settings want no `isError`; removed before the answer is sent."""


# The environment that code runs in


@dataclass(frozen=True, slots=True)
class Choice:
    """An environment by kind and place (a path or a conda name); without a kind, the one that sessions have."""

    kind: Kind | None = None
    place: str = ""

    def entry(self) -> EnvironmentEntry | None:
        """Return the choice as an entry of the settings; None for the environment that sessions have."""
        return EnvironmentEntry(kind=self.kind, path=self.place) if self.kind else None

    def fields(self, settings: Settings) -> dict[str, str]:
        """Return the choice as answers show it to callers."""
        if self.kind is None:
            return {"type": "default", "environment": settings.environment}
        return {"type": self.kind, _FIELDS[self.kind]: self.place}


def from_variables(variables: Mapping[str, str] = os.environ) -> Choice:
    """Return what the operator has chosen. Without ENV_TYPE, the variable that names a place also says its kind."""
    named: dict[Kind, str] = {kind: variables[name] for kind, name in _VARIABLES.items() if variables.get(name)}
    kind_name = variables.get("ENV_TYPE", "")
    if not kind_name:
        return next((Choice(kind, place) for kind, place in named.items()), Choice())
    kind = _KINDS.get(kind_name)
    if kind is None:
        raise SettingsError(f"ENV_TYPE = {kind_name!r}", hint=f"ENV_TYPE takes {', '.join(_VARIABLES)}")
    if kind not in named:
        raise SettingsError(f"ENV_TYPE is {kind}, but {_VARIABLES[kind]} is not set", hint=f"Set {_VARIABLES[kind]}")
    return Choice(kind, named[kind])


def requested_choice(settings: Settings, kind: Kind, places: Mapping[str, str], operators: Choice) -> Choice:
    """Return what a caller asks for, if the operator has it; blocks while conda's tools run."""
    place = places.get(_FIELDS[kind], "")
    if not place:
        raise InvalidArgument(f"type {kind} needs {_FIELDS[kind]}", hint=f"Pass {_FIELDS[kind]}")
    known = _known(settings, kind, operators)
    for candidate in known:
        if _same(candidate, place, kind):
            return Choice(kind, candidate)
    table = f'[environments.NAME] with kind = "{kind}" and path = "…"'
    listed = f"; known here: {', '.join(known[:20])}" if known else ""
    raise InvalidArgument(
        f"{_FIELDS[kind]} {place[:200]!r} is no environment that this server may use{listed}",
        hint=f"The operator can add it to belljar.toml: {table}",
    )


def _known(settings: Settings, kind: Kind, operators: Choice) -> list[str]:
    # A virtual environment is one whoever made it: what is known as `venv` may be asked for as `venv-uv`, too.
    kinds: tuple[Kind, ...] = ("conda",) if kind == "conda" else ("venv", "venv-uv")
    places = [operators.place] if operators.kind in kinds else []
    places += [variable for each in kinds if (variable := os.environ.get(_VARIABLES[each], ""))]
    places += [entry.path for entry in settings.environments.values() if entry.kind in kinds and entry.path]
    if kind == "conda":
        places += [place.name for place in list_conda()]
    return list(dict.fromkeys(places))


def _same(known: str, place: str, kind: Kind) -> bool:
    if kind == "conda" and "/" not in known:
        return known == place
    return Path(known).expanduser().absolute() == Path(place).expanduser().absolute()


# The tools


def answered(tool: Callable[P, Coroutine[Any, Any, Fields]]) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """Wrap a tool: its fields are sent as the JSON that clients of this surface parse, and so are our own refusals."""

    @wraps(tool)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return _in_json(await tool(*args, **kwargs))
        except BelljarError as error:
            note_refusal(error)
            return refusal_as_json(error)

    return answer


def refusal_as_json(error: BelljarError) -> CallToolResult:
    """Return a refusal in the form of every other answer."""
    return _in_json({"status": "error", "error": f"{error.code}: {error}"})


def _in_json(fields: Fields) -> CallToolResult:
    is_plain = fields.pop(_PLAIN, False)
    return CallToolResult(
        content=[TextContent(type="text", text=json.dumps(fields, ensure_ascii=False))],
        structured_content=fields,
        is_error=fields["status"] == "error" and not is_plain,
    )


class ExecutorSurface:
    """The tools over one runtime. The constructor checks the environment that the operator's variables name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._operators = from_variables()
        if (entry := self._operators.entry()) is not None:
            find_entry(entry)
        given = os.environ.get("CODE_STORAGE_DIR", "")
        self._folder = shared_folder(self._settings.data_directory)
        self._storage = Path(given).expanduser().resolve() if given else self._folder / "code"
        self._chosen: dict[tuple[str, str], Choice] = {}
        self._runners: dict[str, ProgramRunner] = {}
        self._opened: dict[Choice, Environment] = {}
        self._saving: set[asyncio.Task[None]] = set()

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(
            server,
            (self.execute_code, ENDS),
            (self.initialize_code_file, CHANGES),
            (self.append_to_code_file, CHANGES),
            (self.execute_code_file, ENDS),
            (self.read_code_file, READS),
            (self.install_dependencies, REPLACES),
            (self.check_installed_packages, READS),
            (self.configure_environment, idempotent(CHANGES)),
            (self.get_environment_config, READS),
        )

    # Code

    @answered
    async def execute_code(self, ctx: Ctx, code: Code, filename: FileName = "") -> Fields:
        """Run Python in a fresh process of the configured environment. The code is kept in a file."""
        runner, name = await self._write(ctx, code, filename)
        return {**await self._run(ctx, runner, name), "generated_filename": name}

    @answered
    async def initialize_code_file(self, ctx: Ctx, content: Code, filename: FileName = "") -> Fields:
        """Start a code file that append_to_code_file goes on with; nothing runs yet."""
        runner, name = await self._write(ctx, content, filename)
        message = f"{name} is there. Go on with append_to_code_file, then run it with execute_code_file."
        return {"status": "success", "message": message, "file_path": runner.storage.path(name), "filename": name}

    @answered
    async def append_to_code_file(self, ctx: Ctx, file_path: FilePath, content: Code) -> Fields:
        """Add code at the end of a code file."""
        runner = await self._open_runner()
        name = runner.storage.name_of(file_path)
        self._check_size(content)
        async with runner.room_for(await self._environment(ctx), len(content)):
            await asyncio.to_thread(runner.storage.append, name, content)
        return {"status": "success", "message": f"{name} goes on.", "file_path": runner.storage.path(name)}

    @answered
    async def execute_code_file(self, ctx: Ctx, file_path: FilePath) -> Fields:
        """Run a code file in a fresh process of the configured environment."""
        runner = await self._open_runner()
        name = runner.storage.name_of(file_path)
        return await self._run(ctx, runner, name)

    @answered
    async def read_code_file(self, file_path: FilePath) -> Fields:
        """The text of a code file."""
        runner = self._runner()
        name = runner.storage.name_of(file_path)
        content = await asyncio.to_thread(runner.storage.read, name, self._settings.max_code_bytes)
        return {"status": "success", "content": content, "file_path": runner.storage.path(name)}

    # Packages

    @answered
    async def install_dependencies(self, ctx: Ctx, packages: Packages) -> Fields:
        """Install packages for your code, beside the environment."""
        check_requirements(packages)
        runner, environment = await self._open_runner(), await self._environment(ctx)
        outcomes = await runner.install(environment, packages, stage_reporter(ctx))
        failed = [f"{outcome.name}: {outcome.error}" for outcome in outcomes if outcome.error]
        there = [f"{outcome.name}=={outcome.installed_version}" for outcome in outcomes if not outcome.error]
        notes = [f"{outcome.name}: a wheel; {outcome.note}" for outcome in outcomes if outcome.note]
        fields: Fields = {
            "status": "error" if failed else "success",
            "env_type": self._choice(ctx).fields(self._settings)["type"],
            "installed_packages": there,
            "output": "\n".join([*there, *notes, *failed]),
        }
        sources: Fields = {outcome.name: outcome.source for outcome in outcomes if outcome.source}
        fields |= {"sources": sources} if sources else {}
        return {**fields, "error": "\n".join(failed)} if failed else fields

    @answered
    async def check_installed_packages(self, ctx: Ctx, packages: Packages) -> Fields:
        """Which packages there are, by distribution or import name or with a version; imports nothing."""
        runner, environment = self._runner(), await self._environment(ctx)
        layer = runner.layer(environment)
        found = await asyncio.to_thread(check_installed, environment, layer if layer.is_dir() else None, packages)
        missing = [status.name for status in found if not status.installed]
        return {
            "status": "success",
            "env_type": self._choice(ctx).fields(self._settings)["type"],
            "all_installed": not missing,
            "not_installed": missing,
            "package_details": {
                each.name: {"installed": each.installed, "version": each.version, "location": each.location}
                for each in found
            },
        }

    # Environment

    @answered
    async def configure_environment(
        self,
        ctx: Ctx,
        type: Kind,  # noqa: A002 - the name that clients send
        conda_name: str = "",
        venv_path: str = "",
        uv_venv_path: str = "",
    ) -> Fields:
        """Choose another environment, among those the operator has, for the rest of this connection."""
        places = {"conda_name": conda_name, "venv_path": venv_path, "uv_venv_path": uv_venv_path}
        choice = await asyncio.to_thread(requested_choice, self._settings, type, places, self._operators)
        previous = self._choice(ctx)
        await self._open(choice)
        self._chosen[connection_of(ctx)] = choice
        while len(self._chosen) > MAX_CONNECTIONS:
            del self._chosen[next(iter(self._chosen))]
        return {
            "status": "success",
            "message": f"Code runs in {choice.kind} {choice.place} from now on.",
            "previous": previous.fields(self._settings),
            "current": choice.fields(self._settings),
        }

    @answered
    async def get_environment_config(self, ctx: Ctx) -> Fields:
        """Which environment code runs in, and where code files are."""
        environment, runner = await self._environment(ctx), self._runner()
        details = {"python": environment.version, "code_storage_dir": str(runner.storage.folder)}
        return {"status": "success", "config": {**self._choice(ctx).fields(self._settings), **details}}

    # Steps the tools share

    async def _write(self, ctx: Ctx, code: str, filename: str) -> tuple[ProgramRunner, str]:
        runner = await self._open_runner()
        self._check_size(code)
        name = runner.storage.new_name(filename)
        async with runner.room_for(await self._environment(ctx), len(code)):
            await asyncio.to_thread(runner.storage.create, name, code)
        return runner, name

    def _check_size(self, code: str) -> None:
        size, most = len(code.encode(errors="replace")), self._settings.max_code_bytes
        if size > most:
            raise TooLarge(
                f"the code has {size:,} bytes, max_code_bytes is {most:,}",
                hint="Send it in parts, with append_to_code_file",
            )

    async def _run(self, ctx: Ctx, runner: ProgramRunner, name: str) -> Fields:
        environment = await self._environment(ctx)
        running = asyncio.get_running_loop().create_task(runner.run(environment, name))
        ended: list[str] = []

        def stop(asked: str) -> None:
            ended.append(asked)
            running.cancel()

        try:
            async with stopping_when_cancelled(ctx, self._settings.interrupt_on, stop):
                end = await asyncio.shield(running)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if ended and task is not None and not task.cancelling():
                raise KernelDied(f"the program was ended {ended[0]}") from None
            if not ended:
                # The client went away and the program goes on: save its output beside the code, to be found there.
                self._save_output_later(runner, name, running)
            raise
        fields = _result_fields(end, self._settings.output_budget_chars, self._settings.execution_timeout_s)
        if "truncated" in fields:
            fields["full_output"] = await _save_output(runner, name, end)
        return {**fields, "file_path": runner.storage.path(name), _PLAIN: not self._settings.failures_are_errors}

    def _save_output_later(self, runner: ProgramRunner, name: str, running: "asyncio.Task[ProgramEnd]") -> None:
        async def save() -> None:
            with suppress(BelljarError):
                await _save_output(runner, name, await running)

        saving = asyncio.get_running_loop().create_task(save())
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)

    async def _open_runner(self) -> ProgramRunner:
        """Return the caller's runner with its folders made, for calls that write or run something."""
        runner = self._runner()
        await runner.open()
        return runner

    def _runner(self) -> ProgramRunner:
        principal = current_principal()
        if principal not in self._runners:
            key = hashlib.sha256(principal.encode()).hexdigest()[:16]
            storage = self._storage if principal == LOCAL_PRINCIPAL else self._storage / key
            root = self._folder / "executor" / key
            self._runners[principal] = ProgramRunner(
                self._runtime.starter, self._runtime.sessions, principal, storage, root
            )
        return self._runners[principal]

    def _choice(self, ctx: Ctx) -> Choice:
        return self._chosen.get(connection_of(ctx), self._operators)

    async def _environment(self, ctx: Ctx) -> Environment:
        return await self._open(self._choice(ctx))

    async def _open(self, choice: Choice) -> Environment:
        entry = choice.entry()
        if entry is None:
            return await open_environment(self._settings)
        if choice not in self._opened:
            self._opened[choice] = await open_entry(self._settings, choice.place, entry)
        return self._opened[choice]


def _result_fields(end: ProgramEnd, budget: int, timeout_s: float) -> Fields:
    """Return the answer's fields. Only the exit status says whether the program failed: stderr may have warnings."""
    reason = _reason(end, timeout_s)
    shown_out, shown_err = folded(end.stdout), folded(end.stderr)
    fields: Fields = {"status": "error" if reason else "success", "output": _within(shown_out, budget)}
    # This tool's clients know no notices: they come before what the program wrote to stderr.
    notices = "".join(Notice(text).line for text in end.notices)
    stderr = f"{notices}{_within(shown_err, budget)}"
    if reason:
        fields["error"] = "\n".join(part for part in (stderr.strip(), reason) if part)
    elif stderr:
        fields["stderr"] = stderr
    total = len(shown_out) + len(shown_err)
    if len(shown_out) > budget or len(shown_err) > budget or end.dropped_bytes:
        fields["truncated"] = {"shown_chars": min(total, 2 * budget), "total_chars": total + end.dropped_bytes}
    return fields


def _within(text: str, budget: int) -> str:
    """Return what a program wrote, within the budget; what imitates a notice is marked."""
    shown = TextBudget(budget)
    shown.add("stdout", text)
    return "".join(part if kind == "notice" else disarmed(part) for kind, part in shown.segments())


def _reason(end: ProgramEnd, timeout_s: float) -> str:
    hit = "".join(f"; {incident.kind}: it {incident.detail}" for incident in end.incidents)
    if end.is_timeout:
        return f"timeout: the program was ended after {timeout_s:g} s{hit}"
    if end.status < 0:
        return f"the program was ended by {signal.Signals(-end.status).name}{hit}"
    return f"the program ended with exit status {end.status}{hit}" if end.status else ""


async def _save_output(runner: ProgramRunner, name: str, end: ProgramEnd) -> str:
    """Save all of a program's output, and return its path or why it could not be saved.

    The program has run, so output that cannot be saved is no reason to answer with an error.
    """
    kept = f"{name.removesuffix('.py')}.output.txt"
    stderr = "".join(Notice(text).line for text in end.notices) + disarmed(end.stderr)
    text = disarmed(end.stdout) + (f"\n--- stderr ---\n{stderr}" if stderr else "")
    try:
        await asyncio.to_thread(runner.storage.write, kept, text)
    except BelljarError as error:
        return f"not kept: {error}"
    return runner.storage.path(kept)
