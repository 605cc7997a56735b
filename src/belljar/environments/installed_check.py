"""Answers whether packages are installed for a session, and which modules a distribution provides.

An environment is described by its Python version, its packages and its size on disk. Packages are named by distribution
or import name, with or without a version. The session's layer, its own folder of packages, comes before the
environment's. Only metadata is read; nothing is imported.
"""

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from belljar.environments.base import Environment, Interpreter, inspect_interpreter
from belljar.environments.conda.places import conda_packages, is_conda
from belljar.environments.conda.prefix import layer_package_folders, own_prefix, own_record
from belljar.environments.installed_packages import Distribution, PackageFolder
from belljar.errors import InvalidArgument

NAMES_LIMIT = 200
NAME_LIMIT_CHARS = 500


@dataclass(frozen=True, slots=True)
class PackageStatus:
    """Whether a package is installed in a version that fits; `version` is the installed one, fitting or not."""

    name: str
    installed: bool
    version: str | None = None
    location: str | None = None
    note: str = ""


def check_installed(environment: Environment, layer: Path | None, names: Sequence[str]) -> list[PackageStatus]:
    """Return the status of each name, in order; blocks while the environment's interpreter reports its paths."""
    check_names(names)
    interpreter = inspect_interpreter(environment.python)
    folders = [PackageFolder(path) for path in interpreter.paths]
    others = conda_packages(interpreter.prefix)
    if layer is not None:
        folders = [*layer_package_folders(layer, interpreter.version), *folders]
        others |= conda_packages(own_prefix(layer))
    return [_check(name, folders, interpreter.standard_library, others) for name in names]


def check_names(names: Sequence[str]) -> None:
    """Refuse more names, or longer ones, than any call needs."""
    if len(names) > NAMES_LIMIT:
        raise InvalidArgument(f"{len(names)} packages in one call", hint=f"Name at most {NAMES_LIMIT}")
    for name in names:
        if len(name) > NAME_LIMIT_CHARS:
            raise InvalidArgument(f"a package name of {len(name)} characters: {name[:40]}…")


def _check(
    text: str, folders: list[PackageFolder], standard_library: frozenset[str], others: Mapping[str, str]
) -> PackageStatus:
    parsed = _parse(text)
    if parsed is None:
        return PackageStatus(text, False, note="not a package name")
    name, specifier = parsed
    for folder in folders:
        if distribution := folder.find(name):
            return _judge(text, folder, distribution, specifier)
    if name.partition(".")[0] in standard_library:
        return PackageStatus(text, True, note="part of Python's standard library")
    for folder in folders if _is_module_name(name) else ():
        if folder.has_module(name):
            return _judge_module(text, folder, name, specifier)
    other = others.get(name.lower())
    return _judge_other(text, other, specifier) if other else PackageStatus(text, False)


def _parse(text: str) -> tuple[str, SpecifierSet] | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        # `_pytest` can be imported although no distribution may have that name.
        return (text.strip(), SpecifierSet()) if _is_module_name(text.strip()) else None
    return None if requirement.url else (requirement.name, requirement.specifier)


def _is_module_name(name: str) -> bool:
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None


def _judge_other(text: str, version: str, specifier: SpecifierSet) -> PackageStatus:
    """Return the status of a conda package that is no Python distribution, such as a library or a program."""
    try:
        is_fit = specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        is_fit = not specifier
    note = "a package of conda, nothing to import"
    return PackageStatus(text, is_fit, version, note=note if is_fit else f"{note}; {version} is not {specifier}")


def _judge_module(text: str, folder: PackageFolder, module: str, specifier: SpecifierSet) -> PackageStatus:
    owner = folder.find_owner(module)
    if owner:
        return _judge(text, folder, owner, specifier, f"imported as {module}, installed by {owner.name}")
    note = "a module that no package claims, so its version is unknown"
    return PackageStatus(text, not specifier, location=str(folder.directory), note=note)


def _judge(
    text: str, folder: PackageFolder, distribution: Distribution, specifier: SpecifierSet, note: str = ""
) -> PackageStatus:
    is_fit = specifier.contains(distribution.version, prereleases=True)
    unfit = "" if is_fit else f"{distribution.name} {distribution.version} is not {specifier}"
    notes = "; ".join(part for part in (note, unfit) if part)
    return PackageStatus(text, is_fit, str(distribution.version), str(folder.directory), notes)


