"""Trees that hostile code has built and nobody is in any more: given to another user, and rid of what acts by itself.

By `chown` and `find`, which walk by descriptor, follow no link and know no depth; Python's own walk gives up at about a
thousand levels. Blocking; call it in a thread.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_WORDS_LIMIT = 300
_ARMED = ("(", "-perm", "-4000", "-o", "-perm", "-2000", ")")
_DEVICES = ("(", "-type", "b", "-o", "-type", "c", ")")
_ENDS = ("(", "-type", "p", "-o", "-type", "s", ")")


def change_owner(folders: Sequence[Path], uid: int, gid: int) -> None:
    """Make all of these trees a user's own; of a symlink, the link."""
    if complaint := _run(["chown", "-R", "-h", f"{uid}:{gid}", "--"], folders):
        raise OSError(complaint)


def close_to_others(folder: Path) -> None:
    """Let nobody but its owner write to anything in a tree, and its owner enter every folder."""
    # Links in a tree are left alone by `chmod`, but one that it is called with it follows.
    if not folder.is_symlink():
        _run(["chmod", "-R", "u+rwX,go-w", "--"], [folder])


def disarm(folders: Sequence[Path], *, keeps_pipes: bool = True) -> None:
    """Take set-user-ID and set-group-ID bits from files, and remove devices; pipes and sockets too, unless kept.

    What is in folders that their owner, us, may not enter stays as it is: nobody else may either.
    """
    removed = _DEVICES if keeps_pipes else ("(", *_DEVICES, "-o", *_ENDS, ")")
    change = ("!", "-type", "l", *_ARMED, "-exec", "chmod", "u-s,g-s", "{}", "+")
    _run(["find", "-P"], folders, ["-xdev", "(", *removed, "-delete", ")", "-o", "(", *change, ")"])


def _run(command: Sequence[str], folders: Sequence[Path], rest: Sequence[str] = ()) -> str:
    """Run it on those that are there; what it complained of."""
    there = [str(folder) for folder in folders if os.path.lexists(folder)]
    if not there:
        return ""
    done = subprocess.run([*command, *there, *rest], check=False, capture_output=True, stdin=subprocess.DEVNULL)
    words = done.stderr.decode(errors="replace").strip()[-_WORDS_LIMIT:]
    return words or f"{command[0]} ended with {done.returncode}" if done.returncode else ""
