"""Reads which MCP servers are configured, checks the entries and fills in their placeholders; it connects to none.

The sources are `mcpServers` of Claude Desktop, Claude Code and Cursor, `servers` of VS Code, the `mcp_servers` tables
of belljar.toml, and `MCP_SERVER_<NAME>_URL` variables. Of two entries with the same name the later one counts.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from belljar.errors import SettingsError
from belljar.settings import Settings

# Placeholders: `${…}` in the files of Claude Code, Cursor and VS Code, filled from our own environment variables.

_PLACEHOLDER: Final = re.compile(r"\$\{([^{}]*)\}")
_PLAIN: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<has_default>:-(?P<default>.*))?", re.DOTALL)


class Unasked(Exception):
    """A file wants a value that an editor would ask its user for. The message says how the operator can give it."""


class Placeholders:
    """Fills in the placeholders of one file. `where` names the place in the file, for error messages.

    `defaults` are the file's own default values for `${input:…}`.
    """

    def __init__(self, variables: Mapping[str, str], folder: Path, defaults: Mapping[str, str] | None = None) -> None:
        self._variables = variables
        self._defaults = defaults or {}
        self._known = {"workspaceFolder": str(_workspace(folder)), "userHome": str(Path.home()), "/": "/"}
        self._known |= {"workspaceFolderBasename": _workspace(folder).name, "pathSeparator": "/"}

    def fill(self, text: str, where: str) -> str:
        """Return the text with every placeholder replaced; placeholders in the replacements are left as they are."""
        return _PLACEHOLDER.sub(lambda found: self._value(found[1], where), text)

    def _value(self, inside: str, where: str) -> str:
        if inside in self._known:
            return self._known[inside]
        kind, colon, rest = inside.partition(":")
        if kind == "input" and colon:
            return self._input(rest, where)
        if kind == "env" and colon:
            return self._variable(rest, where)
        plain = _PLAIN.fullmatch(inside)
        if plain is None:
            raise SettingsError(
                f"{where} has ${{{inside}}}, which means nothing here", hint="Write ${env:NAME} or ${NAME:-default}"
            )
        if plain["has_default"] and not self._variables.get(plain["name"]):
            return plain["default"]
        return self._variable(plain["name"], where)

    def _input(self, name: str, where: str) -> str:
        """Return an input from an environment variable or the file's defaults, because nobody can be asked at start."""
        variable = f"MCP_INPUT_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
        if variable in self._variables:
            return self._variables[variable]
        if name in self._defaults:
            return self._defaults[name]
        raise Unasked(f"set {variable}, or write {where} without ${{input:{name}}}")

    def _variable(self, name: str, where: str) -> str:
        if name not in self._variables:
            raise SettingsError(
                f"{where} needs the variable {name}, which is not set", hint=f"Set {name} and try again"
            )
        return self._variables[name]


def _workspace(folder: Path) -> Path:
    """Return the project folder of a file; editors keep their files in a folder within it."""
    return folder.parent if folder.name in (".vscode", ".cursor") else folder


