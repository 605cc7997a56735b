"""Files that outlive sessions, on the host's side."""

import os
from pathlib import Path

import pytest

from belljar.errors import InvalidPath, TooLarge
from belljar.executions.shared_workspace import WorkspaceFolder
from belljar.files.workspace import Workspace


def put(workspace_folder: WorkspaceFolder, folder: Path, name: str, content: bytes) -> None:
    (folder / "source").write_bytes(content)
    descriptor = os.open(folder / "source", os.O_RDONLY)
    try:
        with workspace_folder.locked():
            workspace_folder.put(name, descriptor, workspace_folder.files())
    finally:
        os.close(descriptor)


def test_what_was_put_is_given_with_its_time(tmp_path: Path) -> None:
    workspace_folder = WorkspaceFolder(tmp_path / "owner", limit_bytes=1_000)
    put(workspace_folder, tmp_path, "a/b.txt", b"one")
    (tmp_path / "target").mkdir()
    workspace_folder.copy_to("a/b.txt", Workspace(tmp_path / "target"), "workspace/c.txt", 100)
    copy = tmp_path / "target" / "workspace" / "c.txt"
    assert copy.read_bytes() == b"one"
    assert copy.stat().st_mtime_ns == (tmp_path / "source").stat().st_mtime_ns == workspace_folder.files()["a/b.txt"][0]


def test_every_change_has_another_version(tmp_path: Path) -> None:
    workspace_folder = WorkspaceFolder(tmp_path / "owner", limit_bytes=1_000)
    versions = [workspace_folder.version()]
    put(workspace_folder, tmp_path, "a", b"one")
    versions.append(workspace_folder.version())
    put(workspace_folder, tmp_path, "a", b"two")
    versions.append(workspace_folder.version())
    with workspace_folder.locked():
        workspace_folder.remove("a")
    versions.append(workspace_folder.version())
    assert len({*versions}) == 4
    assert versions[0] == 0
    assert workspace_folder.files() == {}


def test_there_is_room_for_so_much_and_a_file_may_replace_itself(tmp_path: Path) -> None:
    workspace_folder = WorkspaceFolder(tmp_path / "owner", limit_bytes=10)
    put(workspace_folder, tmp_path, "a", b"12345678")
    put(workspace_folder, tmp_path, "a", b"1234567890")
    with pytest.raises(TooLarge, match="1 bytes, and 0 of 10 are free"):
        put(workspace_folder, tmp_path, "b", b"1")
    assert [*workspace_folder.files()] == ["a"]


def test_there_is_room_for_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.executions.shared_workspace.MAX_FILES", 2)
    workspace_folder = WorkspaceFolder(tmp_path / "owner", limit_bytes=100)
    for name in "ab":
        put(workspace_folder, tmp_path, name, b"1")
    with pytest.raises(TooLarge, match="there are 2 files already"):
        put(workspace_folder, tmp_path, "c", b"1")
    put(workspace_folder, tmp_path, "a", b"2")


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/etc/out", "", "a\0b"])
def test_no_name_leads_out_of_it(tmp_path: Path, name: str) -> None:
    workspace_folder = WorkspaceFolder(tmp_path / "owner", limit_bytes=100)
    with pytest.raises(InvalidPath):
        put(workspace_folder, tmp_path, name, b"1")


def test_others_on_the_host_cannot_look_in(tmp_path: Path) -> None:
    workspace_folder = WorkspaceFolder(tmp_path / "owner", limit_bytes=100)
    put(workspace_folder, tmp_path, "a", b"1")
    assert (tmp_path / "owner" / "files").stat().st_mode & 0o077 == 0
