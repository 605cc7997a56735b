"""The program that runs another one and ends with its caller, however that ends: `guard.py DESCRIPTOR COMMAND…`.

The descriptor is the end of a pipe whose other end only the caller has. When it closes, everything in this process
group is killed: the command, and what the command started. A signal at the parent's death would come when the thread
ends that started us, and reach the command alone. It imports nothing of ours.
"""

import os
import signal
import sys
import threading


def main(lifeline: int, command: "list[str]") -> None:
    """Run the command to its end, and end as it did."""
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with_caller, args=(lifeline,), daemon=True).start()
    pid = os.posix_spawn(command[0], command, os.environ)
    _, status = os.waitpid(pid, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _end_with_caller(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
