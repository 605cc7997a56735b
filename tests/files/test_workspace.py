import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hostile_trees import place_of

from belljar.errors import FileMissing, InvalidPath, TooLarge
from belljar.files.workspace import Workspace

OUTSIDE = b"content outside the session folder"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file.txt").write_bytes(OUTSIDE)
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "session"
    root.mkdir()
    return Workspace(root)


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names(workspace: Workspace, path: str = "") -> list[str]:
    return [entry.name for entry in workspace.list(path).entries]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "./",
        "/",
        "..",
        "../file.txt",
        "a/../../file.txt",
        "a/..",
        "/etc/passwd",
        "//mnt/data/a",
        "/mnt/data",
        "/mnt/database/a",
        "/mnt/data/../a",
        "a\0b",
        "x" * 256,
        "é" * 128,
        "a/" * 64 + "b",
        "\ud800",
        "\udcff.txt",
    ],
)
def test_names_that_leave_the_folder_or_cannot_be_names_are_refused_everywhere(workspace: Workspace, name: str):
    acts: list[Callable[[], object]] = [
        lambda: workspace.check_name(name),
        lambda: workspace.open_read(name),
        lambda: workspace.read(name, 10),
        lambda: workspace.write(name, b""),
        lambda: workspace.create(name, b""),
        lambda: workspace.delete(name),
    ]
    for act in acts:
        with pytest.raises(InvalidPath) as refused:
            act()
        assert repr(name)[:100] in refused.value.message
        assert "relative to the session folder" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.txt", ("a.txt",)),
        ("./a//b/./c", ("a", "b", "c")),
        ("/mnt/data/a/b", ("a", "b")),
        ("mnt/data/a", ("mnt", "data", "a")),
        ("a\\..\\b", ("a\\..\\b",)),
        ("...", ("...",)),
        ("new\nline", ("new\nline",)),
        ("x" * 255, ("x" * 255,)),
        ("a/" * 63 + "b", (*["a"] * 63, "b")),
    ],
)
def test_names_become_components(workspace: Workspace, name: str, parts: tuple[str, ...]):
    assert workspace.check_name(name) == parts


def test_the_host_path_of_the_folder_is_understood_too(workspace: Workspace):
    assert workspace.check_name(f"{workspace.root}/a.txt") == ("a.txt",)
    with pytest.raises(InvalidPath):
        workspace.check_name(f"{workspace.root}-other/a.txt")


def test_a_long_bad_name_is_cut_in_the_message(workspace: Workspace):
    with pytest.raises(InvalidPath) as refused:
        workspace.check_name("../" + "x" * 1_000_000)
    assert len(str(refused.value)) < 400


def test_what_is_written_can_be_read_and_listed(workspace: Workspace):
    workspace.write("/mnt/data/plots/2024/a.png", b"image")
    workspace.write("table.csv", b"a,b")

    assert workspace.read("plots/2024/a.png", 5) == b"image"
    listing = workspace.list()
    assert [(entry.name, entry.size, entry.mime_type) for entry in listing.entries] == [
        ("plots/2024/a.png", 5, "image/png"),
        ("table.csv", 3, "text/csv"),
    ]
    assert listing.is_complete
    assert names(workspace, "plots") == names(workspace, "/mnt/data/plots/2024") == ["plots/2024/a.png"]


def test_a_write_replaces_the_file_and_leaves_readers_of_the_old_one_alone(workspace: Workspace):
    workspace.write("a.txt", b"old")
    file, status = workspace.open_read("a.txt")
    with file:
        workspace.write("a.txt", b"newer")
        assert (file.read(), status.st_size) == (b"old", 3)

    assert workspace.read("a.txt", 5) == b"newer"
    assert held(workspace.root) == ["a.txt"]


