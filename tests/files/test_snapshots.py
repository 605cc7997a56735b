import contextlib
import errno
import itertools
import mmap
import os
import random
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from hostile_trees import (
    RAW,
    SECRET,
    build_deep,
    build_shapes,
    build_specials,
    edit,
    open_descriptors,
    picture,
    place_of,
)

from belljar.errors import EngineError, InvalidArgument
from belljar.files import fd_walk, snapshot_read, snapshot_write, stat_trust, tree_copy
from belljar.files.snapshots import Snapshots

MEBIBYTE = 1 << 20


@pytest.fixture
def folder(place: Path) -> Path:
    return place / "session"


@pytest.fixture
def snapshots(place: Path) -> Snapshots:
    return Snapshots(place / "session", place / "store", limit_bytes=100 * MEBIBYTE)


def stored(place: Path) -> int:
    """Count what the store holds; its folder is made with the first."""
    return len(list((place / "store").iterdir())) if (place / "store").exists() else 0


def identity(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def test_restoring_brings_back_everything_and_keeps_the_folder_itself(
    place: Path, folder: Path, snapshots: Snapshots
) -> None:
    build_shapes(folder, place / "outside")
    before, inode = picture(folder), folder.stat().st_ino
    assert snapshots.take("start").is_complete
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / "data" / "table.csv").mkdir(parents=True)
    (folder / "link").mkdir()
    for name in ("sparse", "new"):
        (folder / name).touch()
    (folder / RAW).symlink_to(place / "outside" / "file")
    folder.chmod(0o711)
    descriptors = open_descriptors()
    report = snapshots.restore("start")
    assert picture(folder) == before
    assert folder.stat().st_ino == inode
    assert (report.is_complete, report.skipped) == (True, ())
    assert open_descriptors() == descriptors
    assert (folder / "sparse").stat().st_blocks * 512 < MEBIBYTE
    assert (place / "outside" / "file").read_bytes() == SECRET


@pytest.mark.parametrize("seed", range(12 if os.environ.get("BELLJAR_LONG") else 4))
def test_after_any_edits_restoring_gives_back_exactly_the_tree(
    folder: Path, snapshots: Snapshots, place: Path, seed: int
) -> None:
    chance = random.Random(seed)
    pictures: dict[str, object] = {}
    for number in range(25):
        for _ in range(chance.randrange(8)):
            edit(folder, chance)
        label = str(chance.randrange(6))
        if label not in pictures or chance.random() < 0.5:
            assert snapshots.take(label).is_complete
            pictures[label] = picture(folder)
        else:
            assert snapshots.restore(label).is_complete
            assert picture(folder) == pictures[label], f"step {number}"
            assert snapshots.take("again").copied_files == 0, "everything is in the store already"
            pictures["again"] = pictures[label]
    for label, expected in pictures.items():
        snapshots.restore(label)
        assert picture(folder) == expected
        snapshots.drop(label)
    assert (snapshots.labels, snapshots.size_bytes, stored(place)) == ((), 0, 0)


def test_what_is_unchanged_is_neither_copied_nor_touched(place: Path, folder: Path, snapshots: Snapshots) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "big").write_bytes(os.urandom(3 * MEBIBYTE))
    (folder / "link").symlink_to("data")
    (folder / "small").write_bytes(b"1")
    first = snapshots.take("first")
    (folder / "small").write_bytes(b"22")
    second = snapshots.take("second")
    assert (first.copied_files, first.copied_bytes) == (2, 3 * MEBIBYTE + 1)
    assert (second.copied_files, second.copied_bytes) == (1, 2)
    before = [identity(folder / name) for name in ("data", "data/big", "link")]
    report = snapshots.restore("first")
    assert (folder / "small").read_bytes() == b"1"
    assert (report.written_files, report.removed) == (1, 0)
    assert [identity(folder / name) for name in ("data", "data/big", "link")] == before
    assert stored(place) == 3