# Modules of a distribution, from its list of files.

_FILES_LIMIT = 100_000
_MODULES_LIMIT = 5
_PACKAGES = "/site-packages/"
_MODULE = re.compile(r"[^\W\d]\w*")
# Folders that some packages install beside their own by mistake; importing the package does not mean them.
_STRAY_FOLDERS = frozenset(
    {"test", "tests", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "scripts"}
)


def modules_of(environment: Environment, layer: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the modules to import for each distribution, the session's layer first; blocks shortly."""
    interpreter = inspect_interpreter(environment.python)
    folders = [*layer_package_folders(layer, interpreter.version), *map(PackageFolder, interpreter.paths)]
    return {name: _modules(name, folders) or _modules_of_conda(name, layer) for name in names}


def _modules(name: str, folders: Iterable[PackageFolder]) -> list[str]:
    for folder in folders:
        if distribution := folder.find(name):
            return _likely_imports(name, _listed(_rows(folder.read_record(distribution))))
    return []


def _modules_of_conda(name: str, layer: Path) -> list[str]:
    """Return the modules of a conda package whose distribution has another name, from conda's record of its files."""
    files = (path.partition(_PACKAGES) for path in own_record(layer, name.lower()))
    return _likely_imports(name, _listed([inside for _, found, inside in files if found]))


def _rows(record: str) -> list[str]:
    try:
        return [row[0] for row in islice(csv.reader(record.splitlines()), _FILES_LIMIT) if row]
    except csv.Error:
        return []


def _listed(rows: Iterable[str]) -> Iterator[str]:
    """Yield top-level modules, and packages that are in no other package, because namespace folders have no code."""
    paths = [PurePosixPath(row) for row in rows if not row.startswith(("/", "..")) and row.endswith((".py", ".so"))]
    packages = {path.parent for path in paths if path.stem == "__init__"}
    for path in paths:
        folder = path.parent
        if path.stem == "__init__":
            if not any(parent in packages for parent in folder.parents) and _is_name(folder):
                yield ".".join(folder.parts)
        elif folder == PurePosixPath() and _is_name(PurePosixPath(path.name.partition(".")[0])):
            yield path.name.partition(".")[0]


def _is_name(path: PurePosixPath) -> bool:
    return bool(path.parts) and all(_MODULE.fullmatch(part) for part in path.parts)


def _likely_imports(name: str, found: Iterable[str]) -> list[str]:
    """Return the modules named like the distribution, or else the public ones, or else all; at most five."""
    modules = list(dict.fromkeys(found))
    same = [module for module in modules if canonicalize_name(module) == canonicalize_name(name)]
    public = [module for module in modules if not module.startswith("_") and module not in _STRAY_FOLDERS]
    return (same or public or modules)[:_MODULES_LIMIT]


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """The version of an environment's Python, its packages by name, and the disk space that it takes."""

    version: str
    packages: dict[str, str]
    size_bytes: int


def describe_packages(environment: Environment) -> EnvironmentDescription:
    """Describe an environment; blocks while its interpreter runs and its tree is walked."""
    return describe_interpreter(inspect_interpreter(environment.python))


def describe_interpreter(interpreter: Interpreter) -> EnvironmentDescription:
    """Describe the environment of an interpreter that was inspected; blocks while its tree is walked."""
    packages = {**conda_packages(interpreter.prefix), **installed_packages(interpreter.paths)}
    return EnvironmentDescription(
        interpreter.version, dict(sorted(packages.items())), size_on_disk(_own_trees(interpreter))
    )


def installed_packages(paths: Iterable[Path]) -> dict[str, str]:
    """Return the version of each distribution that code would find on these paths, by name."""
    found: dict[str, str] = {}
    for path in paths:
        for name, distribution in PackageFolder(path).distributions.items():
            found.setdefault(name, str(distribution.version))
    return found


def _own_trees(interpreter: Interpreter) -> list[Path]:
    """Return an environment's own folder; for the system's Python its packages, because its prefix is the host's."""
    if interpreter.is_virtual or is_conda(interpreter.prefix):
        return [interpreter.prefix]
    return [path for path in interpreter.paths if path.name in ("site-packages", "dist-packages")]


def size_on_disk(trees: Iterable[Path]) -> int:
    """Return the bytes on disk of all files below these folders; hard links count once, links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    waiting = [*trees]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
        except OSError:
            continue
    return sum(sizes.values())
