"""Installs packages into a session's layer with uv, which reaches the package index so that the session need not.

For an environment of conda, its channels are tried first, and uv installs what they do not have. The environment is
read and never changed, and what it has is not installed again. The caller decides where uv runs. What uv leaves in the
staging folder is trusted no more than what a session leaves in its layer, and is read only after uv has ended.
"""

import re
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import anyio
from anyio import to_thread
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import JsonValue

from belljar.environments.base import Environment
from belljar.environments.conda.installs import ChannelInstall, install_from_channels
from belljar.environments.conda.places import conda_packages, find_tool
from belljar.environments.conda.prefix import layer_package_folders, own_prefix
from belljar.environments.installed_check import PackageStatus, check_installed, check_names
from belljar.environments.layers import move_into, take_over
from belljar.environments.managed import CONDA_LOCK
from belljar.environments.uv import SIDE, OpenUv, Uv, UvAnswer, open_uv_on_host, write_new
from belljar.errors import EnvironmentBroken, InvalidArgument
from belljar.file_lock import open_lock
from belljar.files.disk_usage import InstallRoom, NoRoom
from belljar.files.fd_walk import remove_tree

# Wheels: uv resolves which versions go together, and fetches them into a folder. Only wheels are accepted, because a
# source package runs its own code when it is installed.