def test_a_big_file_is_not_read_again(folder: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "big").write_bytes(os.urandom(MEBIBYTE))
    snapshots.take("first")

    def read(*_: object) -> bytes:
        pytest.fail("content was read")

    for name in ("pread", "copy_file_range"):
        monkeypatch.setattr(os, name, read)
    snapshots.take("second")
    snapshots.restore("first")


def test_a_file_that_was_only_renamed_or_got_another_mode_is_not_stored_again(
    place: Path, folder: Path, snapshots: Snapshots
) -> None:
    (folder / "file").write_bytes(bytes(1000))
    snapshots.take("first")
    (folder / "file").chmod(0o600)
    (folder / "file").rename(folder / "renamed")
    assert snapshots.take("second").copied_files == 0
    assert stored(place) == 1
    snapshots.restore("first")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o644


def test_a_file_with_many_names_is_stored_once(place: Path, folder: Path, snapshots: Snapshots) -> None:
    (folder / "0").write_bytes(bytes(1000))
    for number in range(1, 10):
        (folder / str(number)).hardlink_to(folder / "0")
    report = snapshots.take("first")
    assert (report.entries, report.copied_files, stored(place)) == (10, 1, 1)


def test_an_overwrite_that_forges_size_and_time_is_noticed(folder: Path, snapshots: Snapshots) -> None:
    file = folder / "file"
    for number in range(30):  # many, because writes within one tick of the clock are the hard case
        file.write_bytes(b"before%02d" % number)
        snapshots.take("before")
        status = file.stat()
        with file.open("r+b") as stream:
            stream.write(b"after!")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        snapshots.take("after")
        snapshots.restore("before")
        assert file.read_bytes() == b"before%02d" % number
        snapshots.restore("after")
        assert file.read_bytes() == b"after!%02d" % number


def test_writing_through_a_mapping_is_noticed_though_no_time_tells(folder: Path, snapshots: Snapshots) -> None:
    file = folder / "array"
    file.write_bytes(bytes(10_000))
    with file.open("r+b") as stream:
        mapping = mmap.mmap(stream.fileno(), 0)
    with mapping:
        mapping[0] = 1
        snapshots.take("one")
        status = file.stat()
        mapping[0] = 2
        assert (file.stat().st_mtime_ns, file.stat().st_ctime_ns) == (status.st_mtime_ns, status.st_ctime_ns)
        snapshots.take("two")
        mapping[0] = 3
        snapshots.restore("one")
        assert mapping[0] == 1, "whoever has it mapped sees what is restored"
        snapshots.restore("two")
        assert mapping[0] == 2


def test_where_writers_cannot_be_asked_for_only_old_files_are_trusted(
    folder: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "no leases")

    monkeypatch.setattr(stat_trust.fcntl, "fcntl", refuse)
    (folder / "file").write_bytes(b"content")
    descriptor = os.open(folder / "file", os.O_RDONLY)
    assert not stat_trust.StatTrust().is_sound(descriptor)
    monkeypatch.setattr(stat_trust, "_WRITTEN_BACK_NS", -1)
    assert stat_trust.StatTrust().is_sound(descriptor)
    os.close(descriptor)
    snapshots.take("first")
    assert snapshots.take("second").copied_files == 0


def test_files_that_are_open_see_what_is_restored(folder: Path, snapshots: Snapshots) -> None:
    (folder / "log").write_bytes(b"one\n")
    with (folder / "log").open("r+b") as stream:
        snapshots.take("one")
        stream.write(b"two\nthree\n")
        stream.flush()
        snapshots.restore("one")
        assert os.pread(stream.fileno(), 100, 0) == b"one\n"
        assert os.fstat(stream.fileno()).st_ino == (folder / "log").stat().st_ino


