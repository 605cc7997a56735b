"""Answers whether packages are installed for a session: by distribution name, import name, or with a version.

The session's layer, a folder of packages of its own, comes before the environment's. Nothing is imported.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from belljar.environments.base import Environment, inspect_interpreter
from belljar.environments.conda import conda_packages
from belljar.environments.inventory import Distribution, Shelf
from belljar.environments.prefixes import layer_shelves, own_prefix
from belljar.errors import InvalidArgument

NAMES_LIMIT = 200
NAME_LIMIT_CHARS = 500


@dataclass(frozen=True, slots=True)
class PackageStatus:
    """Whether a package is there; an unfit version is not, though `version` says what there is."""

    name: str
    installed: bool
    version: str | None = None
    location: str | None = None
    note: str = ""


def check_installed(environment: Environment, layer: Path | None, names: Sequence[str]) -> list[PackageStatus]:
    """The status of each name, in order; blocks while the environment's interpreter tells where it looks."""
    check_names(names)
    interpreter = inspect_interpreter(environment.python)
    shelves = [Shelf(path) for path in interpreter.paths]
    others = conda_packages(interpreter.prefix)
    if layer is not None:
        shelves = [*layer_shelves(layer, interpreter.version), *shelves]
        others |= conda_packages(own_prefix(layer))
    return [_check(name, shelves, interpreter.standard_library, others) for name in names]


def check_names(names: Sequence[str]) -> None:
    """Refuse more, or longer, names than any call needs."""
    if len(names) > NAMES_LIMIT:
        raise InvalidArgument(f"{len(names)} packages in one call", hint=f"Name at most {NAMES_LIMIT}")
    for name in names:
        if len(name) > NAME_LIMIT_CHARS:
            raise InvalidArgument(f"a package name of {len(name)} characters: {name[:40]}…")


def _check(
    text: str, shelves: list[Shelf], standard_library: frozenset[str], others: Mapping[str, str]
) -> PackageStatus:
    parsed = _parse(text)
    if parsed is None:
        return PackageStatus(text, False, note="not a package name")
    name, specifier = parsed
    for shelf in shelves:
        if distribution := shelf.find(name):
            return _judge(text, shelf, distribution, specifier)
    if name.partition(".")[0] in standard_library:
        return PackageStatus(text, True, note="part of Python's standard library")
    for shelf in shelves if _is_module_name(name) else ():
        if shelf.has_module(name):
            return _judge_module(text, shelf, name, specifier)
    other = others.get(name.lower())
    return _judge_other(text, other, specifier) if other else PackageStatus(text, False)


def _parse(text: str) -> tuple[str, SpecifierSet] | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        # `_pytest` can be imported though no distribution may be called that.
        return (text.strip(), SpecifierSet()) if _is_module_name(text.strip()) else None
    return None if requirement.url else (requirement.name, requirement.specifier)


def _is_module_name(name: str) -> bool:
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None


def _judge_other(text: str, version: str, specifier: SpecifierSet) -> PackageStatus:
    """A package of conda that Python knows nothing of, such as a library or a program."""
    try:
        is_fit = specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        is_fit = not specifier
    note = "a package of conda, nothing to import"
    return PackageStatus(text, is_fit, version, note=note if is_fit else f"{note}; {version} is not {specifier}")


def _judge_module(text: str, shelf: Shelf, module: str, specifier: SpecifierSet) -> PackageStatus:
    owner = shelf.find_owner(module)
    if owner:
        return _judge(text, shelf, owner, specifier, f"imported as {module}, installed by {owner.name}")
    note = "a module that no package claims, so its version is unknown"
    return PackageStatus(text, not specifier, location=str(shelf.directory), note=note)


def _judge(
    text: str, shelf: Shelf, distribution: Distribution, specifier: SpecifierSet, note: str = ""
) -> PackageStatus:
    is_fit = specifier.contains(distribution.version, prereleases=True)
    unfit = "" if is_fit else f"{distribution.name} {distribution.version} is not {specifier}"
    notes = "; ".join(part for part in (note, unfit) if part)
    return PackageStatus(text, is_fit, str(distribution.version), str(shelf.directory), notes)
