"""The entries of the setting `environments`: the kind of each, and what it is found by or made of.

Only the form is checked here; `belljar.environments` checks whether an environment exists.
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from belljar.settings.azure import AZURE
from belljar.settings.kinds import Gpus

Kind = Literal["venv", "venv-uv", "conda", "system", "managed"]

RESERVED = {
    "default": "the name of the one that is always there",
    AZURE: "the name of those that live in a session pool of Azure",
}
KERNEL_PREFIX = "kernel:"
"""Begins the name of an environment that is an installed Jupyter kernel."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS: dict[str, tuple[str, ...]] = {
    "venv": ("path",),
    "venv-uv": ("path",),
    "conda": ("path", "file"),
    "system": ("path",),
    "managed": ("requirements", "file", "python"),
}


class EnvironmentEntry(BaseModel):
    """One table of the setting `environments`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    kind: Kind
    path: str = ""
    """The path of a virtual environment or interpreter; for conda, the environment's name or folder."""
    requirements: tuple[str, ...] = ()
    """The requirements of a managed environment, as pip takes them."""
    file: str = ""
    """A requirements.txt, pyproject.toml or environment.yml instead; the last can also make one of conda."""
    python: str = ""
    """The Python of a managed environment: a version or an interpreter; empty for the server's own."""

    gpus: Gpus | None = None
    """The GPUs that its sessions may have, instead of those of the setting `gpus`."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "EnvironmentEntry":
        takes = _FIELDS[self.kind]
        stray = [name for name in self.model_fields_set - {"kind", "gpus"} if name not in takes]
        if stray:
            raise ValueError(f"kind {self.kind} takes {' or '.join(takes)}, not {', '.join(sorted(stray))}")
        if self.kind == "managed":
            if bool(self.requirements) == bool(self.file):
                raise ValueError("kind managed takes either requirements or file")
        elif self.kind == "conda":
            if bool(self.path) == bool(self.file):
                raise ValueError("kind conda needs a path or a name as its path, or else the file that it is made of")
        elif self.kind != "system" and not self.path:
            raise ValueError(f"kind {self.kind} needs a path")
        return self

    @property
    def is_ours(self) -> bool:
        """Tell whether belljar makes the environment."""
        return self.kind == "managed" or bool(self.file)


def checked_names(entries: dict[str, EnvironmentEntry]) -> dict[str, EnvironmentEntry]:
    """Refuse names that are reserved or could be taken for a path."""
    for name in entries:
        if name in RESERVED:
            raise ValueError(f"{name} is {RESERVED[name]}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name, like geo or torch-2.5")
    return entries
