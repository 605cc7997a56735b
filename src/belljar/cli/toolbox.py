"""`belljar toolbox`: try the MCP servers that sessions can call from the command line.

The caller is the operator, so no policy is applied, and a server's questions are put to the person at the terminal.
Every command disconnects from the servers before it returns.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, cast

import typer

from belljar.cli.streams import log_to_stderr, one_line, table, write_output
from belljar.cli.terminal import INTERRUPTED, StandardInput
from belljar.errors import InvalidArgument, SettingsError, UpstreamFailed
from belljar.files.fd_walk import remove_tree
from belljar.outputs.forms import extension_of
from belljar.questions.models import Question, QuestionReply
from belljar.questions.schema import YES, fields_of, typed_value
from belljar.settings import Settings, load_command_settings
from belljar.settings.keys import LOCAL_PRINCIPAL
from belljar.toolbox.base import Block, Catalogue, ServerCatalogue, ToolAnswer
from belljar.toolbox.code_generation import Detail, generate, show
from belljar.toolbox.connection import upstream_limits
from belljar.toolbox.learned_shapes import OwnedShapes, Shapes
from belljar.toolbox.names import names_of
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.server_config import load_servers
from belljar.toolbox.server_text import first_sentence
from belljar.toolbox.toolbox import INSIDE
from belljar.toolbox.upstreams import UpstreamConnections, open_upstreams

_ABOUT_CHARACTERS = 80
# How long commands that read every server wait for one that hangs.
_CONNECT_S = 30.0
_STILL = "is still connecting"
# How the root files of what `sync` writes begin.
_GENERATED_PREFIX = '"""Tools of other servers'
_WRITTEN = ("servers", "toolbox")
P = ParamSpec("P")

