"""Reads what a managed environment is made of: a list, a requirements.txt, a pyproject.toml or an environment.yml.

The files are the operator's own. They are only read; nothing is run or fetched here.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from packaging.requirements import InvalidRequirement, Requirement

from belljar.environments.conda.channels import DEFAULT_CHANNELS, channel_urls
from belljar.errors import EnvironmentBroken
from belljar.settings import EnvironmentEntry

_INCLUDES = re.compile(r"^[ \t]*(?:-r|--requirement|-c|--constraint)[ \t=]+(\S+)", re.MULTILINE)
_INCLUDES_LIMIT = 50
_CONDA = re.compile(r"(?:[\w.-]+::)?(?P<name>[A-Za-z0-9_.-]+)\s*(?P<version>[=<>!~][^\s]*|\s[^\s]+)?(?:\s+\S+)?\s*")
# The package index's names for packages of conda; None for those that only conda needs to make an environment.
_ON_THE_INDEX: Mapping[str, str | None] = {
    "pip": None,
    "setuptools": None,
    "wheel": None,
    "conda": None,
    "ca-certificates": None,
    "openssl": None,
    "pytorch": "torch",
    "pytorch-cpu": "torch",
    "matplotlib-base": "matplotlib",
    "opencv": "opencv-python-headless",
    "py-opencv": "opencv-python-headless",
    "pytables": "tables",
    "msgpack-python": "msgpack",
    "dask-core": "dask",
    "seaborn-base": "seaborn",
    "python-graphviz": "graphviz",
    "ipython_genutils": "ipython-genutils",
    "pyqt": "pyqt5",
}


@dataclass(frozen=True, slots=True)
class EnvironmentRequirements:
    """The requirements, a line each, and the Python they are for."""

    text: str
    """The requirements, with all included files; the same text makes the same environment."""
    python: str = ""
    """A version, a range of versions or an interpreter; empty for the server's own."""
    file: Path | None = None
    """The file itself, if uv reads it unchanged."""
    specs: tuple[str, ...] = ()
    """Packages of conda, installed before the requirements; without any, it is a virtual environment."""
    channels: tuple[str, ...] = ()
    """The URLs of the channels for the packages of conda."""


def read_requirements(entry: EnvironmentEntry) -> EnvironmentRequirements:
    """Read the requirements of a managed environment; blocks while its files are read."""
    if entry.requirements:
        return EnvironmentRequirements(_lines(entry.requirements, "requirements"), entry.python)
    path = Path(entry.file).expanduser().absolute()
    if entry.kind == "conda":
        return _for_conda(path)
    found = _read(path)
    return EnvironmentRequirements(found.text, entry.python or found.python, found.file)


