"""Removing a tree that hostile code built: thousands of levels deep, or with folders nobody may enter.

Python's own `rmtree` is recursive and gives up at about a thousand levels; `chmod` and `rm` walk by descriptor.
"""

import logging
import subprocess
from pathlib import Path

_PATIENCE_S = 600

log = logging.getLogger(__name__)


def remove_tree(path: Path) -> None:
    """Remove a folder and everything below it, as far as it can be; blocks. Symlinks are removed, not followed."""
    for command in (["chmod", "-R", "u+rwx", "--"], ["rm", "-rf", "--"]):
        try:
            done = subprocess.run(
                [*command, str(path)], check=False, capture_output=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("%s of %s failed: %s", command[0], path, type(error).__name__)
            continue
        if done.returncode and command[0] == "rm":
            # Not what rm said: it names the files.
            log.warning("%s was not removed whole: rm complained %d times", path, len(done.stderr.splitlines()))