Config = Annotated[str | None, typer.Option("--mcp-config", help="File that lists the servers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_command(
    server: Annotated[str, typer.Argument(help="One server's tools; all servers without it.", show_default=False)] = "",
    mcp_config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Connect to the servers and list them, or the tools of one."""
    _run(_list_tools, _settings(mcp_config), server, as_json)


def search_command(
    query: Annotated[str, typer.Argument(help="What the tool should do, in words.")],
    detail: Annotated[Literal["names", "signatures", "source"], typer.Option(help="How much of each.")] = "signatures",
    limit: Annotated[int, typer.Option(help="How many at most.", min=1, max=50)] = 8,
    server: Annotated[str, typer.Option(help="Look through one server only.")] = "",
    mcp_config: Config = None,
) -> None:
    """Find tools, as search_tools does for a model."""
    _run(_search, _settings(mcp_config), query, detail, limit, server)


def call_command(
    server: Annotated[str, typer.Argument(help="The server.")],
    tool: Annotated[str, typer.Argument(help="The tool, by its own name.")],
    arguments: Annotated[str, typer.Argument(help="Its arguments as a JSON object.")] = "{}",
    out: Annotated[Path | None, typer.Option(help="Folder for images and other data.", show_default=False)] = None,
    mcp_config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Call one tool and print what it answers; exits with 1 when the tool reports an error."""
    _run(_call, _settings(mcp_config), server, tool, arguments, out, as_json)


def sync_command(
    folder: Annotated[Path, typer.Argument(help="Where to write servers/ and toolbox/.")] = Path(),
    mcp_config: Config = None,
) -> None:
    """Write the tools as Python, as sessions see them, into the folder servers.

    Beside it, the folder toolbox has what it imports, for editors and type checkers. Calls work in sessions only.
    """
    _run(_sync, _settings(mcp_config), folder)


def _settings(mcp_config: str | None) -> Settings:
    return load_command_settings({"mcp_config": mcp_config})


def _run(
    work: Callable[Concatenate[Settings, P], Coroutine[Any, Any, int]],
    settings: Settings,
    *arguments: P.args,
    **options: P.kwargs,
) -> None:
    """Run the coroutine of a command, and exit with the status that it returns."""
    level = logging.DEBUG if settings.log_level == "DEBUG" else logging.ERROR
    log_to_stderr(level)
    try:
        status = asyncio.run(work(settings, *arguments, **options))
    except UpstreamFailed as error:
        # The person at the terminal is the operator, so the hint may include details that models do not get.
        hint = ". ".join(filter(None, (error.hint, one_line(error.detail))))
        raise UpstreamFailed(error.message, hint=hint) from error
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status:
        raise typer.Exit(status)


async def _list_tools(settings: Settings, server: str, as_json: bool) -> int:
    """Print a line for each server, or for each tool of one; return 1 if a server was not reached."""
    async with _connect(settings) as upstreams:
        catalogue = await _catalogue(upstreams)
    if server and server not in catalogue.servers:
        raise InvalidArgument(f"there is no MCP server {server}", hint=f"There are: {', '.join(catalogue.servers)}")
    if as_json:
        print(json.dumps(_as_json(catalogue, server), indent=2))
    elif server:
        _print_tools(catalogue, server)
    else:
        rows = [
            (name, str(len(found.tools)), _failure(found) or first_sentence(found.instructions, _ABOUT_CHARACTERS))
            for name, found in catalogue.servers.items()
        ]
        print(table([("server", "tools", "about"), *rows]))
    chosen = [catalogue.servers[server]] if server else catalogue.servers.values()
    return 1 if any(each.error for each in chosen) else 0


async def _search(settings: Settings, query: str, detail: Detail, limit: int, server: str) -> int:
    """Print the tools that were found, the best first; return 1 if there is none."""
    async with _connect(settings) as upstreams:
        catalogue = await _catalogue(upstreams)
    _print_warnings(catalogue)
    found = ToolIndex(catalogue).search(query, server=server, limit=limit)
    if found:
        print(show(found, detail, names_of(catalogue), _shapes(settings).shape))
    return 0 if found else 1


async def _call(settings: Settings, server: str, tool: str, arguments: str, out: Path | None, as_json: bool) -> int:
    """Print the tool's answer to stdout and its progress to stderr; return 1 if the tool reports an error."""
    try:
        given: Any = json.loads(arguments)
    except ValueError as error:
        raise InvalidArgument(f"the arguments are not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidArgument("the arguments are not a JSON object", hint='Write {"name": "value"}')
    named = cast("dict[str, Any]", given)
    async with _connect(settings) as upstreams:
        answer = await upstreams.call(server, tool, named, on_progress=_print_progress, ask=_ask_at_terminal)
    _print_answer(answer, out, as_json=as_json)
    return 1 if answer.is_error else 0


async def _sync(settings: Settings, folder: Path) -> int:
    """Replace the generated tree by a new one; return 1 if a server was not reached."""
    for name in _WRITTEN:
        _check_target(folder / name)
    async with _connect(settings) as upstreams:
        catalogue = await _catalogue(upstreams)
    _print_warnings(catalogue)
    files = generate(catalogue, _shapes(settings).shape) | _runtime_files()
    await asyncio.to_thread(_write, files, folder)
    print(f"wrote {len(catalogue.tools())} tools of {len(catalogue.servers)} servers to {folder / 'servers'}")
    return 1 if any(each.error for each in catalogue.servers.values()) else 0


def _connect(settings: Settings) -> AbstractAsyncContextManager[UpstreamConnections]:
    servers = load_servers(settings)
    if not servers:
        raise SettingsError(
            "no MCP servers are configured", hint="Name a file with --mcp-config, or set mcp_config in belljar.toml"
        )
    # Twice the time to start, because a person who calls one tool waits for its server.
    limits = replace(upstream_limits(settings), wait_s=2 * settings.upstream_start_s)
    folder = settings.data_directory / "toolbox"
    return open_upstreams(servers, limits, folder / "eras.json" if folder.is_dir() else None)


async def _catalogue(upstreams: UpstreamConnections) -> Catalogue:
    """Return what the servers offer; the error of one that hangs says for how long it has been connecting."""
    catalogue = await upstreams.catalogue(_CONNECT_S)
    found = {
        name: replace(each, error=f"{each.error[: -len(_STILL)]}{still}")
        if each.is_connecting and (still := upstreams.still_connecting(name))
        else each
        for name, each in catalogue.servers.items()
    }
    return Catalogue(found)


def _shapes(settings: Settings) -> Shapes:
    # The shapes of the local caller; where a server has several callers, each has shapes of their own.
    return OwnedShapes(settings.data_directory / "toolbox" / "shapes", settings.only_owner).of(LOCAL_PRINCIPAL)


def _print_warnings(catalogue: Catalogue) -> None:
    for each in catalogue.servers.values():
        if each.error:
            print(f"warning: {one_line(_failure(each))}", file=sys.stderr)


def _failure(found: ServerCatalogue) -> str:
    """Return why a server was not reached, with the detail that only the operator may read."""
    return f"{found.error} ({found.detail})" if found.error and found.detail else found.error


def _print_tools(catalogue: Catalogue, server: str) -> None:
    found = catalogue.servers[server]
    _print_warnings(Catalogue({server: found}))
    if found.tools:
        rows = [(tool.name, first_sentence(tool.description or tool.title, _ABOUT_CHARACTERS)) for tool in found.tools]
        print(table([("tool", "about"), *rows]))


def _as_json(catalogue: Catalogue, server: str) -> list[dict[str, Any]]:
    return [
        {
            "server": name,
            "state": "connecting" if found.is_connecting else "unreachable" if found.error else "connected",
            "error": _failure(found),
            "tools": [
                {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
                for tool in found.tools
            ],
        }
        for name, found in catalogue.servers.items()
        if server in ("", name)
    ]


def _print_progress(progress: float, total: float | None, message: str) -> None:
    share = f"{progress:g}/{total:g}" if total else f"{progress:g}"
    print(f"{share} {one_line(message)}".rstrip(), file=sys.stderr, flush=True)


def _print_answer(answer: ToolAnswer, out: Path | None, *, as_json: bool) -> None:
    saved = [(block, _save(block, out, number)) for number, block in enumerate(answer.blocks)]
    if as_json:
        blocks = [
            {"kind": one.kind, "text": one.text, "mime": one.mime, "uri": one.uri, "name": one.name, "file": file}
            for one, file in saved
        ]
        value = {"is_error": answer.is_error, "structured": answer.structured, "blocks": blocks}
        print(json.dumps(value, indent=2))
        return
    if answer.structured is not None and not answer.is_error:
        write_output(sys.stdout, json.dumps(answer.structured, indent=2, ensure_ascii=False) + "\n")
    for block, file in saved:
        # Skip the text of a structured answer, because servers repeat the answer there for clients without structure.
        if block.kind != "text" or answer.structured is None or answer.is_error:
            write_output(sys.stderr if answer.is_error else sys.stdout, f"{file or _description(block)}\n")


def _description(block: Block) -> str:
    if block.text:
        return block.text
    if block.kind == "link":
        return one_line(f"{block.name}: {block.uri}")
    return one_line(f"[{block.kind} {block.mime} of {len(block.data):,} bytes; --out FOLDER keeps it]")


def _save(block: Block, out: Path | None, number: int) -> str:
    """Save the data of a block and return its file; return an empty string if nothing is saved."""
    if out is None or not block.data:
        return ""
    suffix = extension_of(block.mime)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for place in itertools.count(number):
            with contextlib.suppress(FileExistsError), (out / f"{block.kind}-{place}{suffix}").open("xb") as file:
                file.write(block.data)
                return file.name
    except OSError as error:
        raise InvalidArgument(f"{out} cannot be written: {error.strerror}", hint="Name another folder") from error
    return ""


def _check_target(target: Path) -> None:
    """Refuse to replace a folder that is no generated tree."""
    root = target / "__init__.py"
    if target.exists() and not (root.is_file() and root.read_text("utf-8").startswith(_GENERATED_PREFIX)):
        raise InvalidArgument(f"{target} is there and was not written by belljar", hint="Name another folder")


def _write(files: dict[str, str], folder: Path) -> None:
    """Write the new folders beside the old ones, then replace the old ones."""
    draft = folder / ".servers.new"
    remove_tree(draft)
    for name, text in files.items():
        file = draft / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    for name in _WRITTEN:
        remove_tree(folder / name)
        (draft / name).rename(folder / name)
    remove_tree(draft)


def _runtime_files() -> dict[str, str]:
    """Return the package that generated code imports."""
    files = [*(INSIDE / "toolbox").glob("*.py"), *(INSIDE / "toolbox").glob("*.pyi")]
    return {f"toolbox/{file.name}": file.read_text("utf-8") for file in files}


async def _ask_at_terminal(question: Question) -> QuestionReply:
    """Ask for each field on stderr and read it from stdin; an empty line skips a field, the end of input cancels."""
    if not os.isatty(0):
        print(f"The server asks: {one_line(question.message)} (nobody is at the terminal)", file=sys.stderr)
        return QuestionReply("cancel")
    lines = StandardInput()
    await _print_prompt(f"The server asks: {one_line(question.message)}")
    if question.url:
        await _print_prompt(f"Open {one_line(question.url)}")
    fields = fields_of(question.schema)
    if not fields:
        return QuestionReply("accept" if (await _answer(lines, "Go on? [y/n]") or "").lower() in YES else "decline")
    values: dict[str, Any] = {}
    for name, schema in fields.items():
        asked = f"{schema.get('title') or name} ({schema.get('type', 'text')}):"
        text = await _answer(lines, one_line(asked))
        if text is None:
            return QuestionReply("cancel")
        if text:
            values[name] = typed_value(schema, text)
    return QuestionReply("accept", values)


async def _answer(lines: StandardInput, prompt: str) -> str | None:
    await _print_prompt(prompt, end=" ")
    return await lines.answer(prompt)


async def _print_prompt(text: str, end: str = "\n") -> None:
    await asyncio.to_thread(print, text, end=end, file=sys.stderr, flush=True)
