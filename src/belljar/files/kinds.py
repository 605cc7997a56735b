"""What a thing in a folder is, in words."""

import stat

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFREG: "regular file",
}


def kind_of(mode: int) -> str:
    """What has that mode."""
    return _KINDS.get(stat.S_IFMT(mode), "special file")