MAX_SERVERS: Final = 200
_LARGEST_FILE: Final = 4 * 1024 * 1024
_URL_VARIABLE: Final = re.compile(r"MCP_SERVER_(?P<name>[A-Z0-9_]+?)_URL")
_STDIO: Final = ("", "stdio", "local")
_HTTP: Final = ("", "http", "streamable-http", "streamablehttp", "streamable_http", "remote")


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is a command on this machine."""

    name: str
    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Variables besides HOME, PATH and the like; nothing else of our own environment is passed on."""
    folder: str = ""
    """The working directory; empty for our own."""


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server at an HTTP address, with the headers that it requires."""

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class UnusableServer:
    """A server that other programs can use and belljar cannot. The other servers of its file are not affected."""

    name: str
    reason: str
    detail: str = ""
    """What the operator can do about it."""


Connectable = StdioServer | HttpServer
ServerConfig = Connectable | UnusableServer


def load_servers(settings: Settings) -> dict[str, ServerConfig]:
    """Return every configured server by name; raise SettingsError with the place of an invalid entry."""
    found: dict[str, ServerConfig] = {}
    if settings.mcp_config:
        found |= read_file(Path(settings.mcp_config))
    if settings.mcp_servers:
        placeholders = Placeholders(dict(os.environ), Path.cwd())
        found |= _entries(settings.mcp_servers, "mcp_servers", Path.cwd(), placeholders)
    found = {name: _apart(server, settings.download_directory) for name, server in found.items()}
    found = _with_addresses(found, os.environ)
    if len(found) > MAX_SERVERS:
        raise SettingsError(f"{len(found)} MCP servers are configured, more than {MAX_SERVERS}")
    return found


def stdio_servers(settings: Settings) -> list[str]:
    """Return the names of the configured servers that are processes of ours."""
    return [name for name, server in load_servers(settings).items() if isinstance(server, StdioServer)]


def _apart(server: ServerConfig, downloads: Path) -> ServerConfig:
    """Return the server, never running among files that sessions left, because npx and the like run what lies there."""
    if isinstance(server, StdioServer) and not server.folder and Path.cwd().is_relative_to(downloads.resolve()):
        return replace(server, folder=str(Path.home()))
    return server


def read_file(path: Path, variables: Mapping[str, str] | None = None) -> dict[str, ServerConfig]:
    """Return the servers of one file, in any of the known formats."""
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise SettingsError(f"{path} has {size:,} bytes, more than a list of servers needs")
        value = loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", hint="Check mcp_config") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not JSON: {error}") from error
    servers, where = _servers_in(value, str(path))
    placeholders = Placeholders(
        os.environ if variables is None else variables, path.absolute().parent, _input_defaults(value)
    )
    return _entries(servers, where, path.absolute().parent, placeholders)


def _input_defaults(value: Any) -> dict[str, str]:
    """Return the default values of VS Code's `inputs`."""
    listed: object = cast("dict[str, Any]", value).get("inputs")
    tables = (
        [cast("dict[str, Any]", each) for each in cast("list[Any]", listed) if isinstance(each, dict)]
        if (isinstance(listed, list))
        else []
    )
    return {
        each["id"]: each["default"]
        for each in tables
        if isinstance(each.get("id"), str) and isinstance(each.get("default"), str)
    }


def _servers_in(value: Any, path: str) -> tuple[Mapping[str, Any], str]:
    """Return the table of servers and its place; VS Code's settings have it one level down."""
    top = _table(value, path)
    inner = top.get("mcp")
    for holder in (top, cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}):
        for key in ("mcpServers", "servers"):
            if key in holder:
                return _table(holder[key], f"{path}: {key}"), f"{path}: {key}"
    raise SettingsError(f"{path} has no mcpServers", hint='Write {"mcpServers": {"NAME": {"command": …}}}')


def _entries(
    servers: Mapping[str, Any], where: str, folder: Path, placeholders: Placeholders
) -> dict[str, ServerConfig]:
    found: dict[str, ServerConfig] = {}
    for name, value in servers.items():
        place = f"{where}.{name}"
        entry = _table(value, place)
        if not _is_name(name):
            raise SettingsError(f"{place} is no name for a server", hint="Take up to 64 letters, digits, . _ -")
        if entry.get("disabled") is not True and entry.get("enabled") is not False:
            try:
                found[name] = _Entry(name, entry, place, folder, placeholders).server()
            except Unasked as error:
                reason = "needs an input that another program would ask a person for"
                found[name] = UnusableServer(name, reason, str(error))
    return found


