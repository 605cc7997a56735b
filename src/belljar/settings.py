"""The settings: one table of fields, where their values come from, and what is said when one cannot be used.

Sources, lowest to highest: defaults, the user's `belljar.toml`, the working directory's (or `BELLJAR_CONFIG`),
`BELLJAR_*` variables, flags. The code, `belljar config` and the reference page all read the table below. Nothing here
knows what a setting is for.
"""

import difflib
import hashlib
import json
import keyword
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import platformdirs
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, SecretStr, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from belljar.egress.rules import PACKAGES, parse_rule
from belljar.errors import SettingsError

MEBIBYTE = 1024 * 1024
CONFIG_FILE = "belljar.toml"
MASK = "********"
NONE = "none"
"""Written for a limit that there is not; in Python, None."""

_PREFIX = "BELLJAR_"
_CONFIG_VARIABLE = "BELLJAR_CONFIG"
_HASH_MARK = "sha256:"
_LEVEL_ALIASES = {"WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR"}
_FLAGS = {"surfaces": "--surface"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A bearer key as the server keeps it: who it stands for, and its hash."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """One line of `belljar config`; `origin` is "default", a file, a variable or a flag."""

    name: str
    value: JsonValue
    origin: str
    description: str


def hash_key(key: str) -> str:
    """The hexadecimal SHA-256 of a key; our keys are 256 random bits, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_key(entry: str) -> ApiKey:
    """Read `KEY`, `NAME:KEY` or `NAME:sha256:HEX`; a key without a name is named after its hash."""
    name, colon, secret = entry.partition(":")
    if not colon:
        digest = hash_key(entry)
        return ApiKey(f"key-{digest[:8]}", digest)
    # A hash whose name was forgotten would otherwise become a plain key that anyone who read the file knows.
    if not is_key_name(name):
        raise ValueError("the part before the colon is no name for a key")
    if not secret:
        raise ValueError(f"there is no key after {name}:")
    if not secret.startswith(_HASH_MARK):
        return ApiKey(name, hash_key(secret))
    digest = secret.removeprefix(_HASH_MARK).lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"the hash of {name} is not 64 hexadecimal digits")
    return ApiKey(name, digest)


def is_key_name(name: str) -> bool:
    """Whether a key may be called that."""
    return re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", name) is not None and f"{name}:" != _HASH_MARK


def _checked_key(entry: SecretStr) -> SecretStr:
    parse_key(entry.get_secret_value())
    return entry


def _checked_address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    is_address = bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65536
    if value and (not is_address or (":" in host and not re.fullmatch(r"\[[0-9A-Fa-f:.%]+\]", host))):
        raise ValueError("it is not HOST:PORT, like 127.0.0.1:8000 or [::1]:8000")
    return value


def _checked_image(value: str) -> str:
    # On the engine's command line a dash in front would make it an option.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", value):
        raise ValueError("it is not the name of an image, like belljar:latest")
    return value


def _checked_rule(entry: str) -> str:
    return entry if entry == PACKAGES else str(parse_rule(entry))


def _checked_module(name: str) -> str:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise ValueError(f"{name!r} is no module name, like numpy or matplotlib.pyplot")
    return name


def _within_sessions(size: int, info: ValidationInfo) -> int:
    """Refuse a pool that could not be handed out; checked after `max_sessions`, which stands before it."""
    most = info.data.get("max_sessions", size)
    if size > most:
        raise ValueError(f"it is more than max_sessions, which is {most}")
    return size


def _with_checkpoints(choice: str, info: ValidationInfo) -> str:
    if choice == "rewind" and info.data.get("checkpoints") == 0:
        raise ValueError("there is nothing to rewind to, because checkpoints is 0")
    return choice


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _level_name(value: object) -> object:
    return _LEVEL_ALIASES.get(value.upper(), value.upper()) if isinstance(value, str) else value


def _user_data() -> Path:
    return platformdirs.user_data_path("belljar")


def _user_downloads() -> Path:
    return platformdirs.user_downloads_path() / "belljar"


