"""Reads from metadata what is installed in a folder of packages, without importing or running any of it.

A folder that a session can write is hostile: links out of it are not followed, pipes in it are not waited for, and
every read has a limit.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

_ENTRIES_LIMIT = 20_000
_DISTRIBUTIONS_LIMIT = 5_000
_HEADER_LIMIT = 64_000
_RECORD_LIMIT = 8_000_000
_RECORDS_LIMIT = 64_000_000
_MODULE_ENDINGS = ("/", ".py", ".so", ".cpython", ".abi3")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution: its normalised name, its version, and its metadata folder."""

    name: str
    version: Version
    metadata: Path


@dataclass(frozen=True)
class PackageFolder:
    """One folder of packages; links in it are followed only where it is trusted."""

    directory: Path
    is_trusted: bool = True

    @cached_property
    def distributions(self) -> dict[str, Distribution]:
        """Return the installed distributions by normalised name."""
        found: dict[str, Distribution] = {}
        for entry in _entries(self.directory):
            distribution = self._read_distribution(entry)
            if distribution and len(found) < _DISTRIBUTIONS_LIMIT:
                found.setdefault(distribution.name, distribution)
        return found

    def find(self, name: str) -> Distribution | None:
        """Return the distribution of that name, in any spelling."""
        return self.distributions.get(canonicalize_name(name))

    def has_module(self, name: str) -> bool:
        """Tell whether `import name` would find something here; dots are allowed."""
        *parents, last = name.split(".")
        folder = self.directory
        for parent in parents:
            folder /= parent
            if not self._is_folder(folder):
                return False
        if self._is_folder(folder / last) or self._is_file(folder / f"{last}.py"):
            return True
        return any(_is_extension(entry, last) and self._is_file(entry) for entry in _entries(folder))

    def find_owner(self, module: str) -> Distribution | None:
        """Return the distribution that installed a module."""
        path = "\n" + module.replace(".", "/")
        forms = tuple(path + ending for ending in _MODULE_ENDINGS)
        for name, record in self._records.items():
            if any(form in record for form in forms):
                return self.distributions[name]
        return None

    def read_record(self, distribution: Distribution) -> str:
        """Return a distribution's list of files, as its installer wrote it."""
        return self._read(distribution.metadata / "RECORD", _RECORD_LIMIT)

    @cached_property
    def _records(self) -> dict[str, str]:
        records: dict[str, str] = {}
        left = _RECORDS_LIMIT
        for name, distribution in self.distributions.items():
            text = self.read_record(distribution)
            # Packages from before 2012, and those that Linux distributions install, list only their modules.
            text = text or self._read(distribution.metadata / "top_level.txt", _HEADER_LIMIT).replace("\n", "/\n")
            left -= len(text)
            if left < 0:
                break
            records[name] = "\n" + text
        return records

    def _read_distribution(self, entry: Path) -> Distribution | None:
        if entry.suffix not in (".dist-info", ".egg-info") or not (self._is_folder(entry) or self._is_file(entry)):
            return None
        name, _, rest = entry.stem.partition("-")
        version = rest if entry.suffix == ".dist-info" else rest.partition("-")[0]
        try:
            return Distribution(
                canonicalize_name(name, validate=True), Version(version or self._read_version(entry)), entry
            )
        except (InvalidName, InvalidVersion):
            return None

    def _read_version(self, entry: Path) -> str:
        """Read the version of a development install, whose folder has none in its name."""
        header = self._read(entry / "PKG-INFO", _HEADER_LIMIT).partition("\n\n")[0]
        return next((line[9:].strip() for line in header.splitlines() if line.startswith("Version: ")), "")

    def _mode(self, path: Path) -> int:
        try:
            return path.stat(follow_symlinks=self.is_trusted).st_mode
        except OSError:
            return 0

    def _is_folder(self, path: Path) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def _is_file(self, path: Path) -> bool:
        return stat.S_ISREG(self._mode(path))

    def _read(self, path: Path, limit: int) -> str:
        # Without O_NONBLOCK, opening a named pipe that a session left here would block for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if self.is_trusted else os.O_NOFOLLOW)
        try:
            with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - opens a descriptor
                return file.read(limit).decode("utf-8", "replace") if _is_regular(file.fileno()) else ""
        except OSError:
            return ""


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _is_extension(path: Path, module: str) -> bool:
    return path.name.startswith(f"{module}.") and path.suffix == ".so"


def _entries(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _ENTRIES_LIMIT):
                yield Path(entry.path)
    except OSError:
        return
