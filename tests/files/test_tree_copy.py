import errno
import itertools
import os
import stat
import threading
from pathlib import Path

import pytest
from hostile_trees import (
    RAW,
    build_deep,
    build_shapes,
    build_specials,
    contents,
    open_descriptors,
    picture,
    place_of,
)

from belljar.errors import EngineError, FileMissing, InvalidPath, TooLarge
from belljar.files import fd_walk, tree_copy
from belljar.files.tree_copy import CopyReport, copy_tree

MEBIBYTE = 1 << 20


def copy(place: Path, limit_bytes: int = 100 * MEBIBYTE) -> CopyReport:
    return copy_tree(place / "session", place / "copy", owner=None, limit_bytes=limit_bytes)


def test_a_copy_has_everything_as_it_was(place: Path) -> None:
    build_shapes(place / "session", place / "outside")
    descriptors = open_descriptors()
    report = copy(place)
    assert open_descriptors() == descriptors
    assert picture(place / "copy") == picture(place / "session")
    assert (report.skipped, report.changed) == ((), ())
    assert report.files == 7
    assert (place / "copy" / "out").is_symlink()
    assert (place / "copy" / "sparse").stat().st_blocks * 512 < MEBIBYTE
    assert (place / "copy" / "same").stat().st_nlink == 1, "hard links become files of their own"


def test_a_copy_is_independent(place: Path) -> None:
    (place / "session" / "file").write_bytes(b"before")
    copy(place)
    (place / "session" / "file").write_bytes(b"after!")
    assert (place / "copy" / "file").read_bytes() == b"before"


def test_an_empty_folder_that_is_there_is_filled_and_stays_the_same_one(place: Path) -> None:
    build_shapes(place / "session", place / "outside")
    (place / "copy").mkdir(mode=0o710)
    inode = (place / "copy").stat().st_ino
    copy(place)
    assert (place / "copy").stat().st_ino == inode
    assert stat.S_IMODE((place / "copy").stat().st_mode) == 0o710
    assert contents(place / "copy") == contents(place / "session")


def test_a_folder_with_something_in_it_is_refused_and_left_alone(place: Path) -> None:
    (place / "copy").mkdir()
    (place / "copy" / "mine").touch()
    with pytest.raises(InvalidPath, match="not an empty folder"):
        copy(place)
    assert list((place / "copy").iterdir()) == [place / "copy" / "mine"]


def test_everything_belongs_to_the_owner_and_nothing_runs_with_his_rights() -> None:
    with place_of("root") as place:
        (place / "session").mkdir()
        build_shapes(place / "session", place)
        for mode, name in ((0o6755, "data/deep/run.sh"), (0o2775, "data")):
            os.chown(place / "session" / name, 12_345, 12_345)
            (place / "session" / name).chmod(mode)
        copy_tree(place / "session", place / "copy", owner=(23_456, 34_567), limit_bytes=100 * MEBIBYTE)
        copied = [place / "copy", *(place / "copy").rglob("*")]
        assert {(path.lstat().st_uid, path.lstat().st_gid) for path in copied} == {(23_456, 34_567)}
        assert stat.S_IMODE((place / "copy" / "data" / "deep" / "run.sh").stat().st_mode) == 0o755
        assert stat.S_IMODE((place / "copy" / "data").stat().st_mode) == 0o775


def test_pipes_and_sockets_are_left_out_and_named(place: Path) -> None:
    (place / "session" / RAW).mkdir()
    build_specials(place / "session" / RAW)
    report = copy(place)
    assert sorted((skipped.name, skipped.reason) for skipped in report.skipped) == [
        ("not-utf8-\ufffd\ufffd/pipe", "is a named pipe"),
        ("not-utf8-\ufffd\ufffd/socket", "is a socket"),
    ]
    assert list((place / "copy" / RAW).iterdir()) == []


def test_of_very_many_left_out_only_some_are_named(place: Path) -> None:
    for number in range(150):
        os.mkfifo(place / "session" / str(number))
    report = copy(place)
    assert len(report.skipped) == 100


