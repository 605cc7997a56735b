"""The root folder of nested sandboxes, put together once: whatever is the same in all of them.

bubblewrap reads the whole table of mounts again for each mount, and looks at every folder on the way to it. A server
that root runs has mounts of its own that bubblewrap starts from. There it keeps a folder with the system's trees, the
files of /etc and /sys, and the environment in place. A nested sandbox mounts that folder whole, and then only what is
its own. This module says which sandboxes can be made so; `bwrap_args.py` says how, `root_view.py` makes the folder.
"""

from dataclasses import dataclass
from pathlib import Path

from belljar.sandboxes.base import Limits, SandboxSpec
from belljar.sandboxes.defaults import HOME

TEMPLATE = "/sys"
"""Where the folder is in the mounts that bubblewrap starts from, which show nothing else there."""
_TEMPORARY = ("/tmp", "/run", HOME)  # noqa: S108 - a path inside
_VAR_TMP = "/var/tmp"  # noqa: S108 - a path inside


@dataclass(frozen=True, slots=True)
class RootTemplate:
    """What the folder shows, and what a sandbox must be like to be made from it."""

    readable: frozenset[Path]
    """The trees that are in place."""
    limits: Limits
    """The limits that the files of /sys tell of."""
    nested_folder: str
    """The folder below which sessions have trees of their own."""

    def fits(self, spec: SandboxSpec) -> bool:
        """Return whether a sandbox can be made from it: there is a place for each mount of the sandbox's own."""
        own = (*_TEMPORARY, self.nested_folder)
        return (
            spec.limits == self.limits
            and not spec.folders
            and not spec.devices
            and all(is_within_any(path, own) for path in spec.readable if path not in self.readable)
        )

    @property
    def covers_nested_folder(self) -> bool:
        """Return whether the sessions' folder needs a cover of its own, in which their mounts have a place."""
        return not is_within_any(self.nested_folder, _TEMPORARY)


def template_of(spec: SandboxSpec, nested_folder: Path) -> RootTemplate | None:
    """Return the template for sandboxes nested in this one; None where its trees leave no room for one."""
    paths = (*spec.readable, nested_folder)
    if any(is_within(str(path), _VAR_TMP) for path in paths):
        return None
    # What is below a folder that each sandbox has for itself would be covered by it.
    readable = frozenset(path for path in spec.readable if not is_within_any(path, (*_TEMPORARY, str(nested_folder))))
    return RootTemplate(readable, spec.limits, str(nested_folder))


def is_within(path: str, tree: str) -> bool:
    """Return whether a path is the tree or below it, by name. Of strings, because `Path` takes 3 ms for a sandbox."""
    return path == tree or tree == "/" or path.startswith(f"{tree}/")


def is_within_any(path: Path | str, trees: tuple[str, ...]) -> bool:
    """Return whether a path is one of the trees or below one, by name."""
    text = str(path)
    return any(is_within(text, tree) for tree in trees)
