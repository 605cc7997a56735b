"""The program that solves for packages of conda and installs them, with rattler: run apart, in a sandbox or beside.

It imports nothing of ours, reads one request, a file of JSON, and says on stderr what it does and, in the last line
and in JSON, what came of it. What is held stays at its version; only what is new is put into the folder of the
request. Scripts of packages are never run.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from rattler import PrefixRecord, RepoDataRecord

_META = "conda-meta"
_CACHE = "conda-cache"


class SolverRequest(TypedDict):
    """What is asked of it; paths that are relative are of its working directory."""

    channels: list[str]
    wanted: list[list[str]]
    """For each package the specs it may be known by, the best first; all of one have the same version."""
    held: str
    """A folder with the records of packages that stay as they are; empty for none."""
    own: str
    """The same of packages that had better stay."""
    target: str
    """The folder to put packages into."""
    place: str
    """Where that folder will be seen by those who use it."""
    python: str
    """The interpreter that compiles what has no bytecode; empty where the target has its own."""


class Installed(TypedDict):
    """One package that was put there."""

    name: str
    version: str
    build: str


class SolverOutput(TypedDict):
    """What came of a request; numbers are those of what was wanted."""

    taken: dict[str, str]
    """The name of each that was found and solved for."""
    unknown: dict[str, str]
    """Those that no channel has."""
    refused: dict[str, str]
    """Those that do not go with what is held, or with the others."""
    installed: list[Installed]


class SolverRefusal(Exception):
    """What rattler says when nothing fits, or cannot be reached."""


def main(folder: str, request_file: str) -> None:
    """`folder` is where rattler is found."""
    sys.path.insert(0, folder)
    request: SolverRequest = json.loads(Path(request_file).read_text("utf-8"))
    try:
        last, status = f"\n{json.dumps(asyncio.run(_Solving(request).run()))}", 0
    except SolverRefusal as refusal:
        last, status = f"error: {refusal}", 1
    _say(last)
    # At once: threads of rattler that outlive the loop have ended the interpreter's own way out with an abort.
    os._exit(status)


class _Solving:
    def __init__(self, request: SolverRequest) -> None:
        from rattler import Channel, Gateway
        from rattler.networking import Client

        self._request = request
        self._channels = [Channel(url) for url in request["channels"]]
        # Of its own: the one that there is without it sends no passwords.
        self._client = Client.default_client()
        self._gateway = Gateway(cache_dir=Path(_CACHE, "repodata"), client=self._client)
        self._held = _records(request["held"])
        # A session may have written these: a second record of a name would be fetched from wherever it says.
        taken = {*map(_named, self._held.values())}
        self._own = {file: each for file, each in _records(request["own"]).items() if _is_first(each, taken)}

    async def run(self) -> SolverOutput:
        _say(f"reading {', '.join(self._request['channels'])}")
        known = await self._known()
        specs: dict[int, str] = {}
        unknown: dict[str, str] = {}
        for number, names in enumerate(self._request["wanted"]):
            found = [spec for spec in names if _name(spec) in known]
            if found:
                specs[number] = found[0]
            else:
                unknown[str(number)] = f"no {_name(names[0])} in {', '.join(self._request['channels'])}"
        _say(f"solving for {', '.join(specs.values())}")
        accepted, solution, refused = await self._solve_most(specs)
        new = self._new(solution) if accepted else []
        try:
            await self._install(new)
        except SolverRefusal as refusal:
            # The channels have them: the package index may have something else under these names.
            refused |= dict.fromkeys(accepted, str(refusal))
            accepted, new = [], []
        return SolverOutput(
            taken={str(number): _name(specs[number]) for number in accepted},
            unknown=unknown,
            refused={str(number): reason for number, reason in refused.items()},
            installed=[Installed(name=_named(each), version=str(each.version), build=str(each.build)) for each in new],
        )

    async def _known(self) -> set[str]:
        """The names that the channels have, of all that are asked for."""
        from rattler import Subdir

        names = sorted({_name(spec) for specs in self._request["wanted"] for spec in specs})
        try:
            found = await self._gateway.query(
                self._channels, [Subdir.current(), Subdir("noarch")], names, recursive=False
            )
        except Exception as error:
            raise SolverRefusal(f"the channels cannot be read: {error}") from error
        return {_named(record) for records in found for record in records}

    async def _solve_most(self, specs: dict[int, str]) -> "tuple[list[int], list[RepoDataRecord], dict[int, str]]":
        """All together, or else as many as go together, in order."""
        if not specs:
            return [], [], {}
        held = await self._consistent()
        try:
            return [*specs], await self._solve([*specs.values()], held), {}
        except SolverRefusal as refusal:
            if len(specs) == 1:
                return [], [], dict.fromkeys(specs, str(refusal))
        accepted: list[int] = []
        solution: list[RepoDataRecord] = []
        refused: dict[int, str] = {}
        for number in specs:
            try:
                solution = await self._solve([specs[each] for each in (*accepted, number)], held)
                accepted.append(number)
            except SolverRefusal as refusal:
                refused[number] = str(refusal)
        return accepted, solution, refused

    async def _consistent(self) -> list[str]:
        """All that is held, by name, so that nothing new may contradict it; none where it contradicts itself."""
        names = [_named(record) for record in (*self._held.values(), *self._own.values())]
        try:
            await self._solve([], names)
        except SolverRefusal:
            return []
        return names

    async def _solve(self, specs: Sequence[str], held: Sequence[str]) -> "list[RepoDataRecord]":
        from rattler import MatchSpec, VirtualPackage, solve

        try:
            return await solve(
                self._channels,
                [*map(MatchSpec, specs), *held],
                gateway=self._gateway,
                locked_packages=[*self._own.values()],
                pinned_packages=[*self._held.values()],
                virtual_packages=VirtualPackage.detect(),
            )
        except Exception as error:
            raise SolverRefusal(str(error).removeprefix("Cannot solve the request because of: ").strip()) from error

    def _new(self, solution: "Sequence[RepoDataRecord]") -> "list[RepoDataRecord]":
        present = {_identity(record) for record in self._own.values()} | {*map(_named, self._held.values())}
        return [record for record in solution if not {_named(record), _identity(record)} & present]

    async def _install(self, new: "list[RepoDataRecord]") -> None:
        from rattler import install

        if not new:
            return
        target, place = Path(self._request["target"]), self._request["place"]
        changed = {_named(record) for record in new}
        kept = {file: each for file, each in {**self._held, **self._own}.items() if _named(each) not in changed}
        # rattler looks at what is there for the Python that packages are for, and at whose files are in the way.
        (target / _META).mkdir(parents=True, exist_ok=True)
        borrowed = [Path(shutil.copyfile(file, target / _META / file.name)) for file in kept]
        _say(f"fetching {', '.join(f'{_named(each)} {each.version}' for each in new)}")
        try:
            await install(
                [*kept.values(), *new],
                target_prefix=target,
                cache_dir=Path(_CACHE, "packages"),
                alternative_target_prefix=place or None,
                client=self._client,
                execute_link_scripts=False,
                show_progress=False,
            )
        except Exception as error:
            raise SolverRefusal(f"the packages cannot be fetched: {error}") from error
        for file in borrowed:
            file.unlink()
        _compile(target, place, self._request["python"])


def _records(folder: str) -> "dict[Path, PrefixRecord]":
    from rattler import PrefixRecord

    files = sorted(Path(folder).glob("*.json")) if folder else []
    records: dict[Path, PrefixRecord] = {}
    for file in files:
        try:
            records[file] = PrefixRecord.from_path(file)
        except Exception as error:
            raise SolverRefusal(f"{file.name} in {_META} is no record of a package: {error}") from error
    return records


def _is_first(record: "RepoDataRecord", taken: set[str]) -> bool:
    name = _named(record)
    is_first = name not in taken
    taken.add(name)
    return is_first


def _named(record: "RepoDataRecord") -> str:
    return record.name.normalized


def _identity(record: "RepoDataRecord") -> tuple[str, str, str]:
    return _named(record), str(record.version), str(record.build)


def _name(spec: str) -> str:
    """A spec is a name, and then what its version may be."""
    match = re.match(r"[A-Za-z0-9_.-]+", spec)
    return match[0].lower() if match else spec


def _compile(target: Path, place: str, python: str) -> None:
    """Sessions see the tree read-only and could not keep what they compile."""
    interpreter = python or str(target / "bin" / "python")
    options = ["-s", str(target.absolute()), "-p", place] if place else []
    for folder in target.glob("lib/python*/site-packages"):
        command = [interpreter, "-I", "-m", "compileall", "-q", *options, str(folder.absolute())]
        # A file of an older or a newer Python's grammar is no reason to fail.
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
