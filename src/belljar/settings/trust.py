"""The folders whose `belljar.toml` the user trusts: the path of each file with the digest of what it said then.

The list is in the user's own configuration folder, which no session can write. A file that has changed since is not
trusted any more, so trust is in what somebody has read, not in a place.
"""

import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, cast

import platformdirs

from belljar.errors import SettingsError

TRUSTED_FILE = "trusted.json"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_folder() -> Path | None:
    """Return the folder of the user's own settings; None when a variable puts it wherever the command is run."""
    folder = platformdirs.user_config_path("belljar")
    # By the XDG specification a relative path is to be ignored; here it would be the working directory's to fill.
    return folder if folder.is_absolute() else None


def is_trusted(file: Path, content: bytes) -> bool:
    """Tell whether the user trusts a file that says this."""
    return trusted_files().get(_key(file)) == _digest(content)


def trusted_files() -> dict[str, str]:
    """Return the digests of trusted files by their path; none if somebody else could have written the list."""
    place = _place()
    if place is None:
        return {}
    try:
        with place.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_MAY_WRITE:
                return {}
            listed: Any = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{place} cannot be read: {error}", hint="Mend or remove it") from error
    return {str(path): str(digest) for path, digest in cast("dict[Any, Any]", listed).items()} if listed else {}


def trust(file: Path, content: bytes) -> None:
    """Trust a file as long as it says this."""
    _write({**trusted_files(), _key(file): _digest(content)})


def distrust(file: Path) -> bool:
    """Take a file off the list; tell whether it was on it."""
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
    # The folder's real path, since its relative paths count from there; the file itself may be a link: what counts is
    # what it says.
    return str(file.absolute().parent.resolve() / file.name)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
