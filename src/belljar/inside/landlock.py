"""The program that becomes another one which can write in some folders only: `walls.py FOLDER… -- COMMAND…`.

By Landlock, which Linux has for every user. It imports nothing of ours. What the command reads is not limited.
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
# From `remove a folder` to `make a symbolic link`.
_CHANGE_FOLDERS = sum(1 << right for right in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14


def main(words: list[str]) -> None:
    """Build the walls, then be the command."""
    middle = words.index("--")
    _confine(words[:middle])
    command = words[middle + 1 :]
    os.execv(command[0], command)  # what it is for


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
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _system(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


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
