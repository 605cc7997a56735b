"""Wheels, with uv: which ones go together for a session, and fetching them into a folder.

Only wheels are taken, because a source package runs its own code when it is installed. Where uv runs is the caller's
choice; nothing here looks at what it leaves.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from belljar.environments.base import Environment
from belljar.environments.uv import Uv, UvAnswer

TREE = "tree"
"""The folder in the staging folder that wheels are put into."""
_WHEELS_ONLY = ("--only-binary", ":all:")
_ADDITION = re.compile(r"^ [+~] (?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)

Pins = dict[str, Version]


class UvError(Exception):
    """uv's complaint."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """The part of an installation that uv does. Paths are relative: uv may see the staging folder under another."""

    environment: Environment
    staging: Path
    timeout_s: float
    uv: Uv
    agreed: Sequence[Requirement] = ()
    """What was brought in another way for the same request; no wheel may contradict it."""

    async def resolve_most(self, wanted: list[Requirement], present: Pins) -> tuple[list[int], Pins, dict[int, str]]:
        """All together, or else as many as go together, in order: their numbers, the pins, and the others' errors."""
        everything = list(range(len(wanted)))
        try:
            return everything, await self._resolve(wanted, present), {}
        except UvError as refusal:
            if len(wanted) == 1:
                return [], {}, {0: str(refusal)}
        accepted: list[int] = []
        pins: Pins = {}
        errors: dict[int, str] = {}
        for number in everything:
            try:
                pins = await self._resolve([wanted[each] for each in (*accepted, number)], present)
                accepted.append(number)
            except UvError as refusal:
                errors[number] = str(refusal)
        return accepted, pins, errors

    async def _resolve(self, wanted: list[Requirement], present: Pins) -> Pins:
        """What the layer has stays, unless what is wanted cannot live with it."""
        kept = {name: version for name, version in present.items() if _is_fit(name, version, wanted)}
        try:
            return await self._plan(wanted, kept, present)
        except UvError:
            if not kept:
                raise
            return await self._plan(wanted, {}, present)

    async def _plan(self, wanted: list[Requirement], kept: Pins, present: Pins) -> Pins:
        lines = [f"{name}=={version}" for name, version in kept.items()]
        lines += [f"{canonicalize_name(each.name)}{each.specifier}" for each in self.agreed]
        constraints = _write_new(self.staging, "".join(f"{line}\n" for line in lines))
        # The layer hides what the environment has of the same name, so that a fit version there is no help.
        hidden = [option for name in sorted(present.keys() - kept.keys()) for option in ("--reinstall-package", name)]
        options = ("--dry-run", "--break-system-packages", "--constraints", constraints, *hidden)
        answer = await self._uv(*options, *(_spell(each) for each in wanted))
        return _read_plan(answer.words)

    async def fetch(self, pins: Pins) -> None:
        """Put these versions and nothing else into the tree."""
        exact = [f"{name}=={version}" for name, version in pins.items()]
        await self._uv("--no-deps", "--target", TREE, "--compile-bytecode", *exact)

    async def _uv(self, *arguments: str) -> UvAnswer:
        command = ("pip", "install", "--python", str(self.environment.python), *_WHEELS_ONLY, *arguments)
        answer = await self.uv(command, timeout_s=self.timeout_s)
        if answer.status:
            raise UvError(answer.complaint)
        return answer


def _write_new(folder: Path, text: str) -> str:
    """A file of a new name: whoever may write in the folder could have put a link under a known one."""
    descriptor, path = tempfile.mkstemp(dir=folder, suffix=".txt")
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
        os.fchmod(descriptor, 0o644)
        file.write(text)
    return Path(path).name


def _spell(requirement: Requirement) -> str:
    """Without dots: uv takes `name.whl` for a file."""
    spelled = Requirement(str(requirement))
    spelled.name = canonicalize_name(requirement.name)
    return str(spelled)


def _is_fit(name: str, version: Version, wanted: list[Requirement]) -> bool:
    return all(
        each.specifier.contains(version, prereleases=True) for each in wanted if canonicalize_name(each.name) == name
    )


def _read_plan(words: str) -> Pins:
    try:
        return {canonicalize_name(line["name"]): Version(line["version"]) for line in _ADDITION.finditer(words)}
    except InvalidVersion as error:
        raise UvError(f"uv's plan cannot be read: {error}") from error
