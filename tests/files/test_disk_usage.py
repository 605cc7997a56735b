import os
import subprocess
from pathlib import Path

import pytest
from hostile_trees import build_deep

from belljar.files import disk_usage
from belljar.files.disk_usage import small_usage, usage

MEBIBYTE = 1 << 20


def test_files_and_folders_count_with_their_blocks(tmp_path: Path) -> None:
    (tmp_path / "below" / ".hidden").mkdir(parents=True)
    (tmp_path / "one").write_bytes(bytes(MEBIBYTE))
    (tmp_path / "below" / ".hidden" / "two").write_bytes(bytes(MEBIBYTE))
    assert 2 * MEBIBYTE <= usage([tmp_path]).size_bytes < 2.1 * MEBIBYTE
    assert usage([tmp_path / "one", tmp_path / "gone"]).size_bytes == 0, "not folders"


def test_a_sparse_file_counts_for_what_it_fills_and_a_hard_link_once(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    (tmp_path / "full").write_bytes(bytes(MEBIBYTE))
    (tmp_path / "same").hardlink_to(tmp_path / "full")
    assert usage([tmp_path]).size_bytes < 1.1 * MEBIBYTE


def test_symlinks_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(bytes(MEBIBYTE))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "own" / "loop").symlink_to(tmp_path / "own")
    assert usage([tmp_path / "own"]).size_bytes < MEBIBYTE
    assert usage([tmp_path / "own" / "link"]).size_bytes == 0


def test_names_alone_take_room_too(tmp_path: Path) -> None:
    for number in range(1_000):
        (tmp_path / str(number)).touch()
    assert usage([tmp_path]).size_bytes >= 1_000 * 512


def test_a_tree_too_deep_to_walk_is_measured_all_the_same(tmp_path: Path) -> None:
    build_deep(tmp_path, 3_000)
    assert usage([tmp_path]).size_bytes >= 3_000 * 512
    subprocess.run(["rm", "-rf", "d"], cwd=tmp_path, check=True)


def test_a_folder_with_very_many_files_is_left_to_du(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(MEBIBYTE))
    (tmp_path / "more").touch()
    monkeypatch.setattr(disk_usage, "_MAX_ENTRIES", 1)
    assert usage([tmp_path]).size_bytes >= MEBIBYTE


def test_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = len(list(Path("/proc/self/fd").iterdir()))
    usage([tmp_path])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_files_and_folders_are_counted_once_whoever_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "below").mkdir(parents=True)
    for name in ("a", "b", "below/c"):
        (tmp_path / "own" / name).touch()
    (tmp_path / "own" / "again").hardlink_to(tmp_path / "own" / "a")
    (tmp_path / "own" / "link").symlink_to("nowhere")
    assert usage([tmp_path / "own"]).files == 5
    monkeypatch.setattr(disk_usage, "_MAX_ENTRIES", 1)
    assert usage([tmp_path / "own"]).files == 6, "du counts the folder itself"


def test_small_folders_are_measured_alike_and_others_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"x" * 10_000)
    assert small_usage([tmp_path, tmp_path / "below"]) == usage([tmp_path, tmp_path / "below"])
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert small_usage([tmp_path]) is None
