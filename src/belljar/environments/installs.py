"""Adds packages to a session's layer, with uv, which reaches the package index so that the session need not.

In an environment of conda its channels are asked first, and uv brings what they do not. The environment is read and
never changed: what it has is not installed again. Where uv runs is the caller's choice; what it leaves in the staging
folder is trusted no more than what a session leaves in its layer, and is looked at only once uv is gone.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from anyio import to_thread
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from belljar.environments.base import Environment
from belljar.environments.conda.installs import ChannelInstall, install_from_channels
from belljar.environments.conda.places import conda_packages, find_tool
from belljar.environments.conda.prefix import layer_shelves, own_prefix
from belljar.environments.file_lock import open_lock
from belljar.environments.install_room import InstallRoom, NoRoom
from belljar.environments.layers import move_into, take_over
from belljar.environments.managed import CONDA_LOCK
from belljar.environments.presence import PackageStatus, check_installed, check_names
from belljar.environments.uv import SIDE, OpenUv, Uv, UvAnswer, open_uv_on_host
from belljar.errors import EnvironmentBroken, InvalidArgument
from belljar.files.fd_walk import remove_tree

# Wheels, with uv: which ones go together for a session, and fetching them into a folder.
# Only wheels are taken, because a source package runs its own code when it is installed. Where uv runs is the
# caller's choice; nothing here looks at what it leaves.

TREE = "tree"
"""The folder in the staging folder that wheels are put into."""
_WHEELS_ONLY = ("--only-binary", ":all:")
_ADDITION = re.compile(r"^ [+~] (?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)

Pins = dict[str, Version]


class UvError(Exception):
    """uv's complaint."""


@dataclass(frozen=True, slots=True)
class WheelFetch:
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


# `===` may be followed by anything, and conda's solver reads a channel or a URL out of brackets.
_VERSION = re.compile(r"[A-Za-z0-9_.!+*-]+")

# All reasons together, because a hundred packages may be refused for the same long one.
_REASONS_CHARS = 100_000

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
    source: str = ""
    """In an environment of conda, where it was fetched from now: conda or pypi."""
    note: str = ""
    """Why it is a wheel though the environment is conda's."""


@dataclass(frozen=True, slots=True)
class PackageChange:
    """A package that was put into the layer, and the version that code of the session found before."""

    name: str
    before: str | None
    after: str
    build: str = ""
    """Of a package of conda."""

    @property
    def pin(self) -> str:
        """It alone, as its installer takes it."""
        return f"{self.name}={self.after}={self.build}" if self.build else f"{self.name}=={self.after}"