TREE = "tree"
"""The folder inside the staging folder into which uv installs wheels."""
_WHEELS_ONLY = ("--only-binary", ":all:")
_ADDITION = re.compile(r"^ [+~] (?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)

Pins = dict[str, Version]


class UvError(Exception):
    """uv failed; the message is uv's own."""


@dataclass(frozen=True, slots=True)
class WheelFetch:
    """uv's part of an installation. Paths are relative, because uv may see the staging folder at another path."""

    environment: Environment
    staging: Path
    timeout_s: float
    uv: Uv
    agreed: Sequence[Requirement] = ()
    """Requirements of the same request that conda's channels met; no wheel may contradict them."""

    async def resolve_most(self, wanted: list[Requirement], present: Pins) -> tuple[list[int], Pins, dict[int, str]]:
        """Resolve all requirements together, or else as many as fit, in order.

        Return the numbers of those accepted, their pins, and the errors of the others by number.
        """
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
        """Resolve with the layer's packages as they are, or without them if the wanted ones conflict with them."""
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
        constraints = write_new(self.staging, ".txt", "".join(f"{line}\n" for line in lines))
        # The layer's package hides the environment's of the same name, so uv must not count on the latter.
        hidden = [option for name in sorted(present.keys() - kept.keys()) for option in ("--reinstall-package", name)]
        options = ("--dry-run", "--break-system-packages", "--constraints", constraints, *hidden)
        answer = await self._uv(*options, *(_spell(each) for each in wanted))
        return _read_plan(answer.output)

    async def fetch(self, pins: Pins) -> None:
        """Install exactly these versions, without dependencies, into the tree."""
        exact = [f"{name}=={version}" for name, version in pins.items()]
        await self._uv("--no-deps", "--target", TREE, "--compile-bytecode", *exact)

    async def _uv(self, *arguments: str) -> UvAnswer:
        command = ("pip", "install", "--python", str(self.environment.python), *_WHEELS_ONLY, *arguments)
        answer = await self.uv(command, timeout_s=self.timeout_s)
        if answer.status:
            raise UvError(answer.complaint)
        return answer


def _spell(requirement: Requirement) -> str:
    """Return a requirement with a normalised name, without dots, because uv takes `name.whl` for a file."""
    spelled = Requirement(str(requirement))
    spelled.name = canonicalize_name(requirement.name)
    return str(spelled)


def _is_fit(name: str, version: Version, wanted: list[Requirement]) -> bool:
    return all(
        each.specifier.contains(version, prereleases=True) for each in wanted if canonicalize_name(each.name) == name
    )


def _read_plan(output: str) -> Pins:
    try:
        return {canonicalize_name(line["name"]): Version(line["version"]) for line in _ADDITION.finditer(output)}
    except InvalidVersion as error:
        raise UvError(f"uv's plan cannot be read: {error}") from error


# Checked because `===` may be followed by anything, and conda's solver reads a channel or a URL from brackets.
_VERSION = re.compile(r"[A-Za-z0-9_.!+*-]+")

# The limit for the reasons of all packages together, because a hundred may be refused for the same long reason.
_REASONS_CHARS = 100_000

OnStage = Callable[[str], Awaitable[None]]
"""Called with a line that says what an installation does now."""


@dataclass(frozen=True, slots=True)
class InstallOutcome:
    """The version that a requirement has now, or the installer's message that says why it has none."""

    name: str
    installed_version: str | None
    error: str | None
    imported: bool | None = None
    """Whether it imports in the session's running kernel; None if that was not tried."""
    import_error: str | None = None
    source: str = ""
    """In an environment of conda, where this installation fetched it from: conda or pypi."""
    note: str = ""
    """Why it is a wheel although the environment is conda's."""


@dataclass(frozen=True, slots=True)
class PackageChange:
    """A package that was put into the layer, and the version that the session's code found before."""

    name: str
    before: str | None
    after: str
    build: str = ""
    """The build of a package of conda; empty for a wheel."""

    @property
    def pin(self) -> str:
        """Return the exact version as its installer spells it."""
        return f"{self.name}={self.after}={self.build}" if self.build else f"{self.name}=={self.after}"


def parse_requirement(text: str) -> Requirement:
    """Parse a requirement on the index; refuse an option, path, URL or direct reference."""
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
    """Parse all requirements, or refuse the first that is none."""
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
    """Install into the layer what the environment lacks; only the server may be able to write the layer's parent.

    Raise `TooLarge` if no disk space is left at the start. If the packages turn out to need more than is left, the
    outcomes say so.
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
                    hear: Callable[[PackageChange], None] = on_change or (lambda _: None)
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
    """Ignore the message."""


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
        """Install wheels; return the errors of the requirements that failed, by number."""
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
            await self._move_into_layer(missing)
        return errors

    def _advice(self, requirement: Requirement) -> str:
        """Return a line that says how the operator can add a package to an environment of conda."""
        if self.environment.kind != "conda":
            return ""
        wanted = f"{requirement.name}{requirement.specifier}"
        if (self.environment.prefix / CONDA_LOCK).is_file():
            return f"\nThe operator can add it to the environment.yml that {self.environment.name} is made of: {wanted}"
        tool = find_tool()
        command = f"{tool[0] if tool else 'conda'} install -p {shlex.quote(str(self.environment.prefix))}"
        return f"\nA package of conda's own is for the operator to install: {command} {shlex.quote(wanted)}"

    async def _move_into_layer(self, pins: Pins) -> None:
        """Move what was fetched into the layer, and report each change."""
        before = await to_thread.run_sync(check_installed, self.environment, self.layer, [*pins])
        tree = self.staging / TREE
        async with self.room.room_for(tree):
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
        return [_with_source(outcome, number, channels) for number, outcome in enumerate(outcomes)]


def _outcome(wanted: Requirement, status: PackageStatus, error: str | None) -> InstallOutcome:
    if error is not None:
        return InstallOutcome(wanted.name, None, error)
    return InstallOutcome(wanted.name, status.version if status.installed else None, _absence(wanted, status))


def _with_source(outcome: InstallOutcome, number: int, channels: ChannelInstall) -> InstallOutcome:
    """Return the outcome with the package's source, and why it did not come from the channels."""
    longest = _REASONS_CHARS // (len(channels.unknown) + 1)
    reason = f"conda: {_cut(channels.unknown[number], longest)}" if number in channels.unknown else ""
    if outcome.error is not None:
        return replace(outcome, error="\n".join(filter(None, [outcome.error, reason])))
    if number in channels.settled:
        return replace(outcome, source="conda" if channels.settled[number] in channels.fetched else "")
    return replace(outcome, source="pypi", note=reason)


def _cut(text: str, longest: int) -> str:
    """Return the end of a message that is too long, because the end says what is wrong."""
    return text if len(text) <= longest else f"… {text[-longest:]}"


def _absence(wanted: Requirement, status: PackageStatus) -> str | None:
    """Return why a requirement is not met although uv reported no error for it."""
    if status.installed:
        return None
    return f"its condition does not hold here: {wanted.marker}" if wanted.marker else "uv did not install it"


def _spelled(pins: Pins) -> str:
    return ", ".join(f"{name}=={version}" for name, version in pins.items())


def _read_pins(layer: Path, version: str) -> Pins:
    folders = reversed(layer_package_folders(layer, version))
    return {name: each.version for folder in folders for name, each in folder.distributions.items()}


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
