"""The list of files that the user trusts, each a `belljar.toml` or a `.env`: their paths and digests of their content.

The list is in the user's own configuration folder, which no session can write. A file that has changed since is not
trusted any more, because the user trusts the content that they have read, not the path.
"""

import hashlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import platformdirs

from belljar.errors import SettingsError

TRUSTED_FILE = "trusted.json"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_folder() -> Path | None:
    """Return the folder of the user's own settings; None if a variable makes it relative to the working directory."""
    folder = platformdirs.user_config_path("belljar")
    # The XDG specification says to ignore a relative path; here it would let the working directory provide the list.
    return folder if folder.is_absolute() else None


def is_trusted(file: Path, content: bytes) -> bool:
    """Tell whether the user trusts a file with this content."""
    return trusted_files().get(_key(file)) == _digest(content)


def trusted_files() -> dict[str, str]:
    """Return the digests of trusted files by path; empty if somebody else could have written the list."""
    place = _place()
    if place is None:
        return {}
    try:
        with place.open("rb") as file:
            status = os.fstat(file.fileno())
            # Windows says of every file that all may write it.
            if sys.platform != "win32" and (
                status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_MAY_WRITE
            ):
                return {}
            listed: Any = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{place} cannot be read: {error}", hint="Mend or remove it") from error
    return {str(path): str(digest) for path, digest in cast("dict[Any, Any]", listed).items()} if listed else {}


def trust(file: Path, content: bytes) -> None:
    """Trust a file as long as it has this content."""
    _write({**trusted_files(), _key(file): _digest(content)})


def distrust(file: Path) -> bool:
    """Remove a file from the list; tell whether it was on it."""
    listed = trusted_files()
    was_listed = listed.pop(_key(file), None) is not None
    if was_listed:
        _write(listed)
    return was_listed


def _write(listed: dict[str, str]) -> None:
    place = _place()
    if place is None:
        raise SettingsError("there is no folder for settings of yours", hint="Set XDG_CONFIG_HOME to a whole path")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, prefix=f".{TRUSTED_FILE}.", delete=False) as draft:
            draft.write(json.dumps(listed, indent=2) + "\n")
        Path(draft.name).replace(place)
    except OSError as error:
        raise SettingsError(f"{place} cannot be written: {error.strerror}") from error


def _place() -> Path | None:
    folder = user_folder()
    return folder / TRUSTED_FILE if folder else None


def _key(file: Path) -> str:
    # The folder's real path, because relative paths in the file count from there. The file itself may be a link,
    # because its content is what is trusted.
    return str(file.absolute().parent.resolve() / file.name)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
