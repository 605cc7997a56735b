"""Solve for conda packages and install them with rattler, as a program of its own, in a sandbox or outside of one.

It reads one request from a JSON file. On stderr it reports its progress and, in the last line, the `SolverOutput` as
JSON. Packages that are held stay at their version; only new packages are put into the request's target folder. Link
scripts of packages are never run.
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
    """What to install, and where; relative paths are relative to the working directory."""

    channels: list[str]
    wanted: list[list[str]]
    """For each wanted package its possible specs, the best first: other names, but the same version."""
    held: str
    """A folder with the records of packages that must stay as they are; empty for none."""
    own: str
    """A folder with the records of packages that stay if possible; empty for none."""
    target: str
    """The folder to put packages into."""
    place: str
    """The path at which sessions will see the target folder."""
    python: str
    """The interpreter that compiles files without bytecode; empty where the target has its own."""


class Installed(TypedDict):
    """One package that was put into the target folder."""

    name: str
    version: str
    build: str


class SolverOutput(TypedDict):
    """The result of a request; the keys are indices into `SolverRequest.wanted`, as text."""

    taken: dict[str, str]
    """The names of the packages that were found and solved for."""
    unknown: dict[str, str]
    """Why a package is unknown: no channel has it."""
    refused: dict[str, str]
    """Why a package conflicts with the held ones or with the other wanted ones, or could not be fetched."""
    installed: list[Installed]


class SolverRefusal(Exception):
    """rattler found no solution, or could not reach or read something; the message is rattler's."""


def main(folder: str, request_file: str) -> None:
    """Serve the request in `request_file`; `folder` is the one that rattler is imported from."""
    sys.path.insert(0, folder)
    request: SolverRequest = json.loads(Path(request_file).read_text("utf-8"))
    try:
        last_line, status = f"\n{json.dumps(asyncio.run(_Solver(request).run()))}", 0
    except SolverRefusal as refusal:
        last_line, status = f"error: {refusal}", 1
    _say(last_line)
    # Skip the interpreter's shutdown, because it has aborted in threads of rattler that outlive the event loop.
    os._exit(status)


class _Solver:
    def __init__(self, request: SolverRequest) -> None:
        from rattler import Channel, Gateway
        from rattler.networking import Client

        self._request = request
        self._channels = [Channel(url) for url in request["channels"]]
        # Pass a client, because the gateway's default one sends no passwords.
        self._client = Client.default_client()
        self._gateway = Gateway(cache_dir=Path(_CACHE, "repodata"), client=self._client)
        self._held = _records(request["held"])
        # Drop second records of a name, because a session may have written them, and the package would be fetched from
        # whatever address such a record names.
        taken = {*map(_record_name, self._held.values())}
        self._own = {file: each for file, each in _records(request["own"]).items() if _is_first(each, taken)}

    async def run(self) -> SolverOutput:
        _say(f"reading {', '.join(self._request['channels'])}")
        known = await self._known_names()
        specs: dict[int, str] = {}
        unknown: dict[str, str] = {}
        for number, names in enumerate(self._request["wanted"]):
            found = [spec for spec in names if _spec_name(spec) in known]
            if found:
                specs[number] = found[0]
            else:
                unknown[str(number)] = f"no {_spec_name(names[0])} in {', '.join(self._request['channels'])}"
        _say(f"solving for {', '.join(specs.values())}")
        accepted, solution, refused = await self._solve_most(specs)
        new = self._new(solution) if accepted else []
        try:
            await self._install(new)
        except SolverRefusal as refusal:
            # Not "unknown", because the channels have these packages, and the package index may have something else
            # under their names.
            refused |= dict.fromkeys(accepted, str(refusal))
            accepted, new = [], []
        return SolverOutput(
            taken={str(number): _spec_name(specs[number]) for number in accepted},
            unknown=unknown,
            refused={str(number): reason for number, reason in refused.items()},
            installed=[
                Installed(name=_record_name(each), version=str(each.version), build=str(each.build)) for each in new
            ],
        )

    async def _known_names(self) -> set[str]:
        """Return those of the wanted names that the channels have."""
        from rattler import Subdir

        names = sorted({_spec_name(spec) for specs in self._request["wanted"] for spec in specs})
        try:
            found = await self._gateway.query(
                self._channels, [Subdir.current(), Subdir("noarch")], names, recursive=False
            )
        except Exception as error:
            raise SolverRefusal(f"the channels cannot be read: {error}") from error
        return {_record_name(record) for records in found for record in records}

    async def _solve_most(self, specs: dict[int, str]) -> "tuple[list[int], list[RepoDataRecord], dict[int, str]]":
        """Solve for all specs together; if that fails, add one after the other and refuse those that conflict.

        Return the accepted indices, their solution, and the reasons for the refused ones.
        """
        if not specs:
            return [], [], {}
        held = await self._held_specs()
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

    async def _held_specs(self) -> list[str]:
        """Return the names of all held packages as specs, so that nothing new may conflict with them.

        Return none where the held packages conflict with each other already.
        """
        names = [_record_name(record) for record in (*self._held.values(), *self._own.values())]
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
        present = {_identity(record) for record in self._own.values()} | {*map(_record_name, self._held.values())}
        return [record for record in solution if not {_record_name(record), _identity(record)} & present]

    async def _install(self, new: "list[RepoDataRecord]") -> None:
        from rattler import install

        if not new:
            return
        target, place = Path(self._request["target"]), self._request["place"]
        changed = {_record_name(record) for record in new}
        kept = {file: each for file, each in {**self._held, **self._own}.items() if _record_name(each) not in changed}
        # rattler reads the records in the target: for the Python version that packages are for, and for the owners of
        # files that would be overwritten.
        (target / _META).mkdir(parents=True, exist_ok=True)
        borrowed = [Path(shutil.copyfile(file, target / _META / file.name)) for file in kept]
        _say(f"fetching {', '.join(f'{_record_name(each)} {each.version}' for each in new)}")
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
    name = _record_name(record)
    is_first = name not in taken
    taken.add(name)
    return is_first


def _record_name(record: "RepoDataRecord") -> str:
    return record.name.normalized


def _identity(record: "RepoDataRecord") -> tuple[str, str, str]:
    return _record_name(record), str(record.version), str(record.build)


def _spec_name(spec: str) -> str:
    """Return the package name at the beginning of a spec."""
    match = re.match(r"[A-Za-z0-9_.-]+", spec)
    return match[0].lower() if match else spec


def _compile(target: Path, place: str, python: str) -> None:
    """Compile the packages to bytecode, because sessions see the tree read-only and cannot write bytecode into it."""
    interpreter = python or str(target / "bin" / "python")
    options = ["-s", str(target.absolute()), "-p", place] if place else []
    for folder in target.glob("lib/python*/site-packages"):
        command = [interpreter, "-I", "-m", "compileall", "-q", *options, str(folder.absolute())]
        # Not `check=True`, because a package may contain a file in an older or newer Python's grammar.
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
