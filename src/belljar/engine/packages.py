"""Packages of a session as an engine shows them, and the cell by which a person installs more.

What is installed is read from metadata on disk, so a session that sleeps is not woken. A person's installation is a
cell like any other of theirs: the policy looks at it, the journal has it under their name, the agent is told of it, and
its output and end are events of the session.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from belljar.engine.models import MAX_REQUIREMENTS, PackageEntry, PackageList
from belljar.environments.base import Environment, inspect_interpreter
from belljar.environments.conda.places import conda_packages
from belljar.environments.conda.prefix import own_prefix
from belljar.environments.installed_check import installed_packages
from belljar.environments.installed_packages import PackageFolder
from belljar.environments.installs import check_requirements, pip_line
from belljar.errors import InvalidArgument

# No quotes, braces or signs of a shell: IPython puts values in place of `{…}` and `$…`.
_PLAIN: Final = re.compile(r"[A-Za-z0-9._\-\[\],<>=!~* ]+")


def list_packages(name: str, layer: Path, environment: Environment | None) -> PackageList:
    """Return the packages in a session's layer, and those of its environment if that is ready. Blocks shortly."""
    own = _layer_packages(layer)
    items = [PackageEntry(name=one, version=version, origin="session") for one, version in sorted(own.items())]
    pins = [f"{entry.name}=={entry.version}" for entry in items]
    if environment is None:
        note = "The environment's own packages are listed once the server has used it"
        return PackageList(environment=name, items=items, pins=pins, note=note)
    interpreter = inspect_interpreter(environment.python)
    found = {**conda_packages(interpreter.prefix), **installed_packages(interpreter.paths)}
    shared = {one: version for one, version in sorted(found.items()) if one not in own}
    items += [PackageEntry(name=one, version=version, origin="environment") for one, version in shared.items()]
    return PackageList(environment=name, python=interpreter.version, items=items, pins=pins)


def _layer_packages(layer: Path) -> dict[str, str]:
    prefix = own_prefix(layer)
    folders = [PackageFolder(layer, is_trusted=False)]
    folders += [PackageFolder(path, is_trusted=False) for path in sorted(prefix.glob("lib/python3*/site-packages"))]
    found = dict(conda_packages(prefix))
    for folder in reversed(folders):
        found |= {one: str(each.version) for one, each in folder.distributions.items()}
    return found


def installing_cell(requirements: Sequence[str]) -> str:
    """Return the cell that installs packages; refuse what is no name with an optional version."""
    wanted = [text.strip() for text in requirements if text.strip()]
    if not 0 < len(wanted) <= MAX_REQUIREMENTS:
        raise InvalidArgument(f"{len(wanted)} packages to install", hint=f"Name 1 to {MAX_REQUIREMENTS}")
    check_requirements(wanted)
    for text in wanted:
        if _PLAIN.fullmatch(text) is None:
            raise InvalidArgument(
                f"not a package to install: {text[:80]!r}", hint="Give names like pandas or pandas>=2"
            )
    return pip_line(wanted)
