"""What the commands of `belljar toolbox` do: connect, ask, print, and leave nothing running.

They are the operator's own: no policy stands between, and questions of a server are put to whoever is at the terminal.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import mimetypes
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, cast

import typer

from belljar.cli.asking import ask_at_terminal
from belljar.cli.columns import columns
from belljar.cli.streams import log_to_stderr, one_line, write_output
from belljar.errors import InvalidArgument, SettingsError, UpstreamFailed
from belljar.files.removal import remove_tree
from belljar.settings import MEBIBYTE, Settings, load_settings
from belljar.toolbox.base import Answer, Block, Catalogue, ServerCatalogue
from belljar.toolbox.config import load_servers
from belljar.toolbox.connection import Limits
from belljar.toolbox.generating import generate
from belljar.toolbox.naming import names_of
from belljar.toolbox.search import Index
from belljar.toolbox.shapes import OwnedShapes, Shapes
from belljar.toolbox.showing import Detail, show
from belljar.toolbox.texts import first_sentence
from belljar.toolbox.upstreams import Connections, open_upstreams

_ABOUT_CHARACTERS = 80
CONNECT_S = 30.0
"""For which commands that look at every server wait for one that hangs."""
_STILL = "is still connecting"
_MARK = '"""Tools of other servers as functions'
P = ParamSpec("P")


def configured(mcp_config: str | None) -> Settings:
    """The settings, with the flag."""
    return load_settings({"mcp_config": mcp_config})


def run(
    work: Callable[Concatenate[Settings, P], Coroutine[Any, Any, int]],
    settings: Settings,
    *arguments: P.args,
    **options: P.kwargs,
) -> None:
    """Do it to its end; a status that is not 0 is the command's own."""
    level = logging.DEBUG if settings.log_level == "DEBUG" else logging.ERROR
    log_to_stderr(level)
    try:
        status = asyncio.run(work(settings, *arguments, **options))
    except UpstreamFailed as error:
        # Whoever is at the terminal is the operator.
        said = ". ".join(filter(None, (error.hint, one_line(error.detail))))
        raise UpstreamFailed(error.message, hint=said) from error
    except KeyboardInterrupt:
        status = 130
    if status:
        raise typer.Exit(status)


async def listed(settings: Settings, server: str, as_json: bool) -> int:
    """One line for each server, or for each tool of one."""
    async with _connected(settings) as upstreams:
        catalogue = await _catalogue(upstreams)
    if server and server not in catalogue.servers:
        raise InvalidArgument(f"there is no MCP server {server}", hint=f"There are: {', '.join(catalogue.servers)}")
    if as_json:
        print(json.dumps(_as_json(catalogue, server), indent=2))
    elif server:
        _print_tools(catalogue, server)
    else:
        rows = [
            (name, str(len(found.tools)), _fault(found) or first_sentence(found.instructions, _ABOUT_CHARACTERS))
            for name, found in catalogue.servers.items()
        ]
        print(columns([("server", "tools", "about"), *rows]))
    chosen = [catalogue.servers[server]] if server else catalogue.servers.values()
    return 1 if any(each.error for each in chosen) else 0


async def searched(settings: Settings, query: str, detail: Detail, limit: int, server: str) -> int:
    """The best first; status 1 when there is none."""
    async with _connected(settings) as upstreams:
        catalogue = await _catalogue(upstreams)
    _complain(catalogue)
    found = Index(catalogue).search(query, server=server, limit=limit)
    if found:
        print(show(found, detail, names_of(catalogue), _shapes(settings).shape))
    return 0 if found else 1


