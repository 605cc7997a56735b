"""Start a kernel as nobody's child, and hold its sandbox open in its place.

`holding.py STATUS SOCKET WORD KEEPS SHELL FLAG SCRIPT COMMAND…`: a sandbox ends with the process it was started with.
Were that the kernel, every sleeping copy of it would end when it does. So this process becomes the shell's script,
which waits for ever, and the command is started beside it. WORD, in hexadecimal, goes into the socket first: who sends
it is known to the host from then on. With KEEPS a process stays that tells on STATUS how the kernel ended.
"""

import os
import sys
from typing import NoReturn


def _start(status: int, channel: int, word: str, command: "list[str]", *, keeps: bool) -> NoReturn:
    """In a child of the holder's: fork once more, so that the kernel is no child of the holder."""
    kernel = os.fork()
    if kernel == 0:
        os.close(status)
        os.setsid()  # what a cell sends to its process group is not for the holder
        os.write(channel, bytes.fromhex(word))
        os.execv(command[0], command)
    if keeps:
        os.closerange(0, status)
        os.closerange(status + 1, os.sysconf("SC_OPEN_MAX"))
        _, code = os.waitpid(kernel, 0)
        os.write(status, b'{"status": %d}' % os.waitstatus_to_exitcode(code))
    os._exit(0)


def _main() -> NoReturn:
    status, channel, word, keeps, shell, flag, script, *command = sys.argv[1:]
    starter = os.fork()
    if starter == 0:
        try:
            _start(int(status), int(channel), word, command, keeps=keeps == "1")
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    if keeps != "1":
        os.waitpid(starter, 0)
    # Nothing of the kernel's stays open here: its end would not be seen.
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    os.execve(shell, [shell, flag, script], {"PATH": "/usr/bin:/bin"})


_main()
