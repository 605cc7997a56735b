"""The kinds of values that settings take, each with the check that a type alone cannot make."""

import binascii
import keyword
import re
from base64 import b64decode
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from belljar.egress.rules import PACKAGES, parse_rule, plain_host

NONE = "none"
"""How files and variables write that there is no limit; in Python, None."""

MOST_WORKERS = 64
LEAST_KEY_BYTES = 32
"""Of the key that the servers of a fleet share."""

_CHANNEL = re.compile(r"(https?://|file:///|/|~/)[^\s]{1,500}|[A-Za-z0-9][A-Za-z0-9._/-]{0,100}")
_SAME_NAMES = {("interpreter", "azure-mcp"): "new_session and download_file"}
"""Pairs of surfaces with tools of the same name; `executor` is served alone in any case."""
_LEVEL_ALIASES = {"WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR"}


def checked_address(value: str) -> str:
    """Refuse an address that is not HOST:PORT or empty."""
    host, colon, port = value.rpartition(":")
    is_address = bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65536
    if value and (not is_address or (":" in host and not re.fullmatch(r"\[[0-9A-Fa-f:.%]+\]", host))):
        raise ValueError("it is not HOST:PORT, like 127.0.0.1:8000 or [::1]:8000")
    return value


def checked_peers(value: str) -> str:
    """Return where the machines of a fleet are listed, or refuse what is neither a file nor a name and a port."""
    kind, _, where = value.partition(":")
    if kind == "file" and where:
        return f"file:{absolute_file(where)}"
    name, _, port = where.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if value and not (kind == "dns" and is_port and plain_host(name)):
        raise ValueError("it is neither file:PATH nor dns:NAME:PORT")
    return value


def checked_fleet_key(key: SecretStr) -> SecretStr:
    """Refuse a key that could be guessed."""
    size = len(key.get_secret_value().encode(errors="replace"))
    if 0 < size < LEAST_KEY_BYTES:
        raise ValueError(f"it has {size} bytes, and a key that nobody can guess has at least {LEAST_KEY_BYTES}")
    return key


def checked_image(value: str) -> str:
    """Refuse what is not the name of a container image."""
    # A leading dash would make it an option on the engine's command line.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", value):
        raise ValueError("it is not the name of an image, like belljar:latest")
    return value


def unmixed(names: list[str]) -> list[str]:
    """Refuse surfaces that have different tools of the same name, or answers of another form than the others."""
    chosen = set(names)
    if "executor" in chosen and len(chosen) > 1:
        raise ValueError("executor has an execute_code of another shape than the others, so it is served alone")
    for (one, other), tools in _SAME_NAMES.items():
        if {one, other} <= chosen:
            raise ValueError(f"{one} and {other} both have {tools}, of different shapes: serve one of the two")
    return names


def checked_rule(entry: str) -> str:
    """Return an entry of `egress` in its normal form, or refuse it."""
    return entry if entry == PACKAGES else str(parse_rule(entry))


def checked_channel(entry: str) -> str:
    """Refuse what is not a channel of conda: a name, a URL or a folder."""
    if not _CHANNEL.fullmatch(entry):
        raise ValueError(f"{entry[:80]!r} is no channel of conda, like conda-forge or https://mirror.example.com/main")
    if re.search(r"://[^/]*@|/t/[^/]+/", entry):
        raise ValueError("a channel's password or token belongs in a netrc file, not in its URL")
    return entry


def checked_module(name: str) -> str:
    """Refuse what is not the dotted name of a module."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise ValueError(f"{name!r} is no module name, like numpy or matplotlib.pyplot")
    return name


_GPU = re.compile(r"\d{1,3}|(GPU|MIG|AMD)-[A-Za-z0-9-]{1,64}(/\d+/\d+)?")


def gpu_list(value: object) -> object:
    """Return a choice of GPUs as a list: empty for "none"; a text has commas between its entries."""
    entries = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    return [] if entries == [NONE] else entries


def checked_gpus(entries: list[str]) -> list[str]:
    """Refuse what names no GPU, and "all" or "none" beside others."""
    for entry in entries:
        if entry in ("all", NONE) and len(entries) > 1:
            raise ValueError(f'"{entry}" stands alone, and here are {len(entries)} entries')
        if entry != "all" and not _GPU.fullmatch(entry):
            raise ValueError(f"{entry[:80]!r} is no GPU: give its index, like 0, or its uuid, like GPU-6e4e17a9-…")
    return entries


def within_sessions(size: int, info: ValidationInfo) -> int:
    """Refuse a pool larger than `max_sessions`, which has to be declared before it in the table."""
    most = info.data.get("max_sessions", size)
    if size > most:
        raise ValueError(f"it is more than max_sessions, which is {most}")
    return size


def with_checkpoints(choice: str, info: ValidationInfo) -> str:
    """Refuse to rewind if no checkpoints are kept."""
    if choice == "rewind" and info.data.get("checkpoints") == 0:
        raise ValueError("there is nothing to rewind to, because checkpoints is 0")
    return choice


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def absolute_file(path: str) -> str:
    """Return the absolute path of a file, so that a change of directory does not matter; empty for none."""
    return str(_absolute(Path(path))) if path else ""


# Host folders that sessions see. Only the form is checked here; `provisioning/host_folders.py` says who sees which,
# `files/host_folders.py` opens them.

_RESERVED_FOLDERS = {"data": "/mnt/data is the session's own folder; choose another name, such as datasets"}
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class FolderSetting(BaseModel):
    """One entry of the setting `folders`; a path alone is a read-only folder that everybody's sessions see."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    path: str
    """The folder on the host, absolute."""
    writable: bool = False
    owners: tuple[str, ...] = ()
    """Whose sessions see it: names of keys, `local`, or `jwt:ISSUER#SUBJECT`; none named means everybody's."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else cast("object", value)

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not path.startswith(("/", "~")):
            raise ValueError("a folder is named by its absolute path, like /home/me/datasets")
        if any(character in path for character in '\0\n,"'):
            raise ValueError("the path of a folder has no commas, quotes or line ends")
        return absolute_file(path)

    def is_for(self, principal: str) -> bool:
        """Tell whether the sessions of this principal see it."""
        return not self.owners or principal in self.owners or principal.removeprefix("key:") in self.owners


def checked_folders(entries: dict[str, FolderSetting]) -> dict[str, FolderSetting]:
    """Refuse names that are taken or could not be a folder's."""
    for name in entries:
        if name in _RESERVED_FOLDERS:
            raise ValueError(_RESERVED_FOLDERS[name])
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name, like sales or invoices-2025")
    return entries


