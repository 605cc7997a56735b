"""Describes an environment: its Python version, its packages, its size on disk. Imports none of its packages."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from belljar.environments.base import Environment, Interpreter, inspect_interpreter
from belljar.environments.conda.places import conda_packages
from belljar.environments.installed_packages import PackageFolder


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
    if interpreter.is_virtual or (interpreter.prefix / "conda-meta").is_dir():
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