def test_a_huge_sparse_file_is_kept_and_restored_without_its_holes(folder: Path, snapshots: Snapshots) -> None:
    with (folder / "sparse").open("w+b") as file:
        file.truncate(1 << 40)
        os.pwrite(file.fileno(), b"middle", 1 << 39)
        assert snapshots.take("first").copied_bytes < MEBIBYTE
        os.pwrite(file.fileno(), b"added", 1 << 38)
        os.pwrite(file.fileno(), b"MIDDLE", 1 << 39)
        snapshots.restore("first")
        assert os.pread(file.fileno(), 6, 1 << 39) == b"middle"
        assert os.pread(file.fileno(), 5, 1 << 38) == bytes(5)
    (folder / "sparse").unlink()
    snapshots.restore("first")
    assert (folder / "sparse").stat().st_size == 1 << 40
    assert (folder / "sparse").stat().st_blocks * 512 < MEBIBYTE


def test_special_files_are_named_and_left_where_they_are(folder: Path, snapshots: Snapshots) -> None:
    build_specials(folder)
    report = snapshots.take("first")
    assert report.is_complete
    assert sorted((skipped.name, skipped.reason) for skipped in report.skipped) == [
        ("pipe", "is a named pipe"),
        ("socket", "is a socket"),
    ]
    os.mkfifo(folder / "added")
    assert snapshots.restore("first").is_complete
    assert sorted(path.name for path in folder.iterdir()) == ["pipe", "socket"]
    (folder / "pipe").unlink()
    restored = snapshots.restore("first")
    assert not restored.is_complete
    assert [skipped.name for skipped in restored.skipped] == ["pipe"]


def test_what_the_mode_forbids_is_kept_and_restored(folder: Path, snapshots: Snapshots) -> None:
    closed = folder / "closed"
    closed.mkdir()
    (closed / "file").write_bytes(b"content")
    (closed / "file").chmod(0)
    closed.chmod(0)
    assert snapshots.take("first").is_complete
    assert stat.S_IMODE(closed.stat().st_mode) == 0
    assert snapshots.take("second").copied_files == 0
    closed.chmod(0o700)
    (closed / "file").chmod(0o600)
    (closed / "file").write_bytes(b"changed")
    (closed / "below").mkdir()
    (closed / "below" / "file").touch()
    (closed / "below").chmod(0)
    closed.chmod(0o100)
    assert snapshots.restore("first").is_complete
    assert stat.S_IMODE(closed.stat().st_mode) == 0
    closed.chmod(0o700)
    assert [path.name for path in closed.iterdir()] == ["file"]
    assert stat.S_IMODE((closed / "file").stat().st_mode) == 0
    (closed / "file").chmod(0o400)
    assert (closed / "file").read_bytes() == b"content"


def test_a_folder_that_cannot_be_read_whole_is_not_kept() -> None:
    with place_of("root") as root:
        root.chmod(0o755)
        (root / "session").mkdir()
        (root / "session" / "theirs").touch(mode=0o600)
        with place_of("ordinary") as place:
            report = Snapshots(root / "session", place / "store", limit_bytes=MEBIBYTE).take("first")
        assert (report.is_complete, report.reason) == (False, "'theirs' cannot be kept: Operation not permitted")


def test_owners_come_back_and_rights_of_owners_do_not() -> None:
    with place_of("root") as place:
        folder = place / "session"
        folder.mkdir()
        build_shapes(folder, place)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12_345, 23_456, follow_symlinks=False)
        (folder / "data" / "deep" / "run.sh").chmod(0o6755)
        snapshots = Snapshots(folder, place / "store", limit_bytes=MEBIBYTE)
        before = picture(folder)
        snapshots.take("first")
        assert {path.stat().st_uid for path in (place / "store").iterdir()} == {0}
        assert {stat.S_IMODE(path.stat().st_mode) for path in (place / "store").iterdir()} == {0o600}
        assert stat.S_IMODE((place / "store").stat().st_mode) == 0o700
        snapshots.restore("first")
        assert picture(folder) == before, "untouched, its rights included"
        subprocess.run(["sh", "-c", "rm -rf data link; chown -h 0:0 .hidden loop"], cwd=folder, check=True)
        snapshots.restore("first")
        run = before["data/deep/run.sh"]
        assert picture(folder) == before | {"data/deep/run.sh": (run[0], 0o755, *run[2:])}


