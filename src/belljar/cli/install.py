"""`belljar install`: tell an MCP client how to start belljar, by printing JSON or by writing it into the client's file.

Of a client's file everything else stays as it was. A file that cannot be rewritten without loss, because it has
comments, a key twice or text that is not JSON, is refused before anything is changed.
"""

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import platformdirs
import typer

from belljar.errors import UsageError
from belljar.sandboxes.seccomp import container_profile
from belljar.settings.kinds import checked_image

ClientName = Literal["claude-desktop", "claude-code", "vscode", "cursor"]
ServerEntry = dict[str, str | list[str]]


@dataclass(frozen=True, slots=True)
class Client:
    """An MCP client, and how it is told about a server."""

    title: str
    path: Callable[[], Path]
    key: str
    """The object in the client's file that maps names to servers."""
    states_type: bool
    """Whether an entry says that the server is started over stdio."""
    then: str
    """What the person has to do before the client starts the server."""


def _claude_desktop() -> Path:
    folder = platformdirs.user_config_path("Claude", appauthor=False, roaming=True)
    return folder / "claude_desktop_config.json"


def _claude_code() -> Path:
    # The user's file rather than a project's .mcp.json, because projects are shared and the command is a local path.
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home()) / ".claude.json"


# Where each client keeps its servers, and in what form, as the clients documented it in 2026.
CLIENTS: dict[ClientName, Client] = {
    "claude-desktop": Client(
        "Claude Desktop", _claude_desktop, "mcpServers", states_type=False, then="Quit Claude Desktop and open it again"
    ),
    "claude-code": Client(
        "Claude Code",
        _claude_code,
        "mcpServers",
        states_type=True,
        then="Start a new Claude Code session; /mcp shows it",
    ),
    "vscode": Client(
        "VS Code", lambda: Path(".vscode/mcp.json"), "servers", states_type=True, then="Start it from MCP: List Servers"
    ),
    "cursor": Client(
        "Cursor",
        lambda: Path.home() / ".cursor" / "mcp.json",
        "mcpServers",
        states_type=True,
        then="Turn it on in Cursor's MCP settings",
    ),
}


def command(
    client_name: Annotated[ClientName, typer.Argument(metavar="CLIENT", help="The client to set up.")],
    serve_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENT", help="Passed on to `belljar serve`.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write it into the client's file.")] = False,
    name: Annotated[str, typer.Option(help="What the client calls the server.")] = "belljar",
    path: Annotated[Path | None, typer.Option(help="The client's file, where it is not the usual one.")] = None,
    docker: Annotated[
        bool, typer.Option("--docker", help="Start it in a container of docker or podman instead of here.")
    ] = False,
    image: Annotated[str, typer.Option(help="The image that --docker starts.")] = "belljar:latest",
) -> None:
    """Tell an MCP client how to start belljar.

    Prints the JSON for the client's configuration file; with --write, puts it there and keeps what else is in the file.
    """
    client = CLIENTS[client_name]
    target = (path or client.path()).expanduser().absolute()
    if docker:
        entry = container_entry(client, checked_image(image), serve_arguments or [], has_profile=write)
    else:
        entry = server_entry(client, serve_arguments or [])
    if write:
        _write(client, target, name, entry)
        return
    _print_snippet(client, name, entry)
    _note(f"This belongs into {target}; --write puts it there.")


def _write(client: Client, target: Path, name: str, entry: ServerEntry) -> None:
    try:
        backup = add_server(target, client.key, name, entry)
    except UsageError as refusal:
        _print_snippet(client, name, entry)
        raise UsageError(
            f"{refusal.message}; it was not touched",
            hint="Add the JSON above by hand, or choose another --name or --path",
        ) from refusal
    _note(f"{client.title}: {target} starts {name} now." + (f" Backup: {backup}" if backup else ""))
    _note(f"{client.then}.")


