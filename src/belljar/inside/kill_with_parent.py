"""Run a command that must not outlive its caller: `kill_with_parent.py DESCRIPTOR COMMAND…`.

DESCRIPTOR is one end of a pipe whose other end only the caller has. When the caller dies, the pipe closes, and this
script kills its whole process group: the command and everything that the command started. So it does at SIGTERM, which
a service manager sends to every process. PR_SET_PDEATHSIG is not enough, because it fires when the thread ends that
started us, and because its signal reaches the command alone.
"""

import os
import signal
import sys
import threading


def main(lifeline: int, command: "list[str]") -> None:
    """Run the command until it exits, and exit with its status."""
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGTERM, lambda _number, _frame: _kill_group())
    threading.Thread(target=_kill_group_with_caller, args=(lifeline,), daemon=True).start()
    pid = os.posix_spawn(command[0], command, os.environ)
    _, status = os.waitpid(pid, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _kill_group_with_caller(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    _kill_group()


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
