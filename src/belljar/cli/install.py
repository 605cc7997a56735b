"""`belljar install`: tell an MCP client how to start or reach belljar, by printing an entry or writing it to its file.

Of a client's file everything else stays as it was, comments included. A file that cannot be changed without a loss is
refused before anything is changed.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import platformdirs
import typer

from belljar.cli.clients import CLIENTS, Client, ServerEntry
from belljar.cli.config_text import UnreadableConfig, find_entry, merged, parse, render, with_entry
from belljar.cli.engines import container_command
from belljar.distribution import DISTRIBUTION
from belljar.errors import UsageError
from belljar.settings.kinds import checked_image

_URL_KEYS = {"url", "httpUrl", "serverUrl", "uri"}
_TOOL_HINT = f"Install it first: uv tool install {DISTRIBUTION}, or pipx install {DISTRIBUTION}; then run this again"


def command(
    client_name: Annotated[
        str,
        typer.Argument(
            metavar="CLIENT", help=f"The client to set up: {', '.join(CLIENTS)}.", autocompletion=lambda: [*CLIENTS]
        ),
    ],
    serve_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENT", help="Passed on to `belljar serve`.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write it into the client's file.")] = False,
    name: Annotated[str, typer.Option(help="What the client calls the server.")] = "belljar",
    path: Annotated[Path | None, typer.Option(help="The client's file, where it is not the usual one.")] = None,
    url: Annotated[
        str, typer.Option(help="Reach a server that runs already, such as http://127.0.0.1:8000/mcp; starts none.")
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME: VALUE", help="With --url: a header of every request, such as Authorization: Bearer KEY."
        ),
    ] = None,
    docker: Annotated[
        bool, typer.Option("--docker", help="Start it in a container of docker or podman instead of here.")
    ] = False,
    image: Annotated[str, typer.Option(help="The image that --docker starts.")] = "belljar:latest",
) -> None:
    """Tell an MCP client how to start belljar.

    Prints the entry for the client's configuration file, in that file's format; with --write, puts it there and keeps
    what else is in the file, comments included. With --url it names a server that runs already.
    """
    if client_name not in CLIENTS:
        raise UsageError(f"client {client_name!r} is not known", hint=f"Use one of {', '.join(CLIENTS)}")
    client = CLIENTS[client_name]
    target = (path or client.path()).expanduser().absolute()
    if url:
        if docker or serve_arguments:
            raise UsageError("--url names a server that runs already", hint="Leave out --docker and what is after --")
        entry = address_entry(client, url, header or [])
    elif header:
        raise UsageError("--header is for a server at a URL", hint="Add --url, or leave it out")
    elif docker:
        entry = client.process(container_command(checked_image(image), serve_arguments or [], has_profile=write))
    else:
        entry = client.process([*launch_command(), "serve", *(serve_arguments or [])])
    if client.repeats_name:
        entry["name"] = name
    if write:
        _write(client, target, name, entry)
        return
    _print_snippet(client, name, entry)
    _note(f"This belongs in {target}; --write puts it there.")


def _write(client: Client, target: Path, name: str, entry: ServerEntry) -> None:
    try:
        backup = add_server(client, target, name, entry)
    except UsageError as refusal:
        _print_snippet(client, name, entry)
        raise UsageError(
            f"{refusal.message}; it was not touched",
            hint=f"Add the {client.form.upper()} above by hand, or choose another --name or --path",
        ) from refusal
    _note(f"{client.title}: {target} has {name} now." + (f" Backup: {backup}" if backup else ""))
    _note(f"{client.then}.")


def _print_snippet(client: Client, name: str, entry: ServerEntry) -> None:
    print(render(client.form, merged({}, client.place(name, {}), entry)), end="", flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What the client is told


def address_entry(client: Client, url: str, headers: Sequence[str]) -> ServerEntry:
    """Return the entry with which the client reaches a server at a URL."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise UsageError(f"{url} is no URL", hint="Give one such as http://127.0.0.1:8000/mcp")
    if client.address is None:
        raise UsageError(
            f"{client.title} has no servers by URL in its file",
            hint="Add it in its settings under Connectors, or leave out --url to let it start belljar itself",
        )
    pairs = [each.partition(":") for each in headers]
    if wrong := next((each for each, (key, colon, _) in zip(headers, pairs, strict=True) if not (key and colon)), ""):
        raise UsageError(f"{wrong!r} is no header", hint="Write it as NAME: VALUE")
    return client.address(url, {key.strip(): value.strip() for key, _, value in pairs})


