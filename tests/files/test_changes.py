import os
from pathlib import Path

import pytest

from belljar.files.workspace import FileChange, Workspace, changes, scan_folder


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def backdate(path: Path) -> None:
    """Give the file an age, so that a later change cannot fall into the same tick of the clock."""
    os.utime(path, ns=(10**18, 10**18))


def test_new_and_changed_files_are_told_apart_and_untouched_ones_left_out(workspace: Workspace):
    for name in ("same.txt", "sub/changed.csv", "deleted.txt"):
        workspace.write(name, b"old")
    before = scan_folder(workspace)

    workspace.write("sub/changed.csv", b"newer")
    workspace.write("plot.png", b"image")
    workspace.delete("deleted.txt")

    assert changes(before, scan_folder(workspace)) == [
        FileChange("plot.png", 5, "image/png", "created"),
        FileChange("sub/changed.csv", 5, "text/csv", "modified"),
    ]


def test_two_snapshots_of_an_idle_folder_differ_in_nothing(workspace: Workspace):
    workspace.write("a/b.txt", b"x")
    before = scan_folder(workspace)
    workspace.read("a/b.txt", 1)
    assert changes(before, scan_folder(workspace)) == []


def test_an_overwrite_with_the_same_size_and_a_restored_time_is_noticed(workspace: Workspace, tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"old")
    backdate(file)
    before = scan_folder(workspace)
    # The change time has the grain of the kernel's tick: go on until the clock has moved.
    while file.stat().st_ctime_ns == before.files["a.txt"][3]:
        file.write_bytes(b"new")
        backdate(file)

    assert changes(before, scan_folder(workspace)) == [FileChange("a.txt", 3, "text/plain", "modified")]


def test_a_file_replaced_by_another_of_the_same_size_and_time_is_noticed(workspace: Workspace, tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"123")
        backdate(tmp_path / name)
    before = scan_folder(workspace)
    (tmp_path / "b.txt").replace(tmp_path / "a.txt")
    assert [change.name for change in changes(before, scan_folder(workspace))] == ["a.txt"]


def test_undecodable_names_are_reported_once_and_in_unicode(workspace: Workspace, tmp_path: Path):
    before = scan_folder(workspace)
    (tmp_path / os.fsdecode(b"\xff.csv")).touch()
    assert changes(before, scan_folder(workspace)) == [
        FileChange("\N{REPLACEMENT CHARACTER}.csv", 0, "text/csv", "created")
    ]


def test_a_folder_beyond_the_limit_is_cut_and_old_files_are_not_called_new(workspace: Workspace, tmp_path: Path):
    for number in range(50):
        (tmp_path / f"{number}.txt").write_bytes(b"")
    newest = max(path.stat().st_ctime_ns for path in tmp_path.iterdir())
    before = scan_folder(workspace, limit=10)
    while before.taken_ns < newest + 50_000_000:
        before = scan_folder(workspace, limit=10)
    assert (len(before.files), before.is_complete) == (10, False)

    workspace.write("new.txt", b"new")
    after = scan_folder(workspace)
    assert after.is_complete
    assert changes(before, after) == [FileChange("new.txt", 3, "text/plain", "created")]


def test_an_upload_under_way_is_no_change(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = scan_folder(workspace)
    seen: list[list[FileChange]] = []
    real_rename = os.rename

    def look_then_rename(*arguments: object, **options: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        seen.append(changes(before, scan_folder(workspace)))
        real_rename(*arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "rename", look_then_rename)
    workspace.write("a.txt", b"x")
    assert seen == [[]]


def test_a_missing_folder_is_empty(workspace: Workspace, tmp_path: Path):
    tmp_path.rmdir()
    taken = scan_folder(workspace)
    assert (taken.files, taken.is_complete) == ({}, True)
    tmp_path.mkdir()
