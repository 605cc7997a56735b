"""Copies packages of the server's own environment for sessions, so that a host without an index can run them.

The server needs IPython and cloudpickle itself, so wherever it is installed they are there too. An interpreter of the
same kind can use the very same files.
"""

import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from belljar.environments.base import Interpreter
from belljar.files.private import make_folder, shown_mode

__all__ = ["copy_packages", "own_packages"]


def own_packages(interpreter: Interpreter, requirements: Sequence[str]) -> list[Distribution]:
    """Return the server's packages that satisfy the requirements, with all that they need; none where that is not so.

    None are returned for an interpreter of another version or platform either.
    """
    ours = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    if interpreter.tag != ours or interpreter.release != sys.version_info[:2]:
        return []
    found: dict[str, Distribution] = {}
    wanted = [Requirement(requirement) for requirement in requirements]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            return []
        if not requirement.specifier.contains(package.version, prereleases=True) or not package.files:
            return []
        if name not in found:
            found[name] = package
            wanted += _needs(package)
    return [*found.values()]


def copy_packages(packages: Sequence[Distribution], folder: Path) -> None:
    """Copy the files of packages into a folder, without their commands; `OSError` if that cannot be done."""
    for package in packages:
        for file in package.files or []:
            source = Path(str(package.locate_file(file)))
            # Commands and manuals lie above the packages, and nobody calls them in there.
            if ".." in PurePosixPath(file).parts or not source.is_file():
                continue
            target = folder / file
            _make_shown(target.parent)
            shutil.copy2(source, target)
            target.chmod(shown_mode(is_folder=False))


def _make_shown(folder: Path) -> None:
    """Make a folder that sessions can read, whatever the umask is, and the missing ones above it."""
    if not folder.is_dir():
        _make_shown(folder.parent)
        make_folder(folder, shown_mode(is_folder=True))


def _needs(package: Distribution) -> Iterator[Requirement]:
    for text in package.requires or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
