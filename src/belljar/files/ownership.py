"""Changes the owner of trees that hostile code built and no longer runs in, and removes set-ID bits and devices.

It runs `chown`, `chmod` and `find`, which walk by descriptor, follow no link and have no limit on depth; Python's own
walk gives up at about a thousand levels. Blocking; call it in a thread.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_MESSAGE_LIMIT = 300
_SET_ID = ("(", "-perm", "-4000", "-o", "-perm", "-2000", ")")
_DEVICES = ("(", "-type", "b", "-o", "-type", "c", ")")
_PIPES_AND_SOCKETS = ("(", "-type", "p", "-o", "-type", "s", ")")


def change_owner(folders: Sequence[Path], uid: int, gid: int) -> None:
    """Make a user the owner of everything in these trees; of a symlink itself, not of its target."""
    if complaint := _run(["chown", "-R", "-h", f"{uid}:{gid}", "--"], folders):
        raise OSError(complaint)


def close_to_others(folder: Path) -> None:
    """Let nobody but the owner write to anything in a tree, and let the owner enter every folder."""
    # `chmod -R` leaves links inside a tree alone, but follows a link that it is called with.
    if not folder.is_symlink():
        _run(["chmod", "-R", "u+rwX,go-w", "--"], [folder])


def disarm(folders: Sequence[Path], *, keeps_pipes: bool = True) -> None:
    """Clear set-user-ID and set-group-ID bits, and remove devices; pipes and sockets too, unless `keeps_pipes`.

    Folders that we own and may not enter are left as they are, because nobody else may enter them either.
    """
    removed = _DEVICES if keeps_pipes else ("(", *_DEVICES, "-o", *_PIPES_AND_SOCKETS, ")")
    change = ("!", "-type", "l", *_SET_ID, "-exec", "chmod", "u-s,g-s", "{}", "+")
    _run(["find", "-P"], folders, ["-xdev", "(", *removed, "-delete", ")", "-o", "(", *change, ")"])


def _run(command: Sequence[str], folders: Sequence[Path], rest: Sequence[str] = ()) -> str:
    """Run a command on those folders that exist; return its error message, or empty if it succeeded."""
    there = [str(folder) for folder in folders if os.path.lexists(folder)]
    if not there:
        return ""
    done = subprocess.run([*command, *there, *rest], check=False, capture_output=True, stdin=subprocess.DEVNULL)
    message = done.stderr.decode(errors="replace").strip()[-_MESSAGE_LIMIT:]
    return message or f"{command[0]} ended with {done.returncode}" if done.returncode else ""
