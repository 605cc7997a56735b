"""Finds environments of conda, mamba, micromamba and pixi, by name or by folder.

It looks where these tools keep and list their environments, and only then runs a tool, which takes half a second.
Environments are used as they are; nothing here makes or changes one.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from belljar.environments.base import run_briefly
from belljar.errors import EnvironmentBroken

TOOLS = ("conda", "mamba", "micromamba", "pixi")
_LISTERS = ("conda", "mamba", "micromamba")
_BASE = "base"
META = "conda-meta"
"""The folder of a prefix in which conda's tools record its packages."""
_TOOL_TIMEOUT_S = 30
_PACKAGES_LIMIT = 20_000
# Where installers put the root by default.
_USUAL_ROOTS = (
    *("~/miniconda3", "~/anaconda3", "~/miniforge3", "~/mambaforge", "~/micromamba", "~/.local/share/mamba"),
    *("/opt/conda", "/opt/miniconda3", "/opt/anaconda3", "/opt/miniforge3"),
)
_USUAL_FOLDERS = ("~/.conda/envs", "~/.pixi/envs")


@dataclass(frozen=True, slots=True)
class CondaPlace:
    """One conda environment: the name that its tool has for it, and its folder."""

    name: str
    prefix: Path


def find_tool() -> tuple[str, str] | None:
    """Return the name and path of the first of conda's tools on the PATH."""
    found = ((name, shutil.which(name)) for name in TOOLS)
    return next(((name, path) for name, path in found if path), None)


def find_conda(chosen: str) -> Path:
    """Return the folder of an environment given by its name or path; blocks if a tool has to be run."""
    if "/" in chosen or chosen.startswith("~"):
        return _checked(Path(chosen).expanduser().absolute(), chosen)
    for places in (_on_disk(os.environ), _listed_by_tools(os.environ)):
        found = [place.prefix for place in _distinct(places) if place.name == chosen]
        if len(found) > 1:
            raise EnvironmentBroken(
                f"several conda environments are called {chosen}: {', '.join(map(str, found))}",
                hint="Give the folder of the one that is meant as its path",
            )
        if found:
            return _checked(found[0], chosen)
    raise EnvironmentBroken(f"no conda environment is called {chosen}", hint=_remedy(chosen))


def list_conda() -> list[CondaPlace]:
    """Return every environment that can be found, sorted by name; blocks while tools run."""
    places = _distinct([*_on_disk(os.environ), *_listed_by_tools(os.environ)])
    return sorted(places, key=lambda place: (place.name, place.prefix))


def conda_packages(prefix: Path) -> dict[str, str]:
    """Return the versions of an environment's conda packages, Python's or not; empty if it is not conda's."""
    try:
        files = [entry.stem for entry in islice((prefix / META).iterdir(), _PACKAGES_LIMIT) if entry.suffix == ".json"]
    except OSError:
        return {}
    # A file is called NAME-VERSION-BUILD, and only NAME may contain dashes.
    parts = [file.rsplit("-", 2) for file in files]
    return {name: version for name, version, _ in (part for part in parts if len(part) == 3)}


def _checked(prefix: Path, chosen: str) -> Path:
    if not prefix.is_dir():
        raise EnvironmentBroken(f"no such conda environment: {prefix}", hint=_remedy(chosen))
    if not is_conda(prefix):
        raise EnvironmentBroken(
            f"{prefix} is not a conda environment: no {META}", hint="For a virtual environment, use kind venv"
        )
    if not (prefix / "bin" / "python").exists():
        raise EnvironmentBroken(
            f"the conda environment {prefix} has no Python", hint=f"Run: {_tool()} install -p {prefix} python"
        )
    return prefix


def _remedy(chosen: str) -> str:
    known = sorted({place.name for place in _on_disk(os.environ)})
    make = f"Run: {_tool()} create {'-p' if '/' in chosen else '-n'} {chosen} python"
    return f"Found: {', '.join(known[:20])}. {make}" if known else make


def _tool() -> str:
    tool = find_tool()
    return tool[0] if tool else "conda"


def _on_disk(variables: Mapping[str, str]) -> Iterator[CondaPlace]:
    """Yield environments from the folders and the list that the tools share."""
    roots = [*_roots(variables)]
    yield from (CondaPlace(_BASE, root) for root in roots)
    folders = [*(root / "envs" for root in roots), *(Path(folder).expanduser() for folder in _USUAL_FOLDERS)]
    for name in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
        folders += [Path(entry).expanduser() for entry in variables.get(name, "").split(os.pathsep) if entry]
    for folder in folders:
        with contextlib.suppress(OSError):
            yield from (CondaPlace(entry.name, entry) for entry in folder.iterdir() if is_conda(entry))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        listed = Path("~/.conda/environments.txt").expanduser().read_text("utf-8").splitlines()
        yield from _named((Path(line.strip()) for line in listed if line.strip()), roots)


def _roots(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield folders that hold an installation of a tool, which is also its base environment."""
    active, executable = variables.get("CONDA_PREFIX", ""), variables.get("CONDA_EXE", "")
    chosen = [variables.get(name, "") for name in ("CONDA_ROOT", "MAMBA_ROOT_PREFIX")]
    chosen += [str(Path(executable).parent.parent) if executable else "", *_USUAL_ROOTS]
    if active:
        own = Path(active)
        chosen.append(str(own.parent.parent if own.parent.name == "envs" else own))
    seen: set[Path] = set()
    for entry in chosen:
        root = Path(entry).expanduser()
        if entry and root not in seen and (is_conda(root) or (root / "envs").is_dir()):
            seen.add(root)
            yield root


def _listed_by_tools(variables: Mapping[str, str]) -> Iterator[CondaPlace]:
    """Yield environments that the tools themselves list, because their configuration may name other folders."""
    roots = [*_roots(variables)]
    for name in _LISTERS:
        path = shutil.which(name)
        if not path:
            continue
        with contextlib.suppress(EnvironmentBroken, ValueError):
            _, answer, _ = run_briefly([path, "env", "list", "--json"], _TOOL_TIMEOUT_S)
            listing: Any = json.loads(answer)
            envs: Any = cast("dict[str, Any]", listing).get("envs") if isinstance(listing, dict) else None
            prefixes = cast("list[Any]", envs) if isinstance(envs, list) else []
            yield from _named((Path(str(prefix)) for prefix in prefixes), roots)


def _named(prefixes: Iterable[Path], roots: Iterable[Path]) -> Iterator[CondaPlace]:
    known = set(roots)
    for prefix in prefixes:
        if is_conda(prefix):
            yield CondaPlace(_BASE if prefix in known else prefix.name, prefix)


def is_conda(prefix: Path) -> bool:
    """Tell whether conda's tools have put packages into a prefix."""
    try:
        return (prefix / META).is_dir()
    except OSError:
        return False


def _distinct(places: Iterable[CondaPlace]) -> list[CondaPlace]:
    """Return each folder once, however many lists and links lead to it."""
    found: dict[Path, CondaPlace] = {}
    for place in places:
        if is_conda(place.prefix):
            found.setdefault(place.prefix.resolve(), place)
    return [*found.values()]
