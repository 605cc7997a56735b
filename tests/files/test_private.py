import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.errors import SettingsError
from belljar.files.fd_walk import disarm
from belljar.files.private import make_folder, open_data_directory, write_file
from belljar.ipc import bind

ANYBODY = 65534


@pytest.fixture(autouse=True)
def unrestricted() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_its_users_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b" / "c", 0o711)
    write_file(tmp_path / "a" / "file", "text")
    with socket.socket(socket.AF_UNIX) as listener:
        bind(listener, tmp_path / "a" / "end")
    paths = [tmp_path / "a" / name for name in ("", "b", "b/c", "file", "end")]
    assert [mode(path) for path in paths] == [0o700, 0o700, 0o711, 0o600, 0o600]


def test_a_file_that_was_open_is_closed_when_it_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o666)
    write_file(tmp_path / "file", b"new")
    assert (mode(tmp_path / "file"), (tmp_path / "file").read_bytes()) == (0o600, b"new")


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "file").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic links"):
        write_file(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_bytes() == b""


@pytest.mark.parametrize("wide", [0o777, 0o1777, 0o757])
def test_a_data_directory_that_everybody_may_write_is_refused(tmp_path: Path, wide: int) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(wide)
    with pytest.raises(SettingsError, match=r"can be written by everybody \(mode") as refusal:
        open_data_directory(tmp_path / "data")
    assert f"chmod 700 {tmp_path / 'data'}" in refusal.value.hint
    assert mode(tmp_path / "data") == wide


def test_a_data_directory_behind_a_link_is_closed_too(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir(0o755)
    (tmp_path / "large-disk").chmod(0o755)
    (tmp_path / "data").symlink_to("large-disk")
    open_data_directory(tmp_path / "data")
    assert mode(tmp_path / "large-disk") == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_data_directory_of_another_user_or_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(0o700)
    os.chown(tmp_path / "data", ANYBODY, ANYBODY)
    with pytest.raises(SettingsError, match=f"belongs to user {ANYBODY}, and this is user 0"):
        open_data_directory(tmp_path / "data")
    os.chown(tmp_path / "data", 0, ANYBODY)
    (tmp_path / "data").chmod(0o770)
    with pytest.raises(SettingsError, match="can be written by group"):
        open_data_directory(tmp_path / "data")


def test_a_tree_that_sleeps_keeps_its_pipes_and_no_bits_that_act(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "armed").touch()
    (tree / "deep" / "armed").chmod(0o6755)
    os.mkfifo(tree / "pipe")
    outside = tmp_path / "outside"
    outside.touch()
    outside.chmod(0o4755)
    (tree / "link").symlink_to(outside)
    disarm([tree, tmp_path / "missing"])
    assert (mode(tree / "deep" / "armed"), mode(outside)) == (0o755, 0o4755)
    assert (tree / "pipe").is_fifo()
    disarm([tree], keeps_pipes=False)
    assert sorted(path.name for path in tree.iterdir()) == ["deep", "link"]