def test_more_data_than_the_limit_is_refused_and_leaves_nothing(place: Path) -> None:
    for number in range(4):
        (place / "session" / str(number)).write_bytes(bytes(MEBIBYTE))
    assert copy(place, 4 * MEBIBYTE).data_bytes == 4 * MEBIBYTE
    with pytest.raises(TooLarge, match=f"more than {4 * MEBIBYTE - 1} bytes"):
        copy_tree(place / "session", place / "second", owner=None, limit_bytes=4 * MEBIBYTE - 1)
    assert not (place / "second").exists()
    (place / "third").mkdir()
    with pytest.raises(TooLarge):
        copy_tree(place / "session", place / "third", owner=None, limit_bytes=MEBIBYTE)
    assert list((place / "third").iterdir()) == []


def test_a_sparse_file_counts_for_what_it_fills(place: Path) -> None:
    with (place / "session" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        os.pwrite(file.fileno(), b"end", (1 << 40) - 3)
    report = copy(place, MEBIBYTE)
    assert 3 <= report.data_bytes < MEBIBYTE
    copied = place / "copy" / "sparse"
    assert (copied.stat().st_size, copied.stat().st_blocks * 512 < MEBIBYTE) == (1 << 40, True)
    with copied.open("rb") as file:
        assert os.pread(file.fileno(), 10, (1 << 40) - 3) == b"end"


def test_a_file_that_is_hard_linked_many_times_cannot_exceed_the_limit(place: Path) -> None:
    (place / "session" / "0").write_bytes(bytes(MEBIBYTE))
    for number in range(1, 10):
        (place / "session" / str(number)).hardlink_to(place / "session" / "0")
    with pytest.raises(TooLarge):
        copy(place, 5 * MEBIBYTE)


def test_a_very_deep_tree_is_refused_and_leaves_nothing(place: Path) -> None:
    build_deep(place / "session")
    descriptors = open_descriptors()
    with pytest.raises(TooLarge, match="levels deep"):
        copy(place)
    assert not (place / "copy").exists()
    assert open_descriptors() == descriptors


def test_too_many_entries_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_copy, "MAX_ENTRIES", 5)
    for number in range(6):
        (place / "session" / str(number)).touch()
    with pytest.raises(TooLarge, match="more than 5 entries"):
        copy(place)
    assert not (place / "copy").exists()


def test_what_the_mode_forbids_is_copied_all_the_same_and_keeps_its_mode(place: Path) -> None:
    closed = place / "session" / "closed"
    for name, mode in (("none", 0), ("listed", 0o400), ("entered", 0o100)):
        (closed / name).mkdir(parents=True)
        (closed / name / "file").write_bytes(b"content")
        (closed / name / "file").chmod(0)
        (closed / name).chmod(mode)
    report = copy(place)
    assert (report.files, report.skipped) == (3, ())
    for folder in (closed, place / "copy" / "closed"):
        assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("none", "listed", "entered")] == [
            0,
            0o400,
            0o100,
        ]
        assert stat.S_IMODE((folder / "entered" / "file").stat().st_mode) == 0
        (folder / "entered" / "file").chmod(0o400)
        assert (folder / "entered" / "file").read_bytes() == b"content"


def test_what_belongs_to_another_and_cannot_be_read_is_named() -> None:
    with place_of("root") as root:
        root.chmod(0o755)
        for name in ("session", "session/closed"):
            (root / name).mkdir(mode=0o755)
        (root / "session" / "theirs").touch(mode=0o600)
        (root / "session" / "closed").chmod(0o700)
        with place_of("ordinary") as place:
            report = copy_tree(root / "session", place / "copy", owner=None, limit_bytes=0)
        assert sorted(skipped.name for skipped in report.skipped) == ["closed", "theirs"]


def test_a_missing_folder_is_said_to_be_missing_and_nothing_stays(place: Path) -> None:
    with pytest.raises(FileMissing):
        copy_tree(place / "nowhere", place / "copy", owner=None, limit_bytes=0)
    (place / "link").symlink_to(place / "outside")
    with pytest.raises(FileMissing):
        copy_tree(place / "link", place / "copy", owner=None, limit_bytes=0)
    assert not (place / "copy").exists()


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, TooLarge), (errno.EIO, EngineError)])
def test_a_disk_that_fails_leaves_nothing_half_made(
    place: Path, number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "session" / "file").write_bytes(b"content")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tree_copy, "copy_content", fail)
    with pytest.raises(kind, match=os.strerror(number)):
        copy(place)
    assert not (place / "copy").exists()


def test_a_copy_that_finds_the_disk_full_says_who_can_free_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "session" / "file").write_bytes(b"content")

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tree_copy, "copy_content", fail)
    with pytest.raises(TooLarge) as refused:
        copy(place)
    assert "operator" in refused.value.hint


