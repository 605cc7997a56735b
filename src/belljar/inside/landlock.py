"""Run a command that can write below the given folders only: `landlock.py FOLDER… -- COMMAND…`.

The script restricts itself with Landlock, which Linux offers to every user, and then replaces itself by the command.
Reading is not limited.
"""

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE = 1 << 1
# The rights 4 to 12 of linux/landlock.h, from REMOVE_DIR to MAKE_SYM.
_CHANGE_FOLDERS = sum(1 << right for right in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14


def main(arguments: list[str]) -> None:
    """Restrict this process, then execute the command."""
    separator = arguments.index("--")
    _confine(arguments[:separator])
    command = arguments[separator + 1 :]
    os.execv(command[0], command)


def _confine(folders: list[str]) -> None:
    version = _system(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    on_files = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    rights = on_files | _CHANGE_FOLDERS | (_REFER if version >= 2 else 0)
    handled = struct.pack("Q", rights)
    rules = _system(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    _allow(rules, os.devnull, on_files)
    for folder in folders:
        _allow(rules, folder, rights)
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "privileges cannot be given up")
    _system(_RESTRICT_SELF, rules, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _system(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _system(number: int, *values: object) -> int:
    answer = _libc.syscall(number, *values)
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel's Landlock cannot be used: {os.strerror(code)}")
    return answer


_libc = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"error: {error.strerror}\nWithout it nothing of conda is installed outside a sandbox.")