def _read(path: Path) -> EnvironmentRequirements:
    if path.name == "pyproject.toml":
        return _from_project(path)
    if path.suffix in (".yml", ".yaml"):
        return _from_conda(path)
    if path.suffix in (".txt", ".in", ".lock"):
        return EnvironmentRequirements("\n".join(_with_includes(path)), file=path)
    raise EnvironmentBroken(
        f"{path} is no file that an environment can be made of",
        hint="Use a requirements.txt, a pyproject.toml or an environment.yml",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise EnvironmentBroken(
            f"{path} cannot be read: {error.strerror}", hint="Set file to one that is there"
        ) from error
    except UnicodeDecodeError as error:
        raise EnvironmentBroken(f"{path} is not text: {error}") from error


def _with_includes(path: Path) -> Iterator[str]:
    """Yield the text of a requirements file and of its includes: a change in any makes another environment."""
    waiting, seen = [path], set[Path]()
    while waiting and len(seen) < _INCLUDES_LIMIT:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        text = _text(file)
        yield text
        waiting += [file.parent / name for name in _INCLUDES.findall(text) if "://" not in name]


def _from_project(path: Path) -> EnvironmentRequirements:
    try:
        table: dict[str, Any] = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise EnvironmentBroken(f"{path} is not TOML: {error}") from error
    project: Any = table.get("project")
    if not isinstance(project, dict):
        raise EnvironmentBroken(f"{path} has no [project] table", hint="Its dependencies are read from there")
    parsed = cast("dict[str, Any]", project)
    return EnvironmentRequirements(
        _lines(_texts(parsed.get("dependencies"), path), path), str(parsed.get("requires-python", ""))
    )


def _for_conda(path: Path) -> EnvironmentRequirements:
    """Read an environment.yml as conda would."""
    table = _yaml(path)
    specs, wheels = _dependencies(table, path)
    named = [channel for channel in _texts(table.get("channels"), path) if channel != "nodefaults"]
    # A package that names its channel may come from any of them: its channel is only added to the end of the list.
    named += [spec.rpartition("::")[0] for spec in specs if "::" in spec]
    plain = tuple(spec.rpartition("::")[2].strip() for spec in specs)
    if not any(_conda_parts(spec, path)[0] == "python" for spec in plain):
        raise EnvironmentBroken(f"{path} has no python", hint="Sessions need one: add it to its dependencies")
    channels = channel_urls(named or DEFAULT_CHANNELS)
    text = _lines(wheels, path)
    return EnvironmentRequirements(text, specs=plain, channels=channels)


def _yaml(path: Path) -> dict[str, Any]:
    # Imported here because it takes 20 ms, and only an environment.yml needs it.
    import yaml

    try:
        parsed: Any = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise EnvironmentBroken(f"{path} is not YAML: {error}") from error
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}


def _dependencies(table: Mapping[str, Any], path: Path) -> tuple[list[str], list[str]]:
    """Return the packages of conda and those of pip."""
    entries: Any = table.get("dependencies")
    if not isinstance(entries, list):
        raise EnvironmentBroken(f"{path} has no list of dependencies", hint="It is not an environment.yml")
    specs: list[str] = []
    wheels: list[str] = []
    for entry in cast("list[Any]", entries):
        if isinstance(entry, dict):
            wheels += _texts(cast("dict[str, Any]", entry).get("pip"), path)
        else:
            specs.append(str(entry))
    return specs, wheels


def _from_conda(path: Path) -> EnvironmentRequirements:
    specs, wheels = _dependencies(_yaml(path), path)
    wanted: list[str] = []
    python = ""
    for spec in specs:
        name, version = _conda_parts(spec, path)
        if name == "python":
            python = version.removeprefix("==").removesuffix(".*")
        elif (ours := _ON_THE_INDEX.get(name, name)) is not None:
            wanted.append(f"{ours}{version}")
    return EnvironmentRequirements(_lines([*wanted, *wheels], path), python)


def _conda_parts(spec: str, path: Path) -> tuple[str, str]:
    """Return the name and version of a conda package, the version as pip writes it: `numpy=1.26` is `numpy==1.26.*`."""
    match = _CONDA.fullmatch(spec)
    if match is None:
        raise EnvironmentBroken(f"{path}: {spec!r} is no package of conda", hint="Write it like numpy=1.26")
    version = (match["version"] or "").strip()
    if version[:1] in "<>!~" or version.startswith("=="):
        return match["name"].lower(), version
    number = version.lstrip("=").partition("=")[0].removesuffix(".*").removesuffix("*")
    return match["name"].lower(), f"=={number}.*" if number else ""


def _texts(value: Any, path: Path) -> list[str]:
    entries = cast("list[Any]", value) if isinstance(value, list) else []
    if (value is not None and not isinstance(value, list)) or not all(isinstance(entry, str) for entry in entries):
        raise EnvironmentBroken(f"{path}: its dependencies are not a list of text")
    return entries


def _lines(requirements: Iterable[str], origin: object) -> str:
    lines: list[str] = []
    for text in requirements:
        try:
            lines.append(str(Requirement(text)))
        except InvalidRequirement as error:
            raise EnvironmentBroken(
                f"{origin}: {text!r} is no requirement: {str(error).splitlines()[0]}",
                hint="Write it like pandas or pandas>=2",
            ) from None
    return "".join(f"{line}\n" for line in lines)