def _print_snippet(client: Client, name: str, entry: ServerEntry) -> None:
    print(json.dumps({client.key: {name: entry}}, indent=2, ensure_ascii=False), flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def server_entry(client: Client, arguments: Sequence[str]) -> ServerEntry:
    """Return the entry with which the client starts belljar."""
    command, *first = launch_command()
    entry: ServerEntry = {"command": command, "args": [*first, "serve", *arguments]}
    return {"type": "stdio", **entry} if client.states_type else entry


def container_entry(
    client: Client, image: str, arguments: Sequence[str], *, has_profile: bool = True, engine: str = ""
) -> ServerEntry:
    """Return the entry with which the client starts belljar in a container; `has_profile` writes the engine's rules.

    The container is removed when the client ends it; sessions sleep in a named volume and wake under the next one.
    """
    engine = engine or _find_engine()
    if Path(engine).name.startswith("podman"):
        options = ["--security-opt", "unmask=ALL"]
    else:
        profile = platformdirs.user_config_path("belljar", appauthor=False) / "container-seccomp.json"
        if has_profile:
            profile.parent.mkdir(parents=True, exist_ok=True)
            profile.write_text(json.dumps(container_profile(), indent=2) + "\n")
        options = ["--security-opt", f"seccomp={profile}", "--security-opt", "systempaths=unconfined"]
        if Path("/sys/module/apparmor").exists():
            options += ["--security-opt", "apparmor=unconfined"]
    words = ["run", "-i", "--rm", *options, "-v", "belljar:/data", image]
    entry: ServerEntry = {"command": engine, "args": [*words, *(["serve", *arguments] if arguments else [])]}
    return {"type": "stdio", **entry} if client.states_type else entry


def _find_engine() -> str:
    """Return the path of docker or podman, because a desktop gives its programs a short PATH."""
    found = shutil.which("docker") or shutil.which("podman")
    if found is None:
        raise UsageError("neither docker nor podman is on the PATH", hint="Install Docker Desktop, docker or podman")
    return found


def launch_command() -> list[str]:
    """Return a command that works in any folder and with any PATH, because a desktop gives its programs a short one."""
    interpreter = Path(sys.executable).absolute()
    script = interpreter.with_name("belljar.exe" if os.name == "nt" else "belljar")
    return [str(script)] if os.access(script, os.X_OK) else [str(interpreter), "-P", "-m", "belljar"]


def add_server(path: Path, key: str, name: str, entry: Mapping[str, object]) -> Path | None:
    """Put `entry` at `key`.`name`; return the path of the backup, or None if there was no file or no change."""
    # Resolve the path, so that a link into a folder of dotfiles stays a link.
    target = path.resolve()
    try:
        return _add_server(path, target, key, name, entry)
    except OSError as error:
        raise UsageError(f"{target} cannot be changed: {error}") from error


def _add_server(path: Path, target: Path, key: str, name: str, entry: Mapping[str, object]) -> Path | None:
    before = _read(target)
    document = _parse(before, path)
    changed = _with_server(document, key, name, entry, path)
    if changed == document:
        return None
    after = _render(changed, before, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if before is None:
        _replace(target, after, None)
        return None
    backup = _back_up(target, before)
    _replace(target, after, before)
    return backup


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(content: bytes | None, path: Path) -> dict[str, Any]:
    if not content or not content.strip():
        return {}
    try:
        text = content.decode("utf-8-sig")
        document: Any = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UsageError(f"{path} is not plain JSON: {_reason(content, error)}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", document)


def _reason(content: bytes, error: ValueError) -> str:
    outside_strings = re.sub(rb'"(?:\\.|[^"\\])*"', b'""', content)
    if re.search(rb"//|/\*", outside_strings):
        return "it has comments, which a rewrite would lose"
    return str(error)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return document


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _with_server(
    document: dict[str, Any], key: str, name: str, entry: Mapping[str, object], path: Path
) -> dict[str, Any]:
    servers = document.get(key, {})
    if not isinstance(servers, dict):
        raise UsageError(f'"{key}" in {path} is no JSON object')
    servers = cast("dict[str, Any]", servers)
    present = servers.get(name, {})
    if not isinstance(present, dict) or "url" in present:
        raise UsageError(f'"{name}" in {path} is another kind of server')
    # Keep what the person added to our entry, such as "env".
    return {**document, key: {**servers, name: {**cast("dict[str, Any]", present), **entry}}}


def _render(document: dict[str, Any], before: bytes | None, path: Path) -> bytes:
    indent = re.search(rb"^[ \t]+", before or b"", re.MULTILINE)
    try:
        text = json.dumps(
            document, indent=indent.group().decode() if indent else 2, ensure_ascii=False, allow_nan=False
        )
        return text.encode() + b"\n"
    except ValueError as error:
        raise UsageError(f"{path} cannot be written back as it was: {error}") from error


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
