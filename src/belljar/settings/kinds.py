"""The kinds of values that settings take, each with the check that a type alone cannot make."""

import keyword
import re
from pathlib import Path
from typing import Annotated

import platformdirs
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from belljar.egress.rules import PACKAGES, parse_rule

NONE = "none"
"""Written for a limit that there is not; in Python, None."""

_CHANNEL = re.compile(r"(https?://|file:///|/|~/)[^\s]{1,500}|[A-Za-z0-9][A-Za-z0-9._/-]{0,100}")
_LEVEL_ALIASES = {"WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR"}


def checked_address(value: str) -> str:
    """HOST:PORT, or nothing."""
    host, colon, port = value.rpartition(":")
    is_address = bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65536
    if value and (not is_address or (":" in host and not re.fullmatch(r"\[[0-9A-Fa-f:.%]+\]", host))):
        raise ValueError("it is not HOST:PORT, like 127.0.0.1:8000 or [::1]:8000")
    return value


def checked_image(value: str) -> str:
    """The name of a container's image."""
    # On the engine's command line a dash in front would make it an option.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", value):
        raise ValueError("it is not the name of an image, like belljar:latest")
    return value


def unmixed(names: list[str]) -> list[str]:
    """Refuse sets of tools in which one name would mean two things."""
    if "executor" in names and len(set(names)) > 1:
        raise ValueError("executor has an execute_code of another shape than the others, so it is served alone")
    return names


def checked_rule(entry: str) -> str:
    """An entry of `egress`."""
    return entry if entry == PACKAGES else str(parse_rule(entry))


def checked_channel(entry: str) -> str:
    """A channel of conda: a name, a URL or a folder."""
    if not _CHANNEL.fullmatch(entry):
        raise ValueError(f"{entry[:80]!r} is no channel of conda, like conda-forge or https://mirror.example.com/main")
    if re.search(r"://[^/]*@|/t/[^/]+/", entry):
        raise ValueError("a channel's password or token belongs into a netrc file, not into its URL")
    return entry


def checked_module(name: str) -> str:
    """The dotted name of a module."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise ValueError(f"{name!r} is no module name, like numpy or matplotlib.pyplot")
    return name


def within_sessions(size: int, info: ValidationInfo) -> int:
    """Refuse a pool that could not be handed out; checked after `max_sessions`, which stands before it."""
    most = info.data.get("max_sessions", size)
    if size > most:
        raise ValueError(f"it is more than max_sessions, which is {most}")
    return size


def with_checkpoints(choice: str, info: ValidationInfo) -> str:
    """Refuse to rewind where nothing is kept to rewind to."""
    if choice == "rewind" and info.data.get("checkpoints") == 0:
        raise ValueError("there is nothing to rewind to, because checkpoints is 0")
    return choice


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def absolute_file(path: str) -> str:
    """The path of a file, wherever we go from here; empty for none."""
    return str(_absolute(Path(path))) if path else ""


def level_name(value: object) -> object:
    """A log level in whatever spelling."""
    return _LEVEL_ALIASES.get(value.upper(), value.upper()) if isinstance(value, str) else value


def user_data() -> Path:
    """The user's data folder."""
    return platformdirs.user_data_path("belljar")


def user_downloads() -> Path:
    """Ours in the user's downloads."""
    return platformdirs.user_downloads_path() / "belljar"


def limit(least: float, most: float) -> AfterValidator:
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
