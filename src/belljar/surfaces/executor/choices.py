"""The environment that code files run in: the operator's choice by variables, and what a caller may choose instead.

A path from a caller is never followed, because looking at an environment runs its interpreter outside the sandbox:
callers choose among what the operator has named and what conda's own tools list.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from belljar.environments import list_conda
from belljar.errors import InvalidArgument, SettingsError
from belljar.settings import EnvironmentEntry, Settings

Kind = Literal["conda", "venv", "venv-uv"]

# The field of each kind, in the variables and in the arguments of `configure_environment`.
_VARIABLES: dict[Kind, str] = {"conda": "CONDA_ENV_NAME", "venv": "VENV_PATH", "venv-uv": "UV_VENV_PATH"}
_KINDS: dict[str, Kind] = {"conda": "conda", "venv": "venv", "venv-uv": "venv-uv"}
_FIELDS: dict[Kind, str] = {"conda": "conda_name", "venv": "venv_path", "venv-uv": "uv_venv_path"}


@dataclass(frozen=True, slots=True)
class Choice:
    """An environment by kind and place (a path or a conda name); without a kind, the one that sessions have."""

    kind: Kind | None = None
    place: str = ""

    def entry(self) -> EnvironmentEntry | None:
        """Return the choice as an entry of the settings; None for the environment that sessions have."""
        return EnvironmentEntry(kind=self.kind, path=self.place) if self.kind else None

    def fields(self, settings: Settings) -> dict[str, str]:
        """Return the choice as answers show it to callers."""
        if self.kind is None:
            return {"type": "default", "environment": settings.environment}
        return {"type": self.kind, _FIELDS[self.kind]: self.place}


def from_variables(variables: Mapping[str, str] = os.environ) -> Choice:
    """Return what the operator has chosen. Without ENV_TYPE, the variable that names a place also says its kind."""
    named: dict[Kind, str] = {kind: variables[name] for kind, name in _VARIABLES.items() if variables.get(name)}
    kind_name = variables.get("ENV_TYPE", "")
    if not kind_name:
        return next((Choice(kind, place) for kind, place in named.items()), Choice())
    kind = _KINDS.get(kind_name)
    if kind is None:
        raise SettingsError(f"ENV_TYPE = {kind_name!r}", hint=f"ENV_TYPE takes {', '.join(_VARIABLES)}")
    if kind not in named:
        raise SettingsError(f"ENV_TYPE is {kind}, but {_VARIABLES[kind]} is not set", hint=f"Set {_VARIABLES[kind]}")
    return Choice(kind, named[kind])


def requested_choice(settings: Settings, kind: Kind, places: Mapping[str, str], operators: Choice) -> Choice:
    """Return what a caller asks for, if the operator has it; blocks while conda's tools run."""
    place = places.get(_FIELDS[kind], "")
    if not place:
        raise InvalidArgument(f"type {kind} needs {_FIELDS[kind]}", hint=f"Pass {_FIELDS[kind]}")
    known = _known(settings, kind, operators)
    for candidate in known:
        if _same(candidate, place, kind):
            return Choice(kind, candidate)
    table = f'[environments.NAME] with kind = "{kind}" and path = "…"'
    listed = f"; known here: {', '.join(known[:20])}" if known else ""
    raise InvalidArgument(
        f"{_FIELDS[kind]} {place[:200]!r} is no environment that this server may use{listed}",
        hint=f"The operator can add it to belljar.toml: {table}",
    )


def _known(settings: Settings, kind: Kind, operators: Choice) -> list[str]:
    # A virtual environment is one whoever made it: what is known as `venv` may be asked for as `venv-uv`, too.
    kinds: tuple[Kind, ...] = ("conda",) if kind == "conda" else ("venv", "venv-uv")
    places = [operators.place] if operators.kind in kinds else []
    places += [variable for each in kinds if (variable := os.environ.get(_VARIABLES[each], ""))]
    places += [entry.path for entry in settings.environments.values() if entry.kind in kinds and entry.path]
    if kind == "conda":
        places += [place.name for place in list_conda()]
    return list(dict.fromkeys(places))


def _same(known: str, place: str, kind: Kind) -> bool:
    if kind == "conda" and "/" not in known:
        return known == place
    return Path(known).expanduser().absolute() == Path(place).expanduser().absolute()