def launch_command() -> list[str]:
    """Return a command that works in any folder and with any PATH, because a desktop gives its programs a short one.

    An interpreter in a cache, where `uvx` and `pipx run` put it, may be gone tomorrow: then it is the command that
    would bring it back.
    """
    interpreter = Path(sys.executable).absolute()
    if _is_in_cache(interpreter):
        return _uvx_command()
    script = interpreter.with_name("belljar.exe" if os.name == "nt" else "belljar")
    return [str(script)] if os.access(script, os.X_OK) else [str(interpreter), "-P", "-m", "belljar"]


def _is_in_cache(path: Path) -> bool:
    """Tell whether a tool that cleans up after itself put the path there."""
    caches = [
        Path(os.environ.get("UV_CACHE_DIR") or platformdirs.user_cache_path("uv", appauthor=False)),
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"),
        platformdirs.user_cache_path(),
        Path(os.environ.get("PIPX_HOME") or platformdirs.user_data_path("pipx", appauthor=False)) / ".cache",
    ]
    # uv's folders of environments, wherever its cache is.
    is_uvs = any(part.startswith(("archive-v", "environments-v", "builds-v")) for part in path.parts)
    return is_uvs or any(path.is_relative_to(cache.absolute()) for cache in caches)


def _uvx_command() -> list[str]:
    """Return the command that runs belljar from uv's cache, and fetches it again if need be."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    # uvx puts the folder of our own interpreter on the PATH, which is in the cache and has uv, too.
    lasting = os.pathsep.join(folder for folder in folders if folder and not _is_in_cache(Path(folder).absolute()))
    source = _source()
    if uvx := shutil.which("uvx", path=lasting):
        return [uvx, *source, DISTRIBUTION]
    if uv := shutil.which("uv", path=lasting):
        return [uv, "tool", "run", *source, DISTRIBUTION]
    raise UsageError(f"{sys.executable} is in a cache and may be gone tomorrow", hint=_TOOL_HINT)


def _source() -> list[str]:
    """Return what tells uvx where this belljar came from, if that was not a package index."""
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    if not text:
        return []
    origin: dict[str, Any] = json.loads(text)
    repository = origin.get("vcs_info", {}).get("vcs", "")
    return ["--from", f"{repository}+{origin['url']}" if repository else str(origin["url"])]


# The client's file


def add_server(client: Client, path: Path, name: str, entry: Mapping[str, Any]) -> Path | None:
    """Put `entry` into a client's file; return the path of the backup, or None if there was no file or no change."""
    # Resolve the path, so that a link into a folder of dotfiles stays a link.
    target = path.resolve()
    try:
        return _add_server(client, path, target, name, entry)
    except OSError as error:
        raise UsageError(f"{target} cannot be changed: {error}") from error


def _add_server(client: Client, path: Path, target: Path, name: str, entry: Mapping[str, Any]) -> Path | None:
    before = _read(target)
    try:
        after = _changed(client, before or b"", path, name, entry)
    except (UnreadableConfig, UnicodeError) as error:
        raise UsageError(f"{path} cannot be changed safely: {error}") from error
    if after == before:
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    if before is None:
        _replace(target, after, None)
        return None
    backup = _back_up(target, before)
    _replace(target, after, before)
    return backup


def _changed(client: Client, before: bytes, path: Path, name: str, entry: Mapping[str, Any]) -> bytes:
    mark = b"\xef\xbb\xbf" if before.startswith(b"\xef\xbb\xbf") else b""
    text = before.removeprefix(mark).decode()
    if not text.strip() and client.new_file:
        text = render(client.form, client.new_file)
    document = parse(client.form, text)
    place = client.place(name, document)
    present = find_entry(document, place)
    if present and bool(_URL_KEYS & present.keys()) != bool(_URL_KEYS & entry.keys()):
        raise UsageError(f'"{name}" in {path} is another kind of server')
    return mark + with_entry(client.form, text, place, entry).encode()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _back_up(target: Path, content: bytes) -> Path:
    for number in range(1000):
        backup = target.with_name(f"{target.name}.bak{number or ''}")
        try:
            _write_new(backup, content, like=target)
        except FileExistsError:
            continue
        return backup
    raise UsageError(f"{target.parent} holds a thousand backups of {target.name}")


def _replace(target: Path, content: bytes, expected: bytes | None) -> None:
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        _write_new(staged, content, like=target)
        # The client writes this file too; do not undo what it wrote since we read the file.
        if _read(target) != expected:
            raise UsageError(f"{target} was changed by another program just now")
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes, *, like: Path) -> None:
    """Write a new file with the owner and the permissions of `like`, where that exists."""
    model = like.stat() if like.exists() else None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if model else 0o666)
    with os.fdopen(descriptor, "wb") as file:
        if model and os.name == "posix":
            if (model.st_uid, model.st_gid) != (os.getuid(), os.getgid()) and os.getuid() == 0:
                os.fchown(descriptor, model.st_uid, model.st_gid)
            os.fchmod(descriptor, model.st_mode & 0o777)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