def public_address(url: str) -> str:
    """Return the address of a server as people reach it, without a slash at its end; empty for none."""
    if not url:
        return ""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("is no address like https://belljar.example.org, without a path")
    return f"{parts.scheme}://{parts.netloc.lower()}"


def checked_webhook(url: SecretStr) -> SecretStr:
    """Refuse what is no URL that may be posted to: https, or http at this machine."""
    try:
        parts = urlsplit(url.get_secret_value())
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError("it is no URL") from None
    is_own = host in ("localhost", "127.0.0.1", "::1")
    is_usable = parts.scheme == "https" or (parts.scheme == "http" and is_own)
    if url.get_secret_value() and not (is_usable and host):
        raise ValueError("it is neither an https: URL nor an http: URL on this machine")
    if "@" in parts.netloc or parts.fragment:
        raise ValueError("it has a user name or a fragment, which are not sent")
    return url


def checked_webhook_secret(secret: SecretStr) -> SecretStr:
    """Refuse what is no secret as Standard Webhooks write it; empty for none."""
    text = secret.get_secret_value()
    try:
        size = len(b64decode(text.removeprefix("whsec_"), validate=True))
    except (binascii.Error, ValueError):
        size = 0
    if text and not (text.startswith("whsec_") and 24 <= size <= 64):
        raise ValueError("it is not whsec_ and the Base64 of 24 to 64 bytes")
    return secret


LEAST_KEY_CHARS = 32


def checked_store(url: str) -> str:
    """Return the URL of a store without a slash at its end, or refuse it; empty for none."""
    if not url:
        return ""
    parts = urlsplit(url)
    is_folder = parts.scheme == "file"
    if parts.scheme not in ("file", "s3", "gs", "az"):
        raise ValueError("it begins with none of file:///, s3://, gs:// and az://")
    if is_folder and (parts.netloc or not parts.path.strip("/")):
        raise ValueError("a folder is named like file:///srv/belljar-store, by its absolute path")
    if not is_folder and not parts.netloc:
        raise ValueError(f"there is no bucket behind {parts.scheme}://")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("credentials and options belong into the variables of the cloud's own tools, not here")
    if ".." in parts.path.split("/"):
        raise ValueError("its path contains '..'")
    return url.rstrip("/")


def checked_store_key(key: SecretStr) -> SecretStr:
    """Refuse a key that could be guessed; empty for none."""
    if 0 < len(key.get_secret_value()) < LEAST_KEY_CHARS:
        raise ValueError(f"it is shorter than {LEAST_KEY_CHARS} characters")
    return key


def level_name(value: object) -> object:
    """Return the name of a log level given in any spelling."""
    return _LEVEL_ALIASES.get(value.upper(), value.upper()) if isinstance(value, str) else value


def user_data() -> Path:
    """Return belljar's folder in the user's data folder."""
    return platformdirs.user_data_path("belljar")


def user_downloads() -> Path:
    """Return belljar's folder in the user's downloads."""
    return platformdirs.user_downloads_path() / "belljar"


def limit(least: float, most: float) -> AfterValidator:
    """Return the check that a limit is between two bounds, or none."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            zero = "a limit of 0 leaves nothing to work with: " if value == 0 else ""
            raise ValueError(f'{zero}it should be {least:,} to {most:,}, or "{NONE}" for no limit')
        return value

    return AfterValidator(check)


def _none_spelled(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == NONE else value


def _worker_count(value: object) -> object:
    text = str(value).strip().lower()
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_WORKERS):
        raise ValueError(f'it should be a whole number from 1 to {MOST_WORKERS}, or "auto"')
    return text if text == "auto" else int(text)


Directory = Annotated[Path, AfterValidator(_absolute)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gpus = Annotated[list[str], BeforeValidator(gpu_list), AfterValidator(checked_gpus)]
"""GPUs of the host by index or uuid; empty for none, `["all"]` for all."""
Workers = Annotated[int | Literal["auto"], BeforeValidator(_worker_count)]
Count = Annotated[int | None, BeforeValidator(_none_spelled)]
Share = Annotated[float | None, BeforeValidator(_none_spelled)]
