"""Runs a command that sees a folder at another path: `python data_mount.py FOLDER PATH [COMMAND…]`.

Mounts the folder there in a mount namespace of the command's own, so nobody else sees it. Root makes that namespace as
it is; an ordinary user needs a user namespace around it, in which other users' files belong to nobody. The path may be
an empty folder, or its parent a folder, which is then covered by one with the same content. Without a command it only
tries.
"""

import ctypes
import os
import sys
from pathlib import Path

_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def main(folder: str, path: str, *command: str) -> None:
    """Mount the folder at the path, and become the command."""
    enter_namespace()
    # Before the path is covered, which the folder may lie below.
    source, target = os.open(folder, os.O_PATH), Path(path)
    if not target.is_dir():
        cover(target.parent)
        target.mkdir()
    elif any(target.iterdir()):
        raise OSError(f"{path} has files of somebody else's")
    mount(f"/proc/self/fd/{source}", target, _MS_BIND | _MS_REC)
    os.close(source)
    if command:
        # As this program was given it, because Python adds a variable of its own where there is no locale.
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        os.execvpe(command[0], command, dict(entry.split(b"=", 1) for entry in given if b"=" in entry))


def enter_namespace() -> None:
    """Leave the mounts of everybody else, as root or as an ordinary user."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_MOUNTS) == 0:
        mount("none", Path("/"), _MS_REC | _MS_SLAVE)
        return
    check(_libc.unshare(_NEW_USER | _NEW_MOUNTS), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(content)


def cover(folder: Path) -> None:
    """Mount a folder in memory over another one, with everything in it that was there."""
    flags = os.O_PATH | os.O_NOFOLLOW
    entries = [(path, os.open(path, flags), path.is_symlink(), path.is_dir()) for path in folder.iterdir()]
    mount("tmpfs", folder, 0, "tmpfs", "mode=0755")
    for path, descriptor, is_link, is_folder in entries:
        if is_link:
            path.symlink_to(os.readlink("", dir_fd=descriptor))
        else:
            if is_folder:
                path.mkdir()
            else:
                path.touch()
            mount(f"/proc/self/fd/{descriptor}", path, _MS_BIND | _MS_REC)
        os.close(descriptor)


def mount(source: str, path: Path, flags: int, kind: str = "", options: str = "") -> None:
    """Mount a file system or a folder."""
    words = [word.encode() or None for word in (source, str(path), kind, options)]
    check(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {path}")


def check(answer: int, name: str) -> None:
    """Raise OSError where a function of C's library says so."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


if __name__ == "__main__":
    main(*sys.argv[1:])
