"""Where bubblewrap starts when it makes a branch: the host's files, with a /proc that counts as the origin does.

bubblewrap looks its child up in /proc by the number that its own pid namespace gave it, which there is the origin's.
Made once for each origin. Knows nothing of what is started there.
"""

import os
import subprocess
from collections.abc import Sequence

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.child import start_child, wait_readable
from belljar.sandboxes.namespace.enclosed import only_child


async def open_threshold(entering: Sequence[str], unshare: str) -> int:
    """A descriptor of a mount namespace with a new /proc; `entering` goes before a command of the origin's."""
    stdin, stdin_end = os.pipe()
    stdout, stdout_end = os.pipe()
    mounting = (unshare, "--mount", "--propagation=slave", "--mount-proc", "--", "/bin/sh", "-c", "echo; read -r _")
    try:
        child = start_child(
            [*entering, *mounting],
            environment={},
            folder="/",
            stdin=stdin,
            stdout=stdout_end,
            stderr=subprocess.DEVNULL,
            pass_fds=(),
        )
    except BaseException:
        os.close(stdout)
        os.close(stdin_end)
        raise
    finally:
        os.close(stdin)
        os.close(stdout_end)
    try:
        await wait_readable(stdout)
        if not os.read(stdout, 1):
            status = await child.wait()
            raise SandboxUnavailable(f"No /proc of the sandbox to branch from can be mounted: status {status}")
        return os.open(f"/proc/{only_child(child.pid)}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxUnavailable(f"The mounts to branch from cannot be reached: {error.strerror}") from error
    finally:
        os.close(stdout)
        # At the end of its input it ends; the namespace stays as long as the descriptor.
        os.close(stdin_end)
        await child.wait()
        child.release()
