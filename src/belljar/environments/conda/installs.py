"""Packages of conda for a session's layer: what is asked of the solver, and what came of it.

The environment is held as it is; what the solver fetched is put into the layer's own prefix. What the channels do not
have is told, for wheels to be tried; what they have in no version that fits is refused in the solver's words, because
the package index may have something else under that name. Where the solver runs is the caller's choice, and its answer
is trusted no more than a session's.
"""

import json
import os
import tempfile
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
from belljar.environments.conda.prefix import hand_out_records, own_prefix, put_in
from belljar.environments.install_room import InstallRoom
from belljar.environments.layers import take_over
from belljar.environments.presence import check_installed
from belljar.environments.requirements import EnvironmentRequirements
from belljar.environments.uv import EXTRA, OpenUv, UvAnswer, check_rattler, find_rattler, run_solver
from belljar.errors import EnvironmentBroken
from belljar.files.fd_walk import remove_tree
from belljar.inside.conda_solver import SolverRequest

_TREE = "conda-tree"
_REASON_LIMIT = 20_000
# What the package index has under another name than conda.
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
    """A package that the solver has put into its tree."""

    model_config = ConfigDict(frozen=True, defer_build=True)  # its pattern takes long to compile

    name: _Token
    version: _Token
    build: _Token


class SolverAnswer(BaseModel):
    """What came of a request; the same numbers for what was wanted."""

    model_config = ConfigDict(defer_build=True)

    taken: dict[int, _Token] = {}
    unknown: dict[int, str] = {}
    refused: dict[int, str] = {}
    installed: list[InstalledPackage] = []


@dataclass(frozen=True, slots=True)
class ChannelInstall:
    """What the channels had of what was wanted; numbers are those of the requirements."""

    settled: dict[int, str] = field(default_factory=dict[int, str])
    """The name that conda knows each by that was installed, or that was there already."""
    unknown: dict[int, str] = field(default_factory=dict[int, str])
    """Why others were not to be had there, and may be elsewhere."""
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Why the rest does not go with the environment, in the solver's words."""
    installed: list[InstalledPackage] = field(default_factory=list[InstalledPackage])
    """All that is new in the layer, dependencies included."""

    @property
    def fetched(self) -> set[str]:
        """Its names."""
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
    """Install into the layer what the channels of an environment have; the staging folder is of the same disk."""
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
    held = await to_thread.run_sync(hand_out_records, environment.prefix, staging)
    own = await to_thread.run_sync(hand_out_records, own_prefix(layer), staging)
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
        told = await uv.solve(write_request(staging, request), timeout_s=timeout_s)
    answer = read_answer(told, len(asked))
    if answer.installed:
        tree = staging / _TREE
        await room.check_fits(tree)
        await to_thread.run_sync(take_over, tree)
        await to_thread.run_sync(put_in, layer, tree, environment.prefix, environment.version)
    taken = {asked[number]: name for number, name in answer.taken.items()}
    unknown, refused = (
        {asked[number]: reason[:_REASON_LIMIT] for number, reason in reasons.items()}
        for reasons in (answer.unknown, answer.refused)
    )
    return ChannelInstall({**present, **taken}, {**beyond, **unknown}, refused, answer.installed)


def specs_of(requirement: Requirement) -> list[str]:
    """How conda may know what pip would call so, the likeliest first."""
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
    """A request for the solver, in the folder it will work in: the name of its file."""
    # Of a new name: whoever may write in the folder could have put a link under a known one.
    descriptor, path = tempfile.mkstemp(dir=staging, suffix=".json")
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
        os.fchmod(descriptor, 0o644)
        json.dump(request, file)
    return Path(path).name


def read_answer(told: UvAnswer, count: int) -> SolverAnswer:
    """What the solver says, if it has the form of an answer; else its words are the reason for all."""
    try:
        answer = SolverAnswer.model_validate_json(told.words.rstrip().rpartition("\n")[2])
    except ValidationError:
        answer = SolverAnswer()
    if told.status or sorted([*answer.taken, *answer.unknown, *answer.refused]) != [*range(count)]:
        return SolverAnswer(unknown=dict.fromkeys(range(count), told.complaint.removeprefix("error: ")))
    return answer


# Makes a whole environment of packages of conda, on the host and as the operator's own; their scripts are not run.

WORK = ".conda-"
"""Before the name of an environment: the folder with what is fetched for it, while it is made."""


async def make_prefix(
    root: Path, ingredients: EnvironmentRequirements, tell: Callable[[str], None], *, lock: int, timeout_s: float
) -> None:
    """Solve and install into a folder that is not there yet; a child holds on to the lock."""
    check_rattler()
    request = SolverRequest(
        channels=[*ingredients.channels],
        wanted=[[spec] for spec in ingredients.specs],
        held="",
        own="",
        target=str(root),
        place="",
        python="",
    )
    # By the same name each time: one who was killed has left it, with all that it had fetched.
    work = root.with_name(f"{WORK}{root.name}")
    await to_thread.run_sync(remove_tree, work)
    work.mkdir(mode=0o700)
    await to_thread.run_sync(root.mkdir)
    try:
        told = await run_solver(
            write_request(work, request),
            directory=work,
            target=root,
            timeout_s=timeout_s,
            on_line=tell,
            pass_fds=(lock,),
        )
    finally:
        await to_thread.run_sync(remove_tree, work)
    answer = read_answer(told, len(ingredients.specs))
    # All have one reason where they were solved for together.
    if reasons := dict.fromkeys([*answer.unknown.values(), *answer.refused.values()]):
        raise EnvironmentBroken(
            f"the environment could not be made of packages of conda: {chr(10).join(reasons)}",
            hint="See that its channels can be reached and have the packages; CONDA_CHANNEL_ALIAS leads to a mirror",
        )