async def called(settings: Settings, server: str, tool: str, arguments: str, out: Path | None, as_json: bool) -> int:
    """What the tool answers, on stdout; its progress on stderr."""
    try:
        given: Any = json.loads(arguments)
    except ValueError as error:
        raise InvalidArgument(f"the arguments are not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidArgument("the arguments are not a JSON object", hint='Write {"name": "value"}')
    named = cast("dict[str, Any]", given)
    async with _connected(settings) as upstreams:
        answer = await upstreams.call(server, tool, named, on_progress=_say_progress, ask=ask_at_terminal)
    _print_answer(answer, out, as_json=as_json)
    return 1 if answer.is_error else 0


async def synced(settings: Settings, folder: Path) -> int:
    """The tree, in place of the one that was there."""
    _check_target(folder / "servers")
    async with _connected(settings) as upstreams:
        catalogue = await _catalogue(upstreams)
    _complain(catalogue)
    files = generate(catalogue, _shapes(settings).shape)
    await asyncio.to_thread(_write, files, folder)
    print(f"wrote {len(catalogue.tools())} tools of {len(catalogue.servers)} servers to {folder / 'servers'}")
    return 1 if any(each.error for each in catalogue.servers.values()) else 0


def _connected(settings: Settings) -> AbstractAsyncContextManager[Connections]:
    servers = load_servers(settings)
    if not servers:
        raise SettingsError(
            "no MCP servers are configured", hint="Name a file with --mcp-config, or set mcp_config in belljar.toml"
        )
    limits = Limits(
        start_s=settings.upstream_start_s,
        # Who calls one tool from a terminal waits for its server for as long as that may take.
        wait_s=2 * settings.upstream_start_s,
        silence_s=settings.upstream_silence_s,
        message_bytes=settings.upstream_message_mb * MEBIBYTE,
    )
    folder = settings.data_directory / "toolbox"
    return open_upstreams(servers, limits, folder / "eras.json" if folder.is_dir() else None)


async def _catalogue(upstreams: Connections) -> Catalogue:
    """What the servers offer; one that hangs is named as still connecting, with how long it has been."""
    catalogue = await upstreams.catalogue(CONNECT_S)
    found = {
        name: replace(each, error=f"{each.error[: -len(_STILL)]}{still}")
        if each.is_connecting and (still := upstreams.still_connecting(name))
        else each
        for name, each in catalogue.servers.items()
    }
    return Catalogue(found)


def _shapes(settings: Settings) -> Shapes:
    # Whoever has the machine; where callers are several people, their shapes are their own.
    return OwnedShapes(settings.data_directory / "toolbox" / "shapes", settings.only_owner).of("local")


def _complain(catalogue: Catalogue) -> None:
    for each in catalogue.servers.values():
        if each.error:
            print(f"warning: {one_line(_fault(each))}", file=sys.stderr)


def _fault(found: ServerCatalogue) -> str:
    """Why a server was not reached, with what only the operator is told."""
    return f"{found.error} ({found.detail})" if found.error and found.detail else found.error


def _print_tools(catalogue: Catalogue, server: str) -> None:
    found = catalogue.servers[server]
    _complain(Catalogue({server: found}))
    if found.tools:
        rows = [(tool.name, first_sentence(tool.description or tool.title, _ABOUT_CHARACTERS)) for tool in found.tools]
        print(columns([("tool", "about"), *rows]))


def _as_json(catalogue: Catalogue, server: str) -> list[dict[str, Any]]:
    return [
        {
            "server": name,
            "state": "connecting" if found.is_connecting else "unreachable" if found.error else "connected",
            "error": _fault(found),
            "tools": [
                {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
                for tool in found.tools
            ],
        }
        for name, found in catalogue.servers.items()
        if server in ("", name)
    ]


def _say_progress(progress: float, total: float | None, message: str) -> None:
    share = f"{progress:g}/{total:g}" if total else f"{progress:g}"
    print(f"{share} {one_line(message)}".rstrip(), file=sys.stderr, flush=True)


def _print_answer(answer: Answer, out: Path | None, *, as_json: bool) -> None:
    data = [(block, _saved(block, out, number)) for number, block in enumerate(answer.blocks)]
    if as_json:
        blocks = [
            {"kind": one.kind, "text": one.text, "mime": one.mime, "uri": one.uri, "name": one.name, "file": file}
            for one, file in data
        ]
        value = {"is_error": answer.is_error, "structured": answer.structured, "blocks": blocks}
        print(json.dumps(value, indent=2))
        return
    if answer.structured is not None and not answer.is_error:
        write_output(sys.stdout, json.dumps(answer.structured, indent=2, ensure_ascii=False) + "\n")
    for block, file in data:
        # Servers repeat a structured answer as text, for clients that do not know it.
        if block.kind != "text" or answer.structured is None or answer.is_error:
            write_output(sys.stderr if answer.is_error else sys.stdout, f"{file or _in_words(block)}\n")


def _in_words(block: Block) -> str:
    if block.text:
        return block.text
    if block.kind == "link":
        return one_line(f"{block.name}: {block.uri}")
    return one_line(f"[{block.kind} {block.mime} of {len(block.data):,} bytes; --out FOLDER keeps it]")


def _saved(block: Block, out: Path | None, number: int) -> str:
    """The file that a block's data went to; empty for none."""
    if out is None or not block.data:
        return ""
    suffix = mimetypes.guess_extension(block.mime) or ".bin"
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
    """A folder that is not such a tree is left alone."""
    root = target / "__init__.py"
    if target.exists() and not (root.is_file() and root.read_text("utf-8").startswith(_MARK)):
        raise InvalidArgument(f"{target} is there and was not written by belljar", hint="Name another folder")


def _write(files: dict[str, str], folder: Path) -> None:
    """Beside the old tree first, then in its place."""
    target, draft = folder / "servers", folder / ".servers.new"
    remove_tree(draft)
    for name, text in files.items():
        file = draft / Path(name).relative_to("servers")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    remove_tree(target)
    draft.rename(target)
