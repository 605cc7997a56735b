"""Adds packages to a session's layer, with uv, which reaches the package index so that the session need not.

Only wheels are taken, because a source package runs its own code when it is installed. The environment is read and
never changed: what it has is not installed again. Where uv runs is the caller's choice; what it leaves in the staging
folder is trusted no more than what a session leaves in its layer, and is looked at only once uv is gone.
"""

import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from belljar.environments.base import Environment
from belljar.environments.conda import find_tool
from belljar.environments.inventory import Shelf
from belljar.environments.layers import move_into, take_over
from belljar.environments.locks import open_lock
from belljar.environments.presence import PackageStatus, check_installed, check_names
from belljar.environments.uv import OpenUv, Uv, UvAnswer, open_uv_on_host
from belljar.errors import EnvironmentBroken, InvalidArgument
from belljar.files.removal import remove_tree

_TREE = "tree"
_WHEELS_ONLY = ("--only-binary", ":all:")
_ADDITION = re.compile(r"^ [+~] (?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)

Pins = dict[str, Version]
OnStage = Callable[[str], Awaitable[None]]
"""Hears what an installation is busy with."""


@dataclass(frozen=True, slots=True)
class InstallOutcome:
    """One requirement's version now, or why it has none, in the installer's own words."""

    name: str
    installed_version: str | None
    error: str | None
    imported: bool | None = None
    """Whether it imports in the session's running kernel; None where that was not tried."""
    import_error: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A distribution that was put into the layer, and the version that code of the session found before."""

    name: str
    before: str | None
    after: str


def parse_requirement(text: str) -> Requirement:
    """A requirement on the index: no option, path, URL or direct reference."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url:
        raise InvalidArgument(
            f"not a package to install: {text!r}",
            hint="Give names with an optional version, like pandas or pandas>=2; no options, paths or URLs",
        )
    return requirement


def check_requirements(texts: Sequence[str]) -> list[Requirement]:
    """The requirements, or a refusal of the first that is none."""
    check_names(texts)
    return [parse_requirement(text) for text in texts]


async def install(
    environment: Environment,
    layer: Path,
    requirements: Sequence[str],
    *,
    timeout_s: float = 300,
    on_change: Callable[[Change], None] | None = None,
    on_stage: OnStage | None = None,
    open_uv: OpenUv = open_uv_on_host,
) -> list[InstallOutcome]:
    """Install into the layer what the environment lacks; the folder that holds the layer must be ours alone."""
    wanted = check_requirements(requirements)
    if not wanted:
        return []
    try:
        staging = Path(tempfile.mkdtemp(dir=layer.parent, prefix=f".{layer.name}-"))
        try:
            with anyio.fail_after(timeout_s):
                async with open_lock(layer.with_name(f".{layer.name}.lock")):
                    tell = on_stage or _keep_quiet
                    installation = _Installation(environment, layer, staging, timeout_s, on_change or _ignore, tell)
                    return await installation.run(wanted, open_uv)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(remove_tree, staging)
    except TimeoutError:
        return [InstallOutcome(each.name, None, f"not done after {timeout_s:g} s") for each in wanted]
    except OSError as error:
        raise EnvironmentBroken(f"packages cannot be written to {layer}: {error.strerror or error}") from error


async def _keep_quiet(_: str) -> None:
    """Nobody listens."""


def _ignore(_: Change) -> None:
    """Nobody asks."""


class _UvError(Exception):
    """uv's complaint."""


@dataclass(frozen=True, slots=True)
class _Installation:
    environment: Environment
    layer: Path
    staging: Path
    timeout_s: float
    on_change: Callable[[Change], None]
    on_stage: OnStage

    async def run(self, wanted: list[Requirement], open_uv: OpenUv) -> list[InstallOutcome]:
        await self.on_stage(f"resolving {', '.join(each.name for each in wanted)}")
        present = await to_thread.run_sync(_read_pins, self.layer)
        async with open_uv(self.environment, self.staging) as uv:
            fetching = _Fetching(self.environment, self.staging, self.timeout_s, uv)
            accepted, pins, errors = await fetching.resolve_most(wanted, present)
            missing = {name: version for name, version in pins.items() if present.get(name) != version}
            try:
                if missing:
                    await self.on_stage(f"fetching {_spelled(missing)}")
                    await fetching.fetch(missing)
            except _UvError as refusal:
                errors.update(dict.fromkeys(accepted, str(refusal)))
                missing = {}
            errors = {number: f"{error}{self._advice(wanted[number])}" for number, error in errors.items()}
        if missing:
            await self._put_in(missing)
        return await self._outcomes(wanted, errors)

    def _advice(self, requirement: Requirement) -> str:
        """What conda has and the index has not, only its own tool can bring, into the environment itself."""
        if self.environment.kind != "conda":
            return ""
        tool = find_tool()
        command = f"{tool[0] if tool else 'conda'} install -p {self.environment.python.parent.parent}"
        return f"\nA package of conda's own is for the operator to install: {command} {requirement.name}"

    async def _put_in(self, pins: Pins) -> None:
        """Move what was fetched into the layer, and tell of it."""
        before = await to_thread.run_sync(check_installed, self.environment, self.layer, [*pins])
        tree = self.staging / _TREE
        await to_thread.run_sync(take_over, tree)
        await to_thread.run_sync(move_into, self.layer, tree)
        for status, (name, version) in zip(before, pins.items(), strict=True):
            self.on_change(Change(name, status.version, str(version)))

    async def _outcomes(self, wanted: list[Requirement], errors: dict[int, str]) -> list[InstallOutcome]:
        names = [f"{canonicalize_name(each.name)}{each.specifier}" for each in wanted]
        statuses = await to_thread.run_sync(check_installed, self.environment, self.layer, names)
        return [
            InstallOutcome(each.name, None, errors[number])
            if number in errors
            else InstallOutcome(each.name, status.version if status.installed else None, _absence(each, status))
            for number, (each, status) in enumerate(zip(wanted, statuses, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class _Fetching:
    """The part of an installation that uv does. Paths are relative: uv may see the staging folder under another."""

    environment: Environment
    staging: Path
    timeout_s: float
    uv: Uv

    async def resolve_most(self, wanted: list[Requirement], present: Pins) -> tuple[list[int], Pins, dict[int, str]]:
        """All together, or else as many as go together, in order: their numbers, the pins, and the others' errors."""
        everything = list(range(len(wanted)))
        try:
            return everything, await self._resolve(wanted, present), {}
        except _UvError as refusal:
            if len(wanted) == 1:
                return [], {}, {0: str(refusal)}
        accepted: list[int] = []
        pins: Pins = {}
        errors: dict[int, str] = {}
        for number in everything:
            try:
                pins = await self._resolve([wanted[each] for each in (*accepted, number)], present)
                accepted.append(number)
            except _UvError as refusal:
                errors[number] = str(refusal)
        return accepted, pins, errors

    async def _resolve(self, wanted: list[Requirement], present: Pins) -> Pins:
        """What the layer has stays, unless what is wanted cannot live with it."""
        kept = {name: version for name, version in present.items() if _is_fit(name, version, wanted)}
        try:
            return await self._plan(wanted, kept, present)
        except _UvError:
            if not kept:
                raise
            return await self._plan(wanted, {}, present)

    async def _plan(self, wanted: list[Requirement], kept: Pins, present: Pins) -> Pins:
        constraints = _write_new(self.staging, "".join(f"{name}=={version}\n" for name, version in kept.items()))
        # The layer hides what the environment has of the same name, so that a fit version there is no help.
        hidden = [option for name in sorted(present.keys() - kept.keys()) for option in ("--reinstall-package", name)]
        options = ("--dry-run", "--break-system-packages", "--constraints", constraints, *hidden)
        answer = await self._uv(*options, *(_spell(each) for each in wanted))
        return _read_plan(answer.words)

    async def fetch(self, pins: Pins) -> None:
        exact = [f"{name}=={version}" for name, version in pins.items()]
        await self._uv("--no-deps", "--target", _TREE, "--compile-bytecode", *exact)

    async def _uv(self, *arguments: str) -> UvAnswer:
        command = ("pip", "install", "--python", str(self.environment.python), *_WHEELS_ONLY, *arguments)
        answer = await self.uv(command, timeout_s=self.timeout_s)
        if answer.status:
            raise _UvError(answer.complaint)
        return answer


def _write_new(folder: Path, text: str) -> str:
    """A file of a new name: whoever may write in the folder could have put a link under a known one."""
    descriptor, path = tempfile.mkstemp(dir=folder, suffix=".txt")
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
        os.fchmod(descriptor, 0o644)
        file.write(text)
    return Path(path).name


def _absence(wanted: Requirement, status: PackageStatus) -> str | None:
    """Why a requirement that uv did not complain of is still not met."""
    if status.installed:
        return None
    return f"its condition does not hold here: {wanted.marker}" if wanted.marker else "uv did not install it"


def _spell(requirement: Requirement) -> str:
    """Without dots: uv takes `name.whl` for a file."""
    spelled = Requirement(str(requirement))
    spelled.name = canonicalize_name(requirement.name)
    return str(spelled)


def _is_fit(name: str, version: Version, wanted: list[Requirement]) -> bool:
    return all(
        each.specifier.contains(version, prereleases=True) for each in wanted if canonicalize_name(each.name) == name
    )


def _spelled(pins: Pins) -> str:
    return ", ".join(f"{name}=={version}" for name, version in pins.items())


def _read_pins(layer: Path) -> Pins:
    return {name: each.version for name, each in Shelf(layer, is_trusted=False).distributions.items()}


def _read_plan(words: str) -> Pins:
    try:
        return {canonicalize_name(line["name"]): Version(line["version"]) for line in _ADDITION.finditer(words)}
    except InvalidVersion as error:
        raise _UvError(f"uv's plan cannot be read: {error}") from error
