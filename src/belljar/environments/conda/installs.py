"""Installs packages of conda: into a session's layer, or into a new prefix that becomes a managed environment.

For a layer, the environment stays as it is, and what the solver fetched goes into the layer's own prefix. Packages that
no channel has are reported as unknown, so that the caller can try wheels. Packages without a fitting version are
refused with the solver's message, because the package index may have something else under that name. The caller decides
where the solver of a layer runs; its answer is trusted no more than one from a session.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from anyio import to_thread
from packaging.requirements import Requirement
from packaging.specifiers import Specifier
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from belljar.environments.base import Environment
from belljar.environments.conda.prefix import copy_records, move_into_prefix, own_prefix
from belljar.environments.installed_check import check_installed
from belljar.environments.layers import take_over
from belljar.environments.requirements import EnvironmentRequirements
from belljar.environments.uv import EXTRA, OpenUv, UvAnswer, check_rattler, find_rattler, run_solver, write_new
from belljar.errors import EnvironmentBroken
from belljar.files.disk_usage import InstallRoom
from belljar.files.fd_walk import remove_tree
from belljar.inside.conda_solver import SolverRequest

_TREE = "conda-tree"
_REASON_LIMIT = 20_000
# Conda's names for packages that the package index has under another name.
_ALSO: Mapping[str, str] = {
    "build": "python-build",
    "graphviz": "python-graphviz",
    "msgpack": "msgpack-python",
    "opencv-python": "opencv",
    "opencv-python-headless": "opencv",
    "tables": "pytables",
    "torch": "pytorch",
}
_Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.!+-]{1,200}$")]


class InstalledPackage(BaseModel):
    """A package that the solver installed into its target tree."""

    model_config = ConfigDict(frozen=True, defer_build=True)  # the pattern takes long to compile

    name: _Token
    version: _Token
    build: _Token


class SolverAnswer(BaseModel):
    """The solver's answer; the numbers are positions in the request's `wanted`."""

    model_config = ConfigDict(defer_build=True)

    taken: dict[int, _Token] = {}
    unknown: dict[int, str] = {}
    refused: dict[int, str] = {}
    installed: list[InstalledPackage] = []


@dataclass(frozen=True, slots=True)
class ChannelInstall:
    """Which of the requirements the channels could meet; the numbers are positions in the list of requirements."""

    settled: dict[int, str] = field(default_factory=dict[int, str])
    """For each requirement that was installed now or was there already: the name that conda has for it."""
    unknown: dict[int, str] = field(default_factory=dict[int, str])
    """For each requirement that the channels do not have and that may be found elsewhere: why."""
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """For each requirement that does not fit the environment: the solver's message."""
    installed: list[InstalledPackage] = field(default_factory=list[InstalledPackage])
    """All packages that are new in the layer, dependencies included."""

    @property
    def fetched(self) -> set[str]:
        """Return the names of the packages that were installed now."""
        return {each.name for each in self.installed}


async def install_from_channels(
    environment: Environment,
    layer: Path,
    staging: Path,
    wanted: list[Requirement],
    open_uv: OpenUv,
    *,
    timeout_s: float,
    room: InstallRoom,
) -> ChannelInstall:
    """Install into the layer what the environment's channels have; `staging` is on the layer's file system."""
    names = [f"{each.name}{each.specifier}" for each in wanted]
    there = await to_thread.run_sync(check_installed, environment, layer, names)
    present = {number: wanted[number].name for number, each in enumerate(there) if each.installed and each.version}
    asked = [n for n, each in enumerate(wanted) if n not in present and not each.extras and not each.marker]
    beyond = {n: "it knows no extras or conditions" for n in range(len(wanted)) if n not in {*present, *asked}}
    if not asked:
        return ChannelInstall(present, beyond)
    if find_rattler() is None:
        reason = f"conda's channels are not looked at without: {EXTRA}"
        return ChannelInstall(present, {**beyond, **dict.fromkeys(asked, reason)})
    held = await to_thread.run_sync(copy_records, environment.prefix, staging)
    own = await to_thread.run_sync(copy_records, own_prefix(layer), staging)
    request = SolverRequest(
        channels=[*environment.channels],
        wanted=[specs_of(wanted[number]) for number in asked],
        held=held,
        own=own,
        target=_TREE,
        place=str(own_prefix(layer)),
        python=str(environment.python),
    )
    async with open_uv(environment, staging) as uv:
        uv_answer = await uv.solve(write_request(staging, request), timeout_s=timeout_s)
    answer = read_answer(uv_answer, len(asked))
    if answer.installed:
        tree = staging / _TREE
        async with room.room_for(tree):
            await to_thread.run_sync(take_over, tree)
            await to_thread.run_sync(move_into_prefix, layer, tree, environment.prefix, environment.version)
    taken = {asked[number]: name for number, name in answer.taken.items()}
    unknown, refused = (
        {asked[number]: reason[:_REASON_LIMIT] for number, reason in reasons.items()}
        for reasons in (answer.unknown, answer.refused)
    )
    return ChannelInstall({**present, **taken}, {**beyond, **unknown}, refused, answer.installed)


