"""Finds gVisor's `runsc`: its version, what it can do, and its command line. Knows no sandbox."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PLATFORMS = ("systrap", "ptrace")
"""How system calls are caught, the faster first. Not `kvm`, because a session's user has no right to the device."""

_TIMEOUT_S = 10
_CHOSEN = {
    "network": "none",
    # It runs as an ordinary user, so it makes a user namespace with this one user in it.
    "rootless": "true",
    # The control groups are ours, and it is in them already.
    "ignore-cgroups": "true",
    # Session writes go to the shown folders themselves, not to an overlay beside them.
    "overlay2": "none",
    # The host writes into the session's folders too, because packages are installed while the kernel runs.
    "file-access": "shared",
    # The session's sockets are in its scratch folder; nothing else that is shown has any.
    "host-uds": "all",
}


@dataclass(frozen=True, slots=True)
class Runsc:
    """An installed runsc."""

    path: Path
    version: str
    flags: frozenset[str]
    """The flags of `_CHOSEN` that it knows."""
    is_recent: bool
    """Whether it is from 2023 or later: it passes descriptors, and can make others' mounts read-only."""

    def command(self, program: str, *, platform: str, state: str, bundle: str, pass_fds: Sequence[int]) -> list[str]:
        """Return the command line that runs a bundle; `program` is the path at which it finds itself."""
        chosen = [f"--{name}={value}" for name, value in _CHOSEN.items() if name in self.flags]
        passed = [f"--pass-fd={number}:{number}" for number in pass_fds]
        running = ["run", f"--bundle={bundle}", *passed, "belljar"]
        return [program, f"--root={state}", f"--platform={platform}", *chosen, *running]


def find_runsc(name: str) -> Runsc | str:
    """Return the program of that name or path, or why there is none."""
    if (found := shutil.which(name)) is None:
        return "not found"
    path = Path(os.path.realpath(found))
    try:
        version, flags, running = (_ask(path, *arguments) for arguments in (["--version"], ["flags"], ["help", "run"]))
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run ({error})"
    known = {line.split()[0].lstrip("-") for line in flags.splitlines() if line.lstrip().startswith("-")}
    first = version.splitlines()[0] if version else "of an unknown version"
    return Runsc(path, first.removeprefix("runsc version "), frozenset(known & _CHOSEN.keys()), "-pass-fd" in running)


def _ask(path: Path, *arguments: str) -> str:
    answer = subprocess.run(
        [path, *arguments], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
    )
    # Versions differ in which stream `flags` prints on.
    return answer.stdout + answer.stderr
