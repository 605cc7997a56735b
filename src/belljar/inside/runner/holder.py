"""Start a kernel beside a process that keeps the sandbox open.

`holder.py STATUS SOCKET WORD KEEPS SHELL FLAG SCRIPT COMMAND…`: a sandbox ends with its first process. If that were the
kernel, every checkpoint of it would end with it. So this first process becomes the shell's script, which waits for
ever, and starts the command as a process that is not its child. The kernel's process writes WORD, given in hexadecimal,
into SOCKET first, so that the host knows who its peer is. If KEEPS is 1, a keeper process stays behind that waits for
the kernel and writes its exit status to STATUS.
"""

import os
import sys
from typing import NoReturn


def _start(status: int, channel: int, word: str, command: "list[str]", *, keeps: bool) -> NoReturn:
    """Fork the kernel, in a child of the holder, so that the kernel is not the holder's own child."""
    kernel = os.fork()
    if kernel == 0:
        os.close(status)
        os.setsid()  # so that signals which a cell sends to its process group do not reach the holder
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
    # Close everything, because the host would not see the kernel's end while its pipes and socket are open here.
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    os.execve(shell, [shell, flag, script], {"PATH": "/usr/bin:/bin"})


_main()
