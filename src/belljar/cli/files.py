"""Files that commands write where the person said: never over others unless they said that too."""

import errno
import os
import secrets
from pathlib import Path

from belljar.errors import InvalidArgument


def write_file(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file as a whole or not at all; with `force` also in place of one that is there."""
    try:
        if force:
            _replace(path, content)
        else:
            _write_new(path, content)
    except FileExistsError as error:
        raise InvalidArgument(f"{path} exists already", hint="Name another file, or add --force") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}", hint="Name another file") from error


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _replace(path: Path, content: bytes) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    beside = path.parent / f".{secrets.token_hex(4)}.tmp"
    _write_new(beside, content)
    try:
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise
