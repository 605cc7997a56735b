"""What surfaces use for a session's packages: checking, installing, and turning a result into fields."""

import shlex
from collections.abc import Iterable
from dataclasses import asdict

from pydantic import JsonValue

from belljar.environments.description import EnvironmentDescription, describe_packages
from belljar.environments.installs import InstallOutcome, OnStage, PackageChange, check_requirements, install
from belljar.environments.presence import PackageStatus, check_installed, modules_of

__all__ = [
    "EnvironmentDescription",
    "InstallOutcome",
    "OnStage",
    "PackageChange",
    "PackageStatus",
    "as_fields",
    "check_installed",
    "check_requirements",
    "describe_packages",
    "install",
    "modules_of",
    "pip_line",
]


def pip_line(requirements: Iterable[str]) -> str:
    """Return the line of a notebook that installs these packages."""
    return f"%pip install {' '.join(map(shlex.quote, requirements))}"


def as_fields(answer: InstallOutcome | PackageStatus) -> dict[str, JsonValue]:
    """Return the fields of one package's result, by name."""
    fields = asdict(answer)
    if isinstance(answer, PackageStatus):
        return fields
    # Left out when empty, because they matter only if packages come from more than one source.
    return {name: value for name, value in fields.items() if value or name not in ("source", "note")}