def test_a_file_from_outside_that_was_linked_to_is_never_written(
    folder: Path, place: Path, snapshots: Snapshots
) -> None:
    outside = place / "outside" / "file"
    (folder / "file").hardlink_to(outside)
    snapshots.take("first")
    outside.write_bytes(b"news of the host")
    outside.chmod(0o600)
    snapshots.restore("first")
    assert (folder / "file").read_bytes() == SECRET
    assert (outside.read_bytes(), stat.S_IMODE(outside.stat().st_mode)) == (b"news of the host", 0o600)


def test_over_the_limit_there_is_no_snapshot_and_the_ones_before_stay(place: Path, folder: Path) -> None:
    snapshots = Snapshots(folder, place / "store", limit_bytes=3 * MEBIBYTE)
    (folder / "kept").write_bytes(b"kept")
    snapshots.take("first")
    before, size_bytes = picture(folder), snapshots.size_bytes
    for number in range(4):
        (folder / str(number)).write_bytes(bytes(MEBIBYTE))
    report = snapshots.take("second")
    assert (report.is_complete, report.copied_files, report.copied_bytes) == (False, 0, 0)
    assert report.reason == f"all snapshots together would take more than {3 * MEBIBYTE} bytes"
    assert (snapshots.labels, snapshots.size_bytes, stored(place)) == (("first",), size_bytes, 1)
    with pytest.raises(InvalidArgument, match="'second' was not kept: all snapshots together"):
        snapshots.restore("second")
    snapshots.restore("first")
    assert picture(folder) == before
    assert snapshots.take("second").is_complete


def test_many_empty_files_are_over_the_limit_too(place: Path, folder: Path) -> None:
    snapshots = Snapshots(folder, place / "store", limit_bytes=10_000)
    for number in range(100):
        (folder / str(number)).touch()
    assert not snapshots.take("first").is_complete
    assert stored(place) == 0


def test_too_many_entries_or_too_deep_a_tree_is_not_kept(
    place: Path, folder: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_deep(folder)
    descriptors = open_descriptors()
    assert snapshots.take("deep").reason == "the folder is more than 64 levels deep"
    assert open_descriptors() == descriptors
    monkeypatch.setattr(snapshot_read, "MAX_ENTRIES", 10)
    assert snapshots.take("many").reason == "the folder has more than 10 entries"
    assert stored(place) == 0


def test_a_deep_tree_that_was_added_is_removed(folder: Path, snapshots: Snapshots) -> None:
    (folder / "kept").mkdir()
    snapshots.take("first")
    build_deep(folder / "kept")
    assert snapshots.restore("first").is_complete
    assert [path.name for path in folder.rglob("*")] == ["kept"]


def test_very_many_added_files_are_removed(folder: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_write, "_BATCH", 7)
    monkeypatch.setattr(fd_walk, "_BATCH", 7)
    (folder / "kept").touch()
    snapshots.take("first")
    (folder / "below").mkdir()
    for number in range(100):
        (folder / str(number)).touch()
        (folder / "below" / str(number)).touch()
    assert snapshots.restore("first").removed == 101
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_store_without_room_keeps_nothing_and_says_so(
    place: Path, folder: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_bytes(b"content")

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot_read, "copy_content", fail)
    report = snapshots.take("first")
    assert (report.is_complete, report.reason) == (
        False,
        "a file cannot be copied to the store of snapshots: No space left on device",
    )
    assert stored(place) == 0


def test_what_cannot_be_restored_is_named_and_the_rest_is_restored(
    folder: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "gone").write_bytes(b"gone")
    (folder / "mode").touch(mode=0o600)
    snapshots.take("first")
    (folder / "gone").unlink()
    (folder / "mode").chmod(0o644)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot_write, "copy_content", fail)
    report = snapshots.restore("first")
    assert not report.is_complete
    assert [(skipped.name, skipped.reason) for skipped in report.skipped] == [
        ("gone", "cannot be restored: No space left on device")
    ]
    assert [path.name for path in folder.iterdir()] == ["mode"]
    assert stat.S_IMODE((folder / "mode").stat().st_mode) == 0o600


