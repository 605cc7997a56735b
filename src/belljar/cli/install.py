"""`belljar install`: tell an MCP client how to start or reach belljar, by printing an entry or writing it to its file.

Nothing in a file is lost. Plain JSON is read, changed and written again; to TOML a table is added at its end; YAML, and
whatever would not come back, such as comments in JSON, is not touched: then the person adds what is printed.
"""

import json
import os
import re
import secrets
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, Never, cast
from urllib.parse import urlsplit

import platformdirs
import typer
import yaml

from belljar.cli.clients import CLIENTS, Client, ServerEntry
from belljar.distribution import DISTRIBUTION
from belljar.errors import SandboxUnavailable, UsageError
from belljar.sandboxes.container.engines import ContainerEngine, find_engines
from belljar.sandboxes.seccomp import container_profile
from belljar.settings.kinds import checked_image

_URL_KEYS = {"url", "httpUrl", "serverUrl", "uri"}
_TOOL_HINT = f"Install it first: uv tool install {DISTRIBUTION}, or pipx install {DISTRIBUTION}; then run this again"

START_ENGINE = (
    "Start Docker Desktop or the docker service, or install podman (elsewhere than on Linux: `podman machine start`)"
)


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
    what else is in the file. It is not written into JSON with comments, nor into YAML: then add what is printed. With
    --url it names a server that runs already.
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
    is_left_alone = client.form == "yaml" and target.exists()
    _note(f"This belongs in {target}{'' if is_left_alone else '; --write puts it there'}.")


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
    print(render(client, name, entry), end="", flush=True)


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


# The command that starts our image


def find_engine(*, reason: str = "", hint: str = START_ENGINE) -> ContainerEngine:
    """Return an engine that answers; `reason` says what it is needed for, and `hint` what to do where none does."""
    complaints: list[str] = []
    for engine in find_engines("auto", first="docker"):
        if isinstance(engine, ContainerEngine):
            return engine
        complaints.append(": ".join(engine))
    why = f" ({'; '.join(complaints)})" if complaints else ""
    raise SandboxUnavailable(f"{reason}neither docker nor podman answers{why}", hint=hint)


def container_command(
    image: str, arguments: Sequence[str], *, has_profile: bool = True, engine: ContainerEngine | None = None
) -> list[str]:
    """Return the command that starts belljar in a container; `has_profile` writes the engine's rules.

    The container is removed when the client ends it; sessions sleep in a named volume and wake under the next one.
    """
    engine = engine or find_engine()
    options = ["--security-opt", "systempaths=unconfined"]
    # Podman's own rules for system calls allow namespaces and forbid more than ours; elsewhere than on Linux it would
    # look for the file in its virtual machine.
    if engine.kind != "podman":
        profile = platformdirs.user_config_path("belljar", appauthor=False) / "container-seccomp.json"
        if has_profile:
            profile.parent.mkdir(parents=True, exist_ok=True)
            profile.write_text(json.dumps(container_profile(), indent=2) + "\n")
        options = ["--security-opt", f"seccomp={profile}", *options]
    if Path("/sys/module/apparmor").exists():
        options += ["--security-opt", "apparmor=unconfined"]
    run = ["run", "-i", "--rm", *options, "-v", "belljar:/data", image]
    return [engine.program, *run, *(["serve", *arguments] if arguments else [])]


# The client's file


def render(client: Client, name: str, entry: Mapping[str, Any]) -> str:
    """Return the entry in the client's format, as a text of its own."""
    servers: Any = [{"name": name, **entry}] if client.is_list else {name: dict(entry)}
    match client.form:
        case "json":
            return json.dumps({client.key: servers}, indent=2, ensure_ascii=False) + "\n"
        case "yaml":
            return yaml.safe_dump({client.key: servers}, sort_keys=False, allow_unicode=True, width=1000)
        case "toml":
            lines = [f"{key} = {_toml_value(value)}" for key, value in entry.items()]
            return "\n".join([f"[{client.key}.{_toml_key(name)}]", *lines, ""])


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, str]", value).items()
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml_value(each)}" for key, each in pairs) + " }"
    # A JSON string, or a list of them, is the same in TOML.
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


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
        after = _changed(client, before or b"", name, entry)
    except (ValueError, RecursionError) as error:
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


def _changed(client: Client, before: bytes, name: str, entry: Mapping[str, Any]) -> bytes:
    """Return a file with the entry; raise ValueError where something would be lost."""
    mark = b"\xef\xbb\xbf" if before.startswith(b"\xef\xbb\xbf") else b""
    text = before.removeprefix(mark).decode()
    if not text.strip():
        start = yaml.safe_dump(dict(client.new_file), sort_keys=False) if client.new_file else ""
        after = start + render(client, name, entry)
    elif client.form == "json":
        after = _changed_json(client, text, name, entry)
    elif client.form == "toml":
        after = _changed_toml(client, text, name, entry)
    else:
        raise ValueError("it is YAML")
    return mark + after.encode()


def _changed_json(client: Client, text: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return the text with the entry; fields that a present entry has beside those of `entry` stay."""
    document = _plain_json(text)
    servers = document[client.key] = _object(document, client.key)
    # opencode 2 has a level more. It also reads the form of opencode 1, which is the only one that both read.
    if client.key == "mcp" and "servers" in servers:
        servers["servers"] = servers = _object(servers, "servers")
    present = _object(servers, name)
    if present and bool(_URL_KEYS & present.keys()) != bool(_URL_KEYS & entry.keys()):
        raise ValueError(f'its "{name}" is another kind of server')
    wanted = {**present, **entry}
    if wanted == present:
        return text
    servers[name] = wanted
    indent = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    after = json.dumps(document, indent=indent[1] if indent else 2, ensure_ascii=False)
    after += "\n" if text.endswith("\n") else ""
    return after.replace("\n", "\r\n") if "\r\n" in text else after


def _changed_toml(client: Client, text: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return the text with a table more at its end, where that means just that."""
    wanted = tomllib.loads(text)
    servers = wanted[client.key] = _object(wanted, client.key)
    if servers.get(name) == entry:
        return text
    if name in servers:
        raise ValueError(f'it has "{name}" already')
    servers[name] = dict(entry)
    after = f"{text.rstrip()}\n\n{render(client, name, entry)}"
    after = after.replace("\n", "\r\n").replace("\r\r\n", "\r\n") if "\r\n" in text else after
    if tomllib.loads(after) != wanted:
        raise ValueError("its layout is too unusual")
    return after


def _plain_json(text: str) -> dict[str, Any]:
    """Parse JSON that can be written again without a loss; raise ValueError for any other."""
    try:
        document = json.loads(text, parse_constant=_refuse, parse_float=_exact, object_pairs_hook=_without_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON, or has comments: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 - its text is wrong, and no argument
    return cast("dict[str, Any]", document)


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is no JSON value")


def _exact(number: str) -> float:
    if Decimal(repr(float(number))) != Decimal(number):
        raise ValueError(f"the number {number[:40]} cannot be kept as it is")
    return float(number)


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return members


def _object(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f'"{key}" is no object')
    return cast("dict[str, Any]", value or {})


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