def parse_requirement(text: str) -> Requirement:
    """A requirement on the index: no option, path, URL or direct reference."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    versions = [each.version for each in requirement.specifier] if requirement else []
    if requirement is None or requirement.url or not all(map(_VERSION.fullmatch, versions)):
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
    on_change: Callable[[PackageChange], None] | None = None,
    on_stage: OnStage | None = None,
    open_uv: OpenUv = open_uv_on_host,
    room: InstallRoom | None = None,
) -> list[InstallOutcome]:
    """Install into the layer what the environment lacks; the folder that holds the layer must be ours alone.

    `TooLarge` where there is no room to begin with; packages that turn out to need more than there is are outcomes.
    """
    wanted = check_requirements(requirements)
    if not wanted:
        return []
    room = room or InstallRoom((), 0)
    try:
        staging = Path(tempfile.mkdtemp(dir=layer.parent, prefix=f".{layer.name}-"))
        try:
            with anyio.fail_after(timeout_s):
                async with open_lock(layer.with_name(f".{layer.name}.lock")):
                    tell = on_stage or _keep_quiet
                    hear = on_change or _ignore
                    installation = _Installation(environment, layer, staging, timeout_s, hear, tell, room)

                    def filled() -> list[Path]:
                        return [staging, *layer.parent.glob(f"{SIDE}*")]

                    async with room.holding(filled, has_channels=bool(environment.channels)):
                        return await installation.run(wanted, open_uv)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(remove_tree, staging)
    except NoRoom as refusal:
        return [InstallOutcome(each.name, None, str(refusal)) for each in wanted]
    except TimeoutError:
        return [InstallOutcome(each.name, None, f"not done after {timeout_s:g} s") for each in wanted]
    except OSError as error:
        raise EnvironmentBroken(f"packages cannot be written to {layer}: {error.strerror or error}") from error


async def _keep_quiet(_: str) -> None:
    """Nobody listens."""


def _ignore(_: PackageChange) -> None:
    """Nobody asks."""


@dataclass(frozen=True, slots=True)
class _Installation:
    environment: Environment
    layer: Path
    staging: Path
    timeout_s: float
    on_change: Callable[[PackageChange], None]
    on_stage: OnStage
    room: InstallRoom

    async def run(self, wanted: list[Requirement], open_uv: OpenUv) -> list[InstallOutcome]:
        await self.on_stage(f"resolving {', '.join(each.name for each in wanted)}")
        channels = await self._from_channels(wanted, open_uv) if self.environment.channels else ChannelInstall()
        left = [number for number in range(len(wanted)) if number not in {*channels.settled, *channels.refused}]
        agreed = [wanted[number] for number in channels.settled if wanted[number].specifier]
        errors = await self._from_index([wanted[number] for number in left], agreed, open_uv) if left else {}
        faults = {**channels.refused, **{left[place]: error for place, error in errors.items()}}
        longest = _REASONS_CHARS // len(wanted)
        reasons = {number: f"{_cut(fault, longest)}{self._advice(wanted[number])}" for number, fault in faults.items()}
        return await self._outcomes(wanted, channels, reasons)

    async def _from_channels(self, wanted: list[Requirement], open_uv: OpenUv) -> ChannelInstall:
        pins = await to_thread.run_sync(_read_pins, self.layer, self.environment.version)
        others = await to_thread.run_sync(conda_packages, own_prefix(self.layer))
        before = {**{name: str(version) for name, version in pins.items()}, **others}
        found = await install_from_channels(
            self.environment, self.layer, self.staging, wanted, open_uv, timeout_s=self.timeout_s, room=self.room
        )
        for each in found.installed:
            self.on_change(PackageChange(each.name, before.get(each.name), each.version, each.build))
        return found

    async def _from_index(
        self, wanted: list[Requirement], agreed: list[Requirement], open_uv: OpenUv
    ) -> dict[int, str]:
        """Wheels; the errors of those that there are none of."""
        present = await to_thread.run_sync(_read_pins, self.layer, self.environment.version)
        async with open_uv(self.environment, self.staging) as uv:
            fetching = WheelFetch(self.environment, self.staging, self.timeout_s, uv, agreed)
            accepted, pins, errors = await fetching.resolve_most(wanted, present)
            missing = {name: version for name, version in pins.items() if present.get(name) != version}
            try:
                if missing:
                    await self.on_stage(f"fetching {_spelled(missing)}")
                    await fetching.fetch(missing)
            except UvError as refusal:
                await self.room.check_complaint(str(refusal))
                errors.update(dict.fromkeys(accepted, str(refusal)))
                missing = {}
        if missing:
            await self._put_in(missing)
        return errors

    def _advice(self, requirement: Requirement) -> str:
        """What conda's tool could bring into the environment itself."""
        if self.environment.kind != "conda":
            return ""
        wanted = f"{requirement.name}{requirement.specifier}"
        if (self.environment.prefix / CONDA_LOCK).is_file():
            return f"\nThe operator can add it to the environment.yml that {self.environment.name} is made of: {wanted}"
        tool = find_tool()
        command = f"{tool[0] if tool else 'conda'} install -p {shlex.quote(str(self.environment.prefix))}"
        return f"\nA package of conda's own is for the operator to install: {command} {shlex.quote(wanted)}"

    async def _put_in(self, pins: Pins) -> None:
        """Move what was fetched into the layer, and tell of it."""
        before = await to_thread.run_sync(check_installed, self.environment, self.layer, [*pins])
        tree = self.staging / TREE
        await self.room.check_fits(tree)
        await to_thread.run_sync(take_over, tree)
        await to_thread.run_sync(move_into, self.layer, tree)
        for status, (name, version) in zip(before, pins.items(), strict=True):
            self.on_change(PackageChange(name, status.version, str(version)))

    async def _outcomes(
        self, wanted: list[Requirement], channels: ChannelInstall, errors: dict[int, str]
    ) -> list[InstallOutcome]:
        known = {
            number: channels.settled.get(number, canonicalize_name(each.name)) for number, each in enumerate(wanted)
        }
        names = [f"{known[number]}{each.specifier}" for number, each in enumerate(wanted)]
        statuses = await to_thread.run_sync(check_installed, self.environment, self.layer, names)
        outcomes = [
            _outcome(each, status, errors.get(number))
            for number, (each, status) in enumerate(zip(wanted, statuses, strict=True))
        ]
        if self.environment.kind != "conda":
            return outcomes
        return [_told(outcome, number, channels) for number, outcome in enumerate(outcomes)]


def _outcome(wanted: Requirement, status: PackageStatus, error: str | None) -> InstallOutcome:
    if error is not None:
        return InstallOutcome(wanted.name, None, error)
    return InstallOutcome(wanted.name, status.version if status.installed else None, _absence(wanted, status))


def _told(outcome: InstallOutcome, number: int, channels: ChannelInstall) -> InstallOutcome:
    """With where it came from, and why not from the channels."""
    longest = _REASONS_CHARS // (len(channels.unknown) + 1)
    reason = f"conda: {_cut(channels.unknown[number], longest)}" if number in channels.unknown else ""
    if outcome.error is not None:
        return replace(outcome, error="\n".join(filter(None, [outcome.error, reason])))
    if number in channels.settled:
        return replace(outcome, source="conda" if channels.settled[number] in channels.fetched else "")
    return replace(outcome, source="pypi", note=reason)


def _cut(text: str, longest: int) -> str:
    """The end of a complaint, which says what is wrong, where there is too much of it."""
    return text if len(text) <= longest else f"… {text[-longest:]}"


def _absence(wanted: Requirement, status: PackageStatus) -> str | None:
    """Why a requirement that uv did not complain of is still not met."""
    if status.installed:
        return None
    return f"its condition does not hold here: {wanted.marker}" if wanted.marker else "uv did not install it"


def _spelled(pins: Pins) -> str:
    return ", ".join(f"{name}=={version}" for name, version in pins.items())


def _read_pins(layer: Path, version: str) -> Pins:
    shelves = reversed(layer_shelves(layer, version))
    return {name: each.version for shelf in shelves for name, each in shelf.distributions.items()}
