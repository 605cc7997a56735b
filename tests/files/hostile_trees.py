"""Folders as hostile code builds them, and telling whether two are the same."""

import contextlib
import os
import random
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

NOBODY = 65534
SECRET = b"content outside the session folder"
RAW = os.fsdecode(b"not-utf8-\xff\xfe")

Picture = dict[str, tuple[object, ...]]


@contextlib.contextmanager
def place_of(user: str) -> Generator[Path]:
    """An empty folder to work in, as root or as an ordinary user, whoever runs the tests."""
    is_root = os.geteuid() == 0
    if user == "root" and not is_root:
        pytest.skip("only root can give files to others")
    folder = Path(tempfile.mkdtemp(prefix="belljar-test-"))
    try:
        if user == "ordinary" and is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
            if not os.access(folder, os.W_OK, effective_ids=True):
                pytest.skip("an ordinary user cannot reach the folder for temporary files")
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
            os.setegid(0)
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False)
        subprocess.run(["rm", "-rf", folder], check=True)


def picture(folder: Path) -> Picture:
    """Everything about every entry that a copy or a snapshot has to keep."""
    return {str(path.relative_to(folder)): _look(path) for path in (folder, *folder.rglob("*"))}


def _look(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return ("link", str(path.readlink()), status.st_mtime_ns, status.st_uid, status.st_gid)
    content = path.read_bytes() if stat.S_ISREG(status.st_mode) else stat.S_IFMT(status.st_mode)
    return (content, stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_uid, status.st_gid)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def build_shapes(folder: Path, outside: Path) -> None:
    """One of each kind that can be kept."""
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "table.csv").write_bytes(b"a,b\n1,2\n")
    (folder / "data" / "deep" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "data" / "deep" / "run.sh").chmod(0o751)
    (folder / "empty").mkdir(mode=0o500)
    (folder / ".hidden").write_bytes(b"hidden")
    (folder / RAW).write_bytes(b"raw")
    (folder / "nothing").touch()
    (folder / "link").symlink_to("data/table.csv")
    (folder / "loop").symlink_to("loop")
    (folder / "out").symlink_to(outside)
    (folder / "same").hardlink_to(folder / "data" / "table.csv")
    (folder / "sticky").mkdir()
    (folder / "sticky").chmod(0o1777)
    with (folder / "sparse").open("wb") as file:
        file.truncate(64 << 20)
        for offset in (0, 5 << 20, 50 << 20):
            os.pwrite(file.fileno(), b"island", offset)
    for number, name in enumerate(("data/table.csv", "data/deep", "data", ".hidden", RAW)):
        os.utime(folder / name, ns=(10**18, 10**18 + number * 1_234_567))
    os.utime(folder / "link", ns=(10**18, 10**18 + 77), follow_symlinks=False)


def build_specials(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))


def build_deep(folder: Path, levels: int = 3_000) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)


def edit(folder: Path, chance: random.Random) -> None:
    """One thing that code may do to its folder."""
    everything = sorted(folder.rglob("*"))
    files = [path for path in everything if path.is_file() and not path.is_symlink()]
    folders = [folder, *(path for path in everything if path.is_dir() and not path.is_symlink())]
    fresh = chance.choice(folders) / f"{chance.choice('abcdefgh')}{chance.randrange(5)}"
    some = chance.choice(files) if files else None
    action = chance.randrange(12)
    if action <= 2 and not fresh.is_dir() and not fresh.is_symlink():
        fresh.write_bytes(chance.randbytes(chance.randrange(5_000)))
    elif action == 3 and not os.path.lexists(fresh):
        fresh.mkdir(mode=chance.choice((0o700, 0o755, 0o500 | 0o200)))
    elif action == 4 and not os.path.lexists(fresh):
        fresh.symlink_to(chance.choice(("nowhere", "..", "/etc/passwd")))
    elif action == 5 and some and not os.path.lexists(fresh):
        fresh.hardlink_to(some)
    elif action == 6 and some:
        some.chmod(chance.choice((0o600, 0o644, 0o755, 0o400 | 0o200)))
    elif action == 7 and some:
        _forge(some, chance)
    elif action == 8 and some:
        os.truncate(some, chance.choice((0, 100, 4 << 20)))
    elif action == 9 and some and not os.path.lexists(fresh):
        some.rename(fresh)
    elif action == 10 and some:
        some.unlink()
    elif action == 11 and len(folders) > 1:
        shutil.rmtree(chance.choice(folders[1:]))


def _forge(path: Path, chance: random.Random) -> None:
    """Another content, the same size and time."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(chance.randbytes(min(status.st_size, 5_000)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