def _limit(least: float, most: float) -> AfterValidator:
    """A limit that is large enough to work with and small enough to mean something, unless it is none."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            zero = "a limit of 0 leaves nothing to work with: " if value == 0 else ""
            raise ValueError(f'{zero}it should be {least:,} to {most:,}, or "{NONE}" for no limit')
        return value

    return AfterValidator(check)


def _none_spelled(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == NONE else value


Directory = Annotated[Path, AfterValidator(_absolute)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int | None, BeforeValidator(_none_spelled)]
Share = Annotated[float | None, BeforeValidator(_none_spelled)]


class Settings(BaseSettings):
    """The table. `Settings(**flags)` reads every source; prefer `load_settings`, whose errors name the source."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    sandbox: Literal["namespace", "container", "gvisor", "microvm", "process"] = Field(
        "namespace",
        description="How sessions are sealed off: Linux namespaces, containers of docker or podman, gVisor's own "
        "kernel, virtual machines of microsandbox, or plain processes that isolate nothing.",
    )
    runsc: str = Field("runsc", description="gVisor's program for the `gvisor` sandbox: a name on the PATH, or a path.")
    container_engine: Literal["auto", "podman", "docker"] = Field(
        "auto", description="What makes the containers of the `container` sandbox: `auto` takes the first that answers."
    )
    container_image: Annotated[str, AfterValidator(_checked_image)] = Field(
        "belljar:latest",
        description="The image of those containers, a Linux with glibc; it has to be there, nothing is ever pulled.",
        json_schema_extra={"allowed": "the name of an image"},
    )
    environment: str = Field(
        "default",
        description="Where the code of sessions runs: `default` (the managed science environment), the path of a "
        "virtual environment or interpreter, or `kernel:NAME` for an installed Jupyter kernel.",
    )
    data_directory: Directory = Field(
        default_factory=_user_data,
        description="Where sessions, their files and managed environments are kept.",
        json_schema_extra={"default": "`belljar` in the user's data folder (Linux: `~/.local/share/belljar`)"},
    )
    download_directory: Directory = Field(
        default_factory=_user_downloads,
        description="Where `download_file` saves what it is asked to save.",
        json_schema_extra={"default": "`belljar` in the user's downloads folder (`~/Downloads/belljar`)"},
    )
    surfaces: list[Literal["interpreter"]] = Field(
        ["interpreter"], min_length=1, description="The sets of tools that clients see."
    )
    http: Annotated[str, AfterValidator(_checked_address)] = Field(
        "",
        description="Serve streamable HTTP at this `HOST:PORT`; empty means stdio.",
        json_schema_extra={"allowed": "HOST:PORT, or empty text"},
    )
    api_keys: list[Annotated[SecretStr, AfterValidator(_checked_key)]] = Field(
        [],
        description="Bearer keys that HTTP accepts: `KEY`, `NAME:KEY` or `NAME:sha256:HEX`; a file may hold the "
        "hashed form only, as `belljar key` prints it.",
        json_schema_extra={"allowed": "a list of KEY, NAME:KEY or NAME:sha256:HEX"},
    )
    oauth_issuer: str = Field("", description="Accept OAuth access tokens of this issuer (a URL).")
    oauth_audience: str = Field(
        "", description="This server's own canonical URL, which tokens must be meant for, like `https://host/mcp`."
    )
    oauth_jwks_url: str = Field(
        "", description="Where the issuer's signing keys are; empty means what the issuer's metadata says."
    )
    oauth_scopes: list[str] = Field([], description="Scopes that every token must carry.")
    allowed_hosts: list[str] = Field(
        [], description="`Host` headers accepted beside those of the address that is served."
    )
    allowed_origins: list[str] = Field([], description="`Origin` headers accepted from browsers.")
    metrics: Literal["off", "local", "open"] = Field(
        "local",
        description="Who may read `/metrics` over HTTP: nobody, callers on this machine (with their credentials, where "
        "any are set up), or everyone who can connect.",
    )
    egress: list[Annotated[str, AfterValidator(_checked_rule)]] = Field(
        [],
        description="Hosts that the code of sessions may reach: `HOST:PORT`, `*.DOMAIN:PORT`, or `packages` for the "
        "package index that pip and uv are configured for; none by default.",
        json_schema_extra={"allowed": 'a list of HOST:PORT, *.DOMAIN:PORT or "packages"'},
    )
    egress_allow_private: bool = Field(
        False,
        description="Whether an allowed host may have a private address, for sites whose mirrors do; link-local and "
        "metadata addresses are never reached.",
    )
    session_idle_s: Seconds = Field(
        1800, description="A session that nothing used for this long expires; never while something runs."
    )
    sweep_interval_s: Seconds = Field(30, description="How often expired sessions are looked for.")
    max_sessions: int = Field(64, ge=1, description="Sessions that may be alive at once.")
    max_running: int = Field(
        64, ge=1, description="Executions that may run at once in all sessions; the others wait, fairly between owners."
    )
    max_waiting: int = Field(1_000, ge=1, description="Executions that may wait to run; more are refused as busy.")
    memory_headroom_mb: int = Field(
        256, ge=1, description="Memory of the machine that stays free: below it no session or kernel is started."
    )
    max_queue: int = Field(32, ge=1, description="Executions that may wait in one session.")
    fork_start: bool = Field(
        True, description="Start sessions as forks of a process that has everything imported, where the sandbox can."
    )
    preload: list[Annotated[str, AfterValidator(_checked_module)]] = Field(
        ["numpy", "pandas", "matplotlib.pyplot"],
        description="Modules that this process imports before any session needs them; those not installed are skipped.",
        json_schema_extra={"allowed": "a list of module names"},
    )
    pool_size: Annotated[int, AfterValidator(_within_sessions)] = Field(
        1, ge=0, description="Sessions kept ready before anyone asks for them; 0 starts each when it is asked for."
    )
    checkpoints: int = Field(
        3, ge=0, description="Earlier states of a session that it can be rewound to; 0 keeps none."
    )
    checkpoint_memory_mb: int = Field(
        1_024,
        ge=1,
        description="Memory that the earlier states of one session may hold; the oldest are dropped over it.",
    )
    checkpoint_disk_mb: int = Field(
        1_024, ge=1, description="Disk that the earlier files of one session may take; over it files are not rewound."
    )
    on_death: Annotated[Literal["fresh", "rewind"], AfterValidator(_with_checkpoints)] = Field(
        "fresh",
        description="What follows when a session's process dies: `fresh` starts an empty one and names what was lost, "
        "`rewind` goes back to the state before the cell that killed it.",
    )
    hibernate: bool = Field(
        True, description="Keep sessions on disk when they expire or the server stops; the next call wakes them."
    )
    keep_days: float = Field(7, gt=0, description="How long a session that sleeps on disk, and its journal, are kept.")
    execution_timeout_s: Seconds = Field(
        600, description="A cell that runs longer is interrupted, unless its call says otherwise."
    )
    interrupt_grace_s: Seconds = Field(
        5, description="A cell that ignores its interrupt for this long is killed with its process."
    )
    memory_mb: Annotated[Count, _limit(64, 1_048_576 * 16)] = Field(
        2048,
        description="Memory that all processes of a session may use together, swap included; what goes beyond it is "
        "killed, and the result says `out_of_memory`.",
        json_schema_extra={"allowed": 'a whole number of megabytes from 64, or "none" for no limit'},
    )
    cpus: Annotated[Share, _limit(0.05, 4096)] = Field(
        None,
        description="Processors that a session may keep busy, fractions allowed; code inside sees that many.",
        json_schema_extra={"allowed": 'a number from 0.05, or "none" for all of them'},
    )
    max_processes: Annotated[Count, _limit(16, 4_194_304)] = Field(
        256,
        description="Processes and threads that a session may have at once; three of them are the sandbox's own.",
        json_schema_extra={"allowed": 'a whole number from 16, or "none" for no limit'},
    )
    disk_mb: Annotated[Count, _limit(1, 1_048_576 * 1024)] = Field(
        2048,
        description="What a session may keep in its folder; a cell that goes beyond it is interrupted, uploads are "
        "refused, and no single file can become larger.",
        json_schema_extra={"allowed": 'a whole number of megabytes, or "none" for no limit'},
    )
    temporary_mb: Annotated[Count, _limit(1, 1_048_576 * 16)] = Field(
        512,
        description="Size of `/tmp`, of the home folder and of `/dev/shm`, each; what is in them counts as memory.",
        json_schema_extra={"allowed": 'a whole number of megabytes, or "none" for no limit'},
    )
    max_open_files: Annotated[Count, _limit(64, 1_073_741_816)] = Field(
        1024,
        description="Files and sockets that one process of a session may have open.",
        json_schema_extra={"allowed": 'a whole number from 64, or "none" for no limit of ours'},
    )
    start_timeout_s: Seconds = Field(60, description="How long a kernel may take to get ready.")
    output_budget_chars: int = Field(
        20_000, ge=200, description="Characters of output in one answer; the rest is kept behind a link."
    )
    output_cap_bytes: int = Field(
        256 * MEBIBYTE, ge=1, description="Output kept of one execution; what comes after it is counted and dropped."
    )
    image_budget_bytes: int = Field(
        700_000, ge=1, description="Bytes of images in one answer; larger ones are scaled down, the original linked."
    )
    structured: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether answers carry `structuredContent`: `auto` leaves it out beside images, which several "
        "clients would drop.",
    )
    max_code_bytes: int = Field(MEBIBYTE, ge=1, description="The longest code one call may bring.")
    max_upload_bytes: int = Field(100 * MEBIBYTE, ge=1, description="The largest file one call may bring.")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_level_name)] = Field(
        "INFO", description="How much is logged to stderr; `LOG_LEVEL` works too."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="What the lines of the log are: text for people, or JSON objects for programs."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the layers below them."""
        return (init_settings, *(InitSettingsSource(cls, layer.values) for layer in _layers()))


def load_settings(flags: Mapping[str, object] = {}) -> Settings:
    """The settings in force; a flag that is None was not given, unless it is a limit: then there is none."""
    given = given_flags(flags)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise _explained(error, given) from None


def explain(flags: Mapping[str, object] = {}) -> list[SettingOrigin]:
    """Every setting with its value, secrets masked, and where the value came from."""
    settings = load_settings(flags)
    layers = [_Layer(given_flags(flags), flag), *_layers()]
    return [
        SettingOrigin(name, _shown(getattr(settings, name)), _source(name, layers)[1], field.description or "")
        for name, field in Settings.model_fields.items()
    ]


def allowed(name: str) -> str:
    """What a setting takes, in words."""
    field = Settings.model_fields[name]
    return _note(field, "allowed") or _allowed_type(field.annotation) + _bounds(field)


def default(name: str) -> str:
    """What a setting is when nothing sets it, in Markdown and without this machine's paths."""
    field = Settings.model_fields[name]
    return _note(field, "default") or f"`{json.dumps(_shown(field.get_default()))}`"


def config_files() -> list[Path]:
    """The files that are looked for, highest first; they need not exist."""
    chosen = os.environ.get(_CONFIG_VARIABLE)
    nearest = Path(chosen).expanduser() if chosen else Path(CONFIG_FILE)
    return [nearest.absolute(), platformdirs.user_config_path("belljar") / CONFIG_FILE]


def unknown_variables() -> list[str]:
    """Variables that look like settings and are none: likely a slip of the pen."""
    known = {variable(name) for name in Settings.model_fields} | {_CONFIG_VARIABLE}
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return _PREFIX + name.upper()


def flag(name: str) -> str:
    """The flag of a setting, on the commands that take it."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source: what it sets, and how it is called for each name."""

    values: dict[str, Any]
    origin: Callable[[str], str]


class _Environment(EnvSettingsSource):
    """Lists are separated by commas rather than written in JSON, and `LOG_LEVEL` stands in for ours."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()]

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        if fallback := self.env_vars.get("log_level"):
            values.setdefault("log_level", fallback)
        return values

    def origin(self, name: str) -> str:
        own = variable(name)
        return own if own.lower() in self.env_vars else "LOG_LEVEL"


def _layers() -> list[_Layer]:
    environment = _Environment(Settings)
    files = [path for path in config_files() if _is_wanted(path)]
    return [_Layer(environment(), environment.origin), *map(_file_layer, files)]


def _is_wanted(path: Path) -> bool:
    """Whether a file is there; a folder that we may not look into has none for us, unless it was asked for."""
    try:
        if path.exists():
            return True
    except PermissionError:
        pass
    if os.environ.get(_CONFIG_VARIABLE) and path == config_files()[0]:
        raise SettingsError(
            f"{path}, named by {_CONFIG_VARIABLE}, does not exist", hint=f"Make it, or unset {_CONFIG_VARIABLE}"
        )
    return False


def _file_layer(path: Path) -> _Layer:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}", hint="Write one `name = value` a line") from error
    for name, value in values.items():
        _check_from_file(name, value, str(path))
    return _Layer(values, lambda _: str(path))


def _check_from_file(name: str, value: Any, origin: str) -> None:
    """A variable is text whatever it sets; a file has types, and they must be right."""
    if name not in Settings.model_fields:
        raise _unknown(name, origin)
    kind = _kind(Settings.model_fields[name].annotation)
    fitting = {int, float} if kind is float else {kind}
    if type(value) not in fitting and not (value == NONE and _may_be_none(name)):
        raise _unusable(name, value, origin, "it has the wrong type")
    if name == "api_keys" and not all(isinstance(entry, str) and _is_hashed(entry) for entry in value):
        raise SettingsError(
            f"api_keys in {origin} holds a key in plain text",
            hint="Run `belljar key` and put the line it prints there: NAME:sha256:HEX",
        )


def _is_hashed(entry: str) -> bool:
    return entry.partition(":")[2].startswith(_HASH_MARK)


def given_flags(flags: Mapping[str, object]) -> dict[str, Any]:
    """Those that say something: None does of limits only."""
    return {name: value for name, value in flags.items() if value is not None or _may_be_none(name)}


def _source(name: str, layers: list[_Layer]) -> tuple[Any, str]:
    """The value that won, as it was before it was checked, and its origin."""
    for layer in layers:
        if name in layer.values:
            return layer.values[name], layer.origin(name)
    return None, "default"


def _explained(error: ValidationError, flags: dict[str, Any]) -> SettingsError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    value, origin = _source(name, [_Layer(flags, flag), *_layers()])
    if first["type"] == "extra_forbidden":
        return _unknown(name, origin)
    reason = first["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
    return _unusable(name, value, origin, reason)


def _unknown(name: str, origin: str) -> SettingsError:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"Did you mean {near[0]}?" if near else "`belljar config` lists every setting"
    return SettingsError(f"unknown setting {name} from {origin}", hint=hint)


def _unusable(name: str, value: object, origin: str, reason: str) -> SettingsError:
    shown = MASK if name == "api_keys" else json.dumps(value, default=str, ensure_ascii=False)
    return SettingsError(f"{name} = {shown} from {origin}: {reason}", hint=f"{name} takes {allowed(name)}")


def _shown(value: Any) -> JsonValue:
    if isinstance(value, list):
        return [_shown(item) for item in cast("list[Any]", value)]
    if value is None:
        return NONE
    if isinstance(value, SecretStr):
        return _masked(value.get_secret_value())
    return str(value) if isinstance(value, Path) else value


def _masked(entry: str) -> str:
    name, colon, _ = entry.partition(":")
    if not colon:
        return MASK
    return f"{name}:{_HASH_MARK}{MASK}" if _is_hashed(entry) else f"{name}:{MASK}"


def _may_be_none(name: str) -> bool:
    return name in Settings.model_fields and type(None) in get_args(Settings.model_fields[name].annotation)


def _kind(annotation: Any) -> type:
    if get_origin(annotation) is list:
        return list
    if type(None) in get_args(annotation):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not type(None))
    return annotation if annotation in (bool, int, float) else str


def _allowed_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        return f"a list of {_allowed_type(item)}" if get_origin(item) is Literal else "a list of text"
    return {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}.get(annotation, "text")


def _bounds(field: FieldInfo) -> str:
    words = {"ge": ", at least", "gt": ", above"}
    return "".join(
        f"{text} {getattr(bound, name)}"
        for bound in field.metadata
        for name, text in words.items()
        if hasattr(bound, name)
    )


def _note(field: FieldInfo, name: str) -> str:
    extra = field.json_schema_extra
    return str(cast("dict[str, object]", extra).get(name, "")) if isinstance(extra, dict) else ""
