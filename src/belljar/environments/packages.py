"""The packages of a session, as surfaces ask: are they there, put them there, and the fields of an answer."""

from dataclasses import asdict

from pydantic import JsonValue

from belljar.environments.installs import InstallOutcome, install
from belljar.environments.presence import PackageStatus, check_installed

__all__ = ["InstallOutcome", "PackageStatus", "as_fields", "check_installed", "install"]


def as_fields(answer: InstallOutcome | PackageStatus) -> dict[str, JsonValue]:
    """What an answer says of one package, by name."""
    return asdict(answer)
