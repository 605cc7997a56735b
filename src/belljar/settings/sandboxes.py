"""The names that the setting `sandbox` takes: belljar's own, and those that installed packages bring.

A package brings a provider by an entry point of the group `belljar.sandboxes`, named as the setting names it. Only the
metadata of packages is read here; `belljar.sandboxes` imports the one that was chosen. The metadata is read
only when a name is not one of ours, because that takes 20 to 100 ms with a hundred packages.
"""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, get_args

GROUP = "belljar.sandboxes"
PLUGIN_PREFIX = "plugin:"
"""Stands before the name of a provider that a plugin brings; plugins are not loaded yet when settings are read."""
BuiltinSandbox = Literal["namespace", "container", "gvisor", "microvm", "process"]
OWN: tuple[str, ...] = get_args(BuiltinSandbox)


@dataclass(frozen=True, slots=True)
class InstalledSandbox:
    """A provider that an installed package brings; its code has not been imported."""

    name: str
    package: str
    """The package's name and version, such as "acme-sandbox 1.2"."""
    entry_point: EntryPoint

    @property
    def is_shadowed(self) -> bool:
        """Tell whether the name is one of ours, which no package can replace."""
        return self.name in OWN


def installed_sandboxes() -> list[InstalledSandbox]:
    """Return the providers that installed packages bring, sorted by name."""
    found = [
        InstalledSandbox(point.name, f"{point.dist.name} {point.dist.version}" if point.dist else "unknown", point)
        for point in entry_points(group=GROUP)
    ]
    return sorted(found, key=lambda one: (one.name, one.package))


def find_installed(name: str) -> InstalledSandbox:
    """Return the one provider of that name that is not ours; ValueError when there is none, or more than one."""
    installed = [one for one in installed_sandboxes() if not one.is_shadowed]
    found = [one for one in installed if one.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"several packages bring it: {', '.join(one.package for one in found)}")
    brought = ", ".join(f"{one.name} ({one.package})" for one in installed)
    others = f"installed packages bring {brought}" if brought else "no installed package brings another"
    raise ValueError(f"belljar has {', '.join(OWN)}; {others}")


def checked_sandbox(name: str) -> str:
    """Refuse a name that is neither ours nor an installed package's."""
    if name not in OWN and not name.startswith(PLUGIN_PREFIX):
        find_installed(name)
    return name
