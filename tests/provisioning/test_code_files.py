"""Root gives a folder of code files to the user that runs them, and nothing else to anybody."""

import os
from pathlib import Path

import pytest

from belljar.errors import SettingsError
from belljar.files.fd_walk import remove_tree
from belljar.provisioning.code_files import hand_over_folder
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import find_host_users

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def users() -> tuple[Identity, Identity]:
    """Of an earlier server's code, and of this one's."""
    identities = find_host_users()
    if identities is None:
        pytest.skip("this user namespace has no users to give out")
    return identities.take(), identities.take()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code" / "below").mkdir(parents=True)
    return tmp_path / "code"


def owner(path: Path) -> int:
    return path.lstat().st_uid


def test_what_an_earlier_servers_code_left_changes_hands(folder: Path, users: tuple[Identity, Identity]) -> None:
    earlier, now = users
    left = [folder, folder / "below", folder / "below" / "log.txt"]
    left[-1].touch()
    for path in left:
        os.chown(path, earlier.uid, earlier.gid)

    hand_over_folder(folder, now)

    assert [owner(path) for path in left] == [now.uid] * 3


def test_a_file_of_somebody_elses_stays_theirs(folder: Path, tmp_path: Path, users: tuple[Identity, Identity]) -> None:
    earlier, now = users
    host = tmp_path / "shadow"
    host.touch()
    (folder / "hard").hardlink_to(host)
    (folder / "soft").symlink_to(host)
    (folder / "below" / "operators").touch()
    named_twice = folder / "twice"
    named_twice.touch()
    os.chown(named_twice, earlier.uid, earlier.gid)
    (tmp_path / "elsewhere").hardlink_to(named_twice)

    hand_over_folder(folder, now)

    assert owner(folder) == now.uid
    assert owner(host) == owner(folder / "below" / "operators") == os.geteuid()
    assert owner(named_twice) == earlier.uid


def test_a_link_in_place_of_the_folder_is_refused(
    folder: Path, tmp_path: Path, users: tuple[Identity, Identity]
) -> None:
    (tmp_path / "link").symlink_to(folder)

    with pytest.raises(SettingsError, match="folder of code files"):
        hand_over_folder(tmp_path / "link", users[1])

    assert owner(folder) == os.geteuid()


@pytest.mark.parametrize(("uid", "mode"), [(12, 0o755), (0, 0o1777)], ids=["anothers", "everybodys"])
def test_a_folder_that_others_use_is_refused(
    folder: Path, users: tuple[Identity, Identity], uid: int, mode: int
) -> None:
    os.chown(folder, uid, uid)
    folder.chmod(mode)

    with pytest.raises(SettingsError, match="folder of code files"):
        hand_over_folder(folder, users[1])

    assert owner(folder) == uid


def test_a_tree_without_end_is_no_hindrance(folder: Path, users: tuple[Identity, Identity]) -> None:
    deep = os.open(folder, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)

    try:
        hand_over_folder(folder, users[1])
        assert owner(folder) == users[1].uid
    finally:
        remove_tree(folder)  # which pytest could not