@pytest.mark.parametrize(("writes", "is_reported"), [(1, False), (2, True)])
def test_a_file_written_meanwhile_is_copied_again_once(
    place: Path, folder: Path, snapshots: Snapshots, writes: int, is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "file"
    file.write_bytes(b"start")
    left = [b"+"] * writes
    real = tree_copy.copy_content

    def write_meanwhile(source: int, target: int, limit_bytes: int) -> int:
        copied = real(source, target, limit_bytes)
        if left:
            with file.open("ab") as stream:
                stream.write(left.pop())
        return copied

    monkeypatch.setattr(snapshot_read, "copy_content", write_meanwhile)
    report = snapshots.take("first")
    assert (report.is_complete, report.copied_files, stored(place)) == (True, 1, 1)
    assert [changed.name for changed in report.changed] == (["file"] if is_reported else [])
    file.write_bytes(b"")
    snapshots.restore("first")
    assert file.read_bytes() == b"start+"


def test_a_program_that_runs_is_restored_by_replacing_it(folder: Path, snapshots: Snapshots) -> None:
    (folder / "program").write_bytes(b"as it was")
    (folder / "program").chmod(0o755)
    snapshots.take("first")
    (folder / "program").write_bytes(Path("/bin/sleep").read_bytes())
    running = subprocess.Popen([folder / "program", "60"])
    try:
        assert snapshots.restore("first").is_complete
        assert (folder / "program").read_bytes() == b"as it was"
    finally:
        running.kill()
        running.wait()


def test_code_that_keeps_writing_breaks_nothing(place: Path, folder: Path, snapshots: Snapshots) -> None:
    build_shapes(folder, place / "outside")
    before = picture(folder)
    assert snapshots.take("start").is_complete
    is_over = threading.Event()
    edits: list[bool] = []

    def write() -> None:
        chance = random.Random(1)
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                edit(folder, chance)
                edits.append(True)
                (folder / "data").rename(folder / "aside")
                (folder / "data").symlink_to(place / "outside")
                (folder / "data").unlink()
                (folder / "aside").rename(folder / "data")

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for number in itertools.count():
            snapshots.take(str(number % 3))
            snapshots.restore("start")
            if number >= 60 and len(edits) > 60:  # it was writing all the time
                break
    finally:
        is_over.set()
        writing.join()
    assert snapshots.restore("start").is_complete
    assert picture(folder) == before
    assert (place / "outside" / "file").read_bytes() == SECRET
    assert [path.name for path in (place / "outside").iterdir()] == ["file"]


def test_calls_from_many_threads_take_turns(folder: Path, snapshots: Snapshots, place: Path) -> None:
    (folder / "file").write_bytes(b"content")
    threads = [threading.Thread(target=snapshots.take, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(snapshots.labels) == [str(number) for number in range(8)]
    assert stored(place) == 1


def test_dropping_frees_what_no_other_snapshot_has(place: Path, folder: Path, snapshots: Snapshots) -> None:
    (folder / "both").write_bytes(bytes(1_000))
    (folder / "first").write_bytes(bytes(2_000))
    snapshots.take("first")
    (folder / "first").unlink()
    (folder / "second").write_bytes(bytes(3_000))
    snapshots.take("second")
    assert (snapshots.labels, stored(place)) == (("first", "second"), 3)
    assert 6_000 < snapshots.size_bytes < 9_000
    snapshots.drop("first")
    snapshots.drop("first")
    assert (snapshots.labels, stored(place)) == (("second",), 2)
    snapshots.drop("second")
    assert (snapshots.size_bytes, stored(place)) == (0, 0)
    assert snapshots.take("third").copied_files == 2, "nothing is believed to be in the store that is not"
    snapshots.restore("third")
    with pytest.raises(InvalidArgument, match=r"no snapshot 'second'. Kept are 'third'"):
        snapshots.restore("second")


def test_a_label_taken_again_is_replaced_and_comes_last(place: Path, folder: Path, snapshots: Snapshots) -> None:
    for content in (b"one", b"two"):
        (folder / "file").write_bytes(content)
        snapshots.take("same")
        snapshots.take(content.decode())
    assert snapshots.labels == ("one", "same", "two")
    (folder / "file").unlink()
    snapshots.restore("same")
    assert (folder / "file").read_bytes() == b"two"
    assert stored(place) == 2


def test_a_folder_that_is_gone_or_a_link_is_refused(place: Path, folder: Path, snapshots: Snapshots) -> None:
    snapshots.take("first")
    folder.rmdir()
    folder.symlink_to(place / "outside")
    assert not snapshots.take("second").is_complete
    with pytest.raises(EngineError, match="cannot be restored"):
        snapshots.restore("first")
    assert (place / "outside" / "file").read_bytes() == SECRET


def test_a_store_from_before_is_emptied_and_closing_removes_it(place: Path, folder: Path) -> None:
    (place / "store").mkdir()
    (place / "store" / "0").write_bytes(b"from a server that is gone")
    snapshots = Snapshots(folder, place / "store", limit_bytes=MEBIBYTE)
    assert stored(place) == 0
    (folder / "file").touch()
    snapshots.take("first")
    snapshots.close()
    snapshots.close()
    assert not (place / "store").exists()
    assert snapshots.labels == ()


def test_a_store_that_never_held_anything_leaves_no_folder_and_nothing_can_be_stored_once_it_is_closed(
    place: Path, folder: Path
) -> None:
    snapshots = Snapshots(folder, place / "store", limit_bytes=MEBIBYTE)
    snapshots.take("no files")
    snapshots.restore("no files")
    assert not (place / "store").exists()
    snapshots.close()
    (folder / "file").write_bytes(b"late")
    with pytest.raises(EngineError, match="tampered"):
        snapshots.take("late")
    assert not (place / "store").exists()


def test_our_own_unfinished_writes_are_not_kept(folder: Path, snapshots: Snapshots) -> None:
    (folder / ".belljar-unfinished-0123").touch()
    assert snapshots.take("first").entries == 0


def test_a_snapshot_can_be_made_the_content_of_another_folder(place: Path, folder: Path, snapshots: Snapshots) -> None:
    build_shapes(folder, place / "outside")
    snapshots.take("first")
    before = picture(folder)
    (folder / ".hidden").write_bytes(b"changed since")
    now = picture(folder)
    (place / "other").mkdir()
    (place / "other" / "in the way").touch()
    assert snapshots.export("first", place / "other").is_complete
    assert picture(place / "other") == before
    assert picture(folder) == now, "this one is left alone"
    assert snapshots.take("second").copied_files == 1, "and what is known of it stays known"
    with pytest.raises(InvalidArgument, match="no snapshot 'none'"):
        snapshots.export("none", place / "other")


def test_another_server_goes_on_with_snapshots_and_gives_up_what_is_not_wanted(place: Path, folder: Path) -> None:
    first = Snapshots(folder, place / "store", limit_bytes=100 * MEBIBYTE, outlives_server=True)
    build_shapes(folder, place / "outside")
    before = picture(folder)
    assert first.take("start").is_complete
    (folder / "later").write_text("later")
    assert first.take("later").is_complete
    (place / "store").rename(place / "left")
    second = Snapshots(folder, place / "store", limit_bytes=100 * MEBIBYTE, outlives_server=True)
    (place / "left" / "tree-torn").write_text('["folder", 1')
    assert second.inherit(place / "left", ["start", "torn", "gone"]) == ["start"]
    assert not (place / "left").exists()
    assert second.size_bytes <= first.size_bytes
    assert second.restore("start").is_complete
    assert picture(folder) == before
    second.drop("start")
    assert stored(place) == 0