class _Entry:
    """One entry of a file's table of servers."""

    def __init__(
        self, name: str, values: Mapping[str, Any], place: str, folder: Path, placeholders: Placeholders
    ) -> None:
        self._name = name
        self._values = values
        self._place = place
        self._folder = folder
        self._placeholders = placeholders

    def server(self) -> ServerConfig:
        kind = (self._text("type") or self._text("transport")).lower()
        if kind == "sse":
            detail = 'take its streamable HTTP address, with "type": "http"'
            return UnusableServer(self._name, "speaks SSE, a transport that MCP has given up", detail)
        url = self._text("url") or self._text("serverUrl") or self._text("httpUrl")
        if self._text("command") and not url and kind in _STDIO:
            return self._stdio()
        if url and not self._text("command") and kind in _HTTP:
            return HttpServer(self._name, _address(url, self._place), self._headers())
        raise SettingsError(
            f"{self._place} has {'both a command and a url' if url and self._text('command') else 'no server in it'}",
            hint='Give it a "command" with "args", or a "url"; its "type" is "stdio" or "http"',
        )

    def _stdio(self) -> StdioServer:
        environment = {**self._env_file(), **self._texts("env")}
        chosen = self._text("cwd")
        folder = str(self._folder / Path(chosen).expanduser()) if chosen else ""
        command = self._text("command")
        command = str(Path(command).expanduser()) if command.startswith("~") else command
        return StdioServer(self._name, command, tuple(self._arguments()), environment, folder)

    def _text(self, key: str) -> str:
        value = self._values.get(key, "")
        if not isinstance(value, str) or "\0" in value:
            raise SettingsError(f"{self._place}.{key} is not text")
        return self._placeholders.fill(value, f"{self._place}.{key}")

    def _arguments(self) -> Iterator[str]:
        values = self._values.get("args", [])
        if not isinstance(values, list):
            raise SettingsError(f"{self._place}.args is not a list of text")
        for number, value in enumerate(cast("list[Any]", values)):
            if not isinstance(value, str) or "\0" in value:
                raise SettingsError(f"{self._place}.args[{number}] is not text")
            yield self._placeholders.fill(value, f"{self._place}.args[{number}]")

    def _texts(self, key: str) -> dict[str, str]:
        """Return a table of texts; numbers and booleans become text as in JSON, and null counts as missing."""
        place = f"{self._place}.{key}"
        texts: dict[str, str] = {}
        for name, value in _table(self._values.get(key, {}), place).items():
            if value is None:
                continue
            if not name or isinstance(value, dict | list) or "\0" in str(value) + name or "=" in name:
                raise SettingsError(f"{place}.{name} is not text")
            text = value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value}"
            texts[name] = self._placeholders.fill(text, f"{place}.{name}")
        return texts

    def _headers(self) -> dict[str, str]:
        headers = self._texts("headers")
        for name, value in headers.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not value.isprintable() or not value.isascii():
                raise SettingsError(f"{self._place}.headers.{name} cannot be a header")
        return headers

    def _env_file(self) -> dict[str, str]:
        """Return the variables of an `envFile` of VS Code or Cursor, which has `NAME=value` lines."""
        chosen = self._text("envFile")
        if not chosen:
            return {}
        path = self._folder / Path(chosen).expanduser()
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{self._place}.envFile: {path} cannot be read: {error}") from error
        pairs = [line.strip().removeprefix("export ").partition("=") for line in lines]
        return {
            name.strip(): value.strip().strip("\"'")
            for name, equals, value in pairs
            if equals and name.strip() and not name.startswith("#")
        }


def _with_addresses(found: dict[str, ServerConfig], variables: Mapping[str, str]) -> dict[str, ServerConfig]:
    """Add servers from variables: `MCP_SERVER_GITHUB_URL` is the address of `github`; headers from a file stay."""
    spelled = {name.upper().replace("-", "_"): name for name in found}
    for variable in sorted(variables):
        match = _URL_VARIABLE.fullmatch(variable)
        if match is None or not variables[variable].strip():
            continue
        name = spelled.get(match["name"], match["name"].lower())
        url = _address(variables[variable].strip(), variable)
        known = found.get(name)
        found[name] = replace(known, url=url) if isinstance(known, HttpServer) else HttpServer(name, url)
    return found


def _address(url: str, place: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        # Do not repeat the text, because it may contain a token.
        raise SettingsError(f"{place} is no address of an MCP server", hint="Write http://… or https://…")
    return url


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{place} is not a table of names and values")
    return cast("dict[str, Any]", value)


def _is_name(name: str) -> bool:
    return bool(re.fullmatch(r"\w[\w .\-]{0,63}", name)) and name == name.strip()


# JSON as editors write it: with comments, and with commas after the last item.

# Strings are matched first, so that what looks like a comment inside a string stays.
_TOKEN: Final = re.compile(
    r'"(?:[^"\\]|\\.)*+(?:"|\Z)|//[^\n]*|/\*.*?(?:\*/|\Z)|,(?=(?:\s|//[^\n]*|/\*.*?\*/)*+[}\]])', re.DOTALL
)


def loads(text: str) -> Any:
    """Parse JSON with comments and trailing commas; raise ValueError if it is invalid even so."""
    return json.loads(_TOKEN.sub(_blanked, text.removeprefix("\ufeff")))


def _blanked(token: re.Match[str]) -> str:
    found = token[0]
    # Replace by as many blanks, so that an error further down is reported at its right line and column.
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)