def test_written_files_have_mode_644_whatever_the_umask(workspace: Workspace):
    before = os.umask(0o077)
    try:
        workspace.write("a/b.txt", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((workspace.root / "a/b.txt").stat().st_mode) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_and_new_directories_go_to_the_owner_and_old_directories_stay(workspace: Workspace):
    (workspace.root / "old").mkdir()
    Workspace(workspace.root, owner=(12345, 12346)).write("old/new/a.txt", b"")

    def owner(path: str) -> tuple[int, int]:
        status = (workspace.root / path).stat()
        return status.st_uid, status.st_gid

    assert owner("old/new/a.txt") == owner("old/new") == (12345, 12346)
    assert owner("old") == (0, os.getegid())


def test_a_write_never_goes_through_a_symlink(workspace: Workspace, outside: Path):
    (workspace.root / "link.txt").symlink_to(outside / "file.txt")
    (workspace.root / "folder").symlink_to(outside)

    workspace.write("link.txt", b"inside")
    with pytest.raises(InvalidPath, match="'folder' is a symlink, not a directory"):
        workspace.write("folder/file.txt", b"inside")
    with pytest.raises(InvalidPath, match="'folder' is a symlink"):
        workspace.write("folder/new/file.txt", b"inside")

    assert (outside / "file.txt").read_bytes() == OUTSIDE
    assert held(outside) == ["file.txt"]
    assert workspace.read("link.txt", 10) == b"inside"


def test_a_write_never_goes_through_a_hard_link(workspace: Workspace, outside: Path):
    os.link(outside / "file.txt", workspace.root / "a.txt")
    workspace.write("a.txt", b"inside")
    assert (outside / "file.txt").read_bytes() == OUTSIDE


def test_a_failed_write_leaves_nothing_behind(workspace: Workspace):
    (workspace.root / "taken").mkdir()
    with pytest.raises(InvalidPath, match="'taken' is a directory"):
        workspace.write("taken", b"data")
    assert held(workspace.root) == ["taken"]


def test_create_refuses_any_name_that_is_taken(workspace: Workspace, outside: Path):
    (workspace.root / "dangling").symlink_to(outside / "new.txt")
    workspace.write("a.txt", b"old")
    for name in ("a.txt", "dangling"):
        with pytest.raises(FileExistsError):
            workspace.create(name, b"new")
    assert workspace.read("a.txt", 10) == b"old"
    assert not (outside / "new.txt").exists()


def test_symlinks_are_neither_read_nor_listed_nor_followed(workspace: Workspace, outside: Path):
    (workspace.root / "link.txt").symlink_to(outside / "file.txt")
    (workspace.root / "folder").symlink_to(outside)
    (workspace.root / "loop").symlink_to("loop")

    for name in ("link.txt", "folder", "loop"):
        with pytest.raises(FileMissing, match="is a symlink, not a regular file"):
            workspace.read(name, 1000)
    with pytest.raises(FileMissing, match="'folder' is a symlink, not a directory"):
        workspace.read("folder/file.txt", 1000)
    with pytest.raises(FileMissing, match="'folder' is a symlink, not a directory"):
        workspace.list("folder")
    assert workspace.list().entries == ()


def test_special_files_are_refused_by_kind_without_waiting(workspace: Workspace):
    os.mkfifo(workspace.root / "pipe")
    (workspace.root / "folder").mkdir()
    descriptor = os.open(workspace.root, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{descriptor}/socket")
    os.close(descriptor)

    for name, kind in (("pipe", "named pipe"), ("folder", "directory"), ("socket", "socket")):
        with pytest.raises(FileMissing, match=f"'{name}' is a {kind}, not a regular file"):
            workspace.open_read(name)
    with pytest.raises(FileMissing, match="'pipe' is a named pipe, not a directory"):
        workspace.read("pipe/file.txt", 10)
    assert workspace.list().entries == ()


def test_a_file_swapped_for_a_pipe_after_the_check_does_not_hang(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    workspace.write("a.txt", b"")
    real_open = os.open

    def swap_and_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "a.txt":
            os.unlink(path, dir_fd=dir_fd)
            os.mkfifo(path, dir_fd=dir_fd)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(FileMissing, match="named pipe"):
        workspace.read("a.txt", 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes")
def test_devices_are_refused(workspace: Workspace):
    try:
        os.mknod(workspace.root / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this host's root may not make device nodes")
    with pytest.raises(FileMissing, match="character device"):
        workspace.read("zero", 10)
    assert workspace.list().entries == ()


def test_absent_files_and_directories_are_missing(workspace: Workspace):
    workspace.write("a.txt", b"")
    for act in (workspace.open_read, workspace.delete):
        with pytest.raises(FileMissing, match=r"'b.txt' does not exist"):
            act("b.txt")
        with pytest.raises(FileMissing, match="there is no 'no'"):
            act("no/such/file")
        with pytest.raises(FileMissing, match=r"'a.txt' is a regular file, not a directory"):
            act("a.txt/b")
    with pytest.raises(FileMissing):
        workspace.list("no")


def test_a_folder_that_is_gone_lists_as_empty_and_takes_no_files(workspace: Workspace):
    workspace.root.rmdir()
    assert workspace.list().entries == ()
    assert workspace.list().is_complete
    with pytest.raises(InvalidPath, match="the session folder cannot be opened"):
        workspace.write("a.txt", b"")


def test_what_code_made_unreadable_is_an_error_or_incomplete():
    with place_of("ordinary") as folder:
        workspace = Workspace(folder)
        workspace.write("a.txt", b"")
        workspace.write("shut/b.txt", b"")
        (folder / "a.txt").chmod(0)
        (folder / "shut").chmod(0)
        with pytest.raises(FileMissing, match=r"'a.txt' cannot be read: Permission denied"):
            workspace.read("a.txt", 10)
        with pytest.raises(InvalidPath, match="Permission denied"):
            workspace.write("shut/b.txt", b"")
        listing = workspace.list()
        assert [entry.name for entry in listing.entries] == ["a.txt"]
        assert not listing.is_complete


def test_delete_removes_files_and_links_but_no_directories(workspace: Workspace, outside: Path):
    workspace.write("folder/a.txt", b"")
    (workspace.root / "link").symlink_to(outside / "file.txt")
    (workspace.root / "out").symlink_to(outside)

    workspace.delete("folder/a.txt")
    workspace.delete("link")
    with pytest.raises(FileMissing, match="'folder' is a directory"):
        workspace.delete("folder")
    with pytest.raises(FileMissing, match="'out' is a symlink"):
        workspace.delete("out/file.txt")

    assert held(workspace.root) == ["folder", "out"]
    assert (outside / "file.txt").read_bytes() == OUTSIDE


def test_reading_stops_at_the_limit(workspace: Workspace):
    workspace.write("a.txt", b"12345")
    assert workspace.read("a.txt", 5) == b"12345"
    with pytest.raises(TooLarge, match=r"'a.txt' is 5 bytes, and the limit is 4"):
        workspace.read("a.txt", 4)


def test_a_sparse_terabyte_is_refused_by_its_size(workspace: Workspace):
    with (workspace.root / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge, match=f"is {1 << 40} bytes"):
        workspace.read("huge", 1 << 20)
    assert [entry.size for entry in workspace.list().entries] == [1 << 40]


def test_a_file_that_grows_while_it_is_read_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    workspace.write("a.txt", b"1")
    real_fstat = os.fstat

    def grow_after(descriptor: int) -> os.stat_result:
        status = real_fstat(descriptor)
        if status.st_size == 1:
            (workspace.root / "a.txt").write_bytes(b"1" * 100)
        return status

    monkeypatch.setattr(os, "fstat", grow_after)
    with pytest.raises(TooLarge, match="more than 10 bytes"):
        workspace.read("a.txt", 10)


def test_hard_names_are_listed_once_and_readable_names_are_readable(workspace: Workspace):
    for raw in (b"new\nline.txt", "ü.txt".encode(), b"\xff\xfe.txt", b"back\\slash", b"-rf", b"x" * 255, b" "):
        (workspace.root / os.fsdecode(raw)).write_bytes(b"x")

    listed = names(workspace)
    assert listed == sorted(
        ["new\nline.txt", "ü.txt", "\N{REPLACEMENT CHARACTER}" * 2 + ".txt", "back\\slash", "-rf", "x" * 255, " "]
    )
    for name in listed:
        if "\N{REPLACEMENT CHARACTER}" not in name:
            assert workspace.read(name, 1) == b"x"


def test_caches_and_hidden_directories_are_left_out_unless_asked_for(workspace: Workspace):
    for name in (".cache/a", ".config/b", ".ipynb_checkpoints/c", "sub/__pycache__/d", ".env", "sub/e"):
        workspace.write(name, b"")
    assert names(workspace) == [".env", "sub/e"]
    assert names(workspace, ".cache") == [".cache/a"]


def test_a_listing_stops_at_its_limit_and_says_so(workspace: Workspace):
    for number in range(20):
        workspace.write(f"{number:02}.txt", b"")

    assert workspace.list(limit=20).is_complete
    cut = workspace.list(limit=19)
    assert (len(cut.entries), cut.is_complete) == (19, False)
    assert not workspace.list(limit=0).is_complete


def test_entries_that_are_not_listed_count_against_the_limit(workspace: Workspace):
    for number in range(20):
        (workspace.root / f"link{number}").symlink_to("nowhere")
        (workspace.root / f".hidden{number}").mkdir()
    listing = workspace.list(limit=30)
    assert (listing.entries, listing.is_complete) == ((), False)


def test_shallow_files_are_listed_before_deep_ones(workspace: Workspace):
    for folder in "abcde":
        for number in range(20):
            workspace.write(f"{folder}/deep/{number}", b"")
        workspace.write(f"{folder}/shallow", b"")
    cut = workspace.list(limit=30)
    assert {f"{folder}/shallow" for folder in "abcde"} <= {entry.name for entry in cut.entries}


@pytest.mark.parametrize("levels", [1, 300])
def test_a_tree_deeper_than_any_name_is_cut(workspace: Workspace, levels: int):
    workspace.write("d/" * 63 + "last", b"")
    descriptor = os.open(workspace.root / ("d/" * 63), os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
        os.close(os.open("too-deep", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)

    listing = workspace.list()
    assert [entry.name for entry in listing.entries] == ["d/" * 63 + "last"]
    assert not listing.is_complete


def test_no_descriptor_stays_open(workspace: Workspace, outside: Path):
    (workspace.root / "link").symlink_to(outside)
    os.mkfifo(workspace.root / "pipe")
    before = held(Path("/proc/self/fd"))
    workspace.write("a/b/c.txt", b"x")
    workspace.read("a/b/c.txt", 1)
    workspace.list()
    for name in ("a/b", "a/b/no", "link/file.txt", "pipe", "a/b/c.txt/d"):
        with pytest.raises(FileMissing):
            workspace.read(name, 1)
    for name in ("a/b", "link/file.txt", "a/b/c.txt/d"):
        with pytest.raises(InvalidPath):
            workspace.write(name, b"")
    workspace.delete("a/b/c.txt")
    assert held(Path("/proc/self/fd")) == before


def test_a_directory_swapped_just_before_it_is_opened_is_refused(
    workspace: Workspace, outside: Path, monkeypatch: pytest.MonkeyPatch
):
    workspace.write("d/file.txt", b"inside")
    directory, away = workspace.root / "d", workspace.root / ".away"
    real_open = os.open

    def swap_and_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if Path(path).name == "d":
            directory.rename(away)
            directory.symlink_to(outside)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap_and_open)
    acts: list[Callable[[], object]] = [
        lambda: workspace.read("d/file.txt", 1000),
        lambda: workspace.write("d/file.txt", b"inside"),
        lambda: workspace.delete("d/file.txt"),
        lambda: workspace.list("d"),
    ]
    for act in acts:
        with pytest.raises((FileMissing, InvalidPath), match="'d' is a symlink"):
            act()
        directory.unlink()
        away.rename(directory)

    assert workspace.list().entries == ()
    assert held(outside) == ["file.txt"]


SWAP = """
import ctypes, sys
exchange = ctypes.CDLL(None).renameat2
one, other = (name.encode() for name in sys.argv[1:])
print("ready", flush=True)
for _ in range(10_000_000):
    if exchange(-100, one, -100, other, 2) != 0:
        sys.exit("renameat2 failed")
"""


@contextlib.contextmanager
def swapping(one: Path, other: Path) -> Generator[None, None, None]:
    """Exchange two names as fast as it goes, in a process: a thread would have to share our turns."""
    command = [sys.executable, "-c", SWAP, str(one), str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


def test_a_directory_swapped_for_a_symlink_never_leads_outside(workspace: Workspace, outside: Path):
    (outside / "only-outside.txt").write_bytes(OUTSIDE)
    workspace.write("d/file.txt", b"inside")
    (workspace.root / ".other").symlink_to(outside)
    outcomes = {"read": 0, "refused": 0}
    with swapping(workspace.root / "d", workspace.root / ".other"):
        for _ in range(20_000):
            try:
                assert workspace.read("d/file.txt", 1000) == b"inside"
                outcomes["read"] += 1
            except FileMissing:
                outcomes["refused"] += 1
            with contextlib.suppress(InvalidPath, FileMissing):
                workspace.write("d/written.txt", b"inside")
                workspace.delete("d/written.txt")
            listed = workspace.list().entries
            assert {entry.name for entry in listed} <= {"d/file.txt", "d/written.txt"}
            assert {entry.size for entry in listed} <= {len(b"inside")}
            if min(outcomes.values()) >= 500:
                break

    assert min(outcomes.values()) > 0
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {
        "file.txt": OUTSIDE,
        "only-outside.txt": OUTSIDE,
    }