def specs_of(requirement: Requirement) -> list[str]:
    """Return the specs under which conda may have a package that pip knows by this requirement, the likeliest first."""
    name = requirement.name.lower()
    plain = canonicalize_name(name)
    names = (name, plain, plain.replace("-", "_"), *([_ALSO[plain]] if plain in _ALSO else []))
    version = ",".join(sorted(_spelled(each) for each in requirement.specifier))
    return [f"{each} {version}".strip() for each in dict.fromkeys(names)]


def _spelled(specifier: Specifier) -> str:
    if specifier.operator == "==" and specifier.version.endswith(".*"):
        return specifier.version
    return f"{'==' if specifier.operator == '===' else specifier.operator}{specifier.version}"


def write_request(staging: Path, request: SolverRequest) -> str:
    """Write a request into the folder that the solver will work in, and return the name of its file."""
    return write_new(staging, ".json", json.dumps(request))


def read_answer(uv_answer: UvAnswer, count: int) -> SolverAnswer:
    """Parse the solver's output; if it is not a valid answer, report it as the reason for every requirement."""
    try:
        answer = SolverAnswer.model_validate_json(uv_answer.output.rstrip().rpartition("\n")[2])
    except ValidationError:
        answer = SolverAnswer()
    if uv_answer.status or sorted([*answer.taken, *answer.unknown, *answer.refused]) != [*range(count)]:
        return SolverAnswer(unknown=dict.fromkeys(range(count), uv_answer.complaint.removeprefix("error: ")))
    return answer


# Making a whole environment. This runs on the host, for the operator; the packages' own scripts are not run.

WORK = ".conda-"
"""Prefix for the name of the folder that holds what is fetched for an environment while it is made."""


async def make_prefix(
    root: Path, requirements: EnvironmentRequirements, tell: Callable[[str], None], *, lock: int, timeout_s: float
) -> None:
    """Solve and install into a folder that does not exist yet. The solver's process inherits the lock's descriptor."""
    check_rattler()
    request = SolverRequest(
        channels=[*requirements.channels],
        wanted=[[spec] for spec in requirements.specs],
        held="",
        own="",
        target=str(root),
        place="",
        python="",
    )
    # The same name each time, so that what a killed server had fetched and left there is removed first.
    work = root.with_name(f"{WORK}{root.name}")
    await to_thread.run_sync(remove_tree, work)
    work.mkdir(mode=0o700)
    await to_thread.run_sync(root.mkdir)
    try:
        uv_answer = await run_solver(
            write_request(work, request),
            directory=work,
            target=root,
            timeout_s=timeout_s,
            on_line=tell,
            pass_fds=(lock,),
        )
    finally:
        await to_thread.run_sync(remove_tree, work)
    answer = read_answer(uv_answer, len(requirements.specs))
    # Requirements that were solved together have the same reason: report it once.
    if reasons := dict.fromkeys([*answer.unknown.values(), *answer.refused.values()]):
        raise EnvironmentBroken(
            f"the environment could not be made of packages of conda: {chr(10).join(reasons)}",
            hint="See that its channels can be reached and have the packages; CONDA_CHANNEL_ALIAS leads to a mirror",
        )