def test_a_folder_swapped_for_a_link_at_the_last_moment_is_not_followed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "session" / "folder").mkdir()
    (place / "session" / "folder" / "own").write_bytes(b"own")
    real = fd_walk.open_folder

    def swap_first(name: str, parent: int | None = None, *, is_written: bool = False):
        if name == "folder" and not is_written and not (place / "session" / "folder").is_symlink():
            (place / "session" / "folder").rename(place / "moved")
            (place / "session" / "folder").symlink_to(place / "outside")
        return real(name, parent, is_written=is_written)

    monkeypatch.setattr(tree_copy, "open_folder", swap_first)
    copy(place)
    assert (place / "copy" / "folder").is_symlink()


def test_a_file_swapped_for_a_link_or_a_pipe_is_never_followed_nor_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "session" / "file"
    file.write_bytes(b"own")
    real = fd_walk.open_file
    swaps = iter((lambda: file.symlink_to(place / "outside" / "file"), lambda: os.mkfifo(file)))

    def swap_first(name: str, parent: int, *, is_written: bool = False):
        file.unlink()
        next(swaps)()
        opened = real(name, parent, is_written=is_written)
        if file.is_symlink():
            # A file again by the time it is looked at anew.
            with pytest.raises(OSError, match="symbolic links"), opened:
                pass
            file.unlink()
            file.write_bytes(b"own")
            raise OSError(errno.ELOOP, "was a link")
        return opened

    monkeypatch.setattr(tree_copy, "open_file", swap_first)
    report = copy(place)
    assert [changed.name for changed in report.changed] == ["file"]
    assert list((place / "copy").iterdir()) == []


def test_swapping_folders_for_links_all_the_time_never_lets_content_from_outside_in(place: Path) -> None:
    folder, link = place / "session" / "folder", place / "session" / "link"
    folder.mkdir()
    (folder / "file").write_bytes(b"own")
    link.symlink_to(place / "outside")
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            folder.rename(place / "aside")
            link.rename(folder)
            folder.rename(link)
            (place / "aside").rename(folder)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        found: set[bytes] = set()
        for number in itertools.count():
            # A busy machine may copy at the wrong moment for long.
            if number >= 150 and found:
                break
            target = place / f"copy-{number}"
            copy_tree(place / "session", target, owner=None, limit_bytes=MEBIBYTE)
            for path in target.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    found.add(path.read_bytes())
    finally:
        is_over.set()
        swapping.join()
    assert found == {b"own"}


@pytest.mark.parametrize(("writes", "is_reported"), [(1, False), (2, True)])
def test_a_file_written_meanwhile_is_copied_again_once(
    place: Path, writes: int, is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "session" / "file"
    file.write_bytes(b"start")
    left = [b"+"] * writes
    real = tree_copy.copy_content

    def write_meanwhile(source: int, target: int, limit_bytes: int) -> int:
        copied = real(source, target, limit_bytes)
        if left:
            with file.open("ab") as stream:
                stream.write(left.pop())
        return copied

    monkeypatch.setattr(tree_copy, "copy_content", write_meanwhile)
    report = copy(place)
    assert (place / "copy" / "file").read_bytes() == b"start+"
    assert [changed.name for changed in report.changed] == (["file"] if is_reported else [])


@pytest.mark.parametrize("name", ["clone", "copy_file_range"])
def test_a_file_system_that_cannot_copy_by_itself_is_read_and_written(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> int:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", cannot)
    if name == "clone":
        monkeypatch.setattr(tree_copy, "clone", _pretend_to_clone)
    build_shapes(place / "session", place / "outside")
    report = copy(place)
    assert picture(place / "copy") == picture(place / "session")
    assert report.data_bytes < MEBIBYTE


def _pretend_to_clone(source: int, target: int) -> bool:
    """Blocks shared by a file system that can, which there may be none of here."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in tree_copy.data_ranges(source, size):
        os.pwrite(target, os.pread(source, end - start, start), start)
    return True


def test_the_limit_holds_for_content_that_is_shared_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_copy, "clone", _pretend_to_clone)
    (place / "session" / "file").write_bytes(bytes(MEBIBYTE))
    with pytest.raises(TooLarge):
        copy(place, MEBIBYTE - 1)
    assert not (place / "copy").exists()
