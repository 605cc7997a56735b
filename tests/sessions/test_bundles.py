"""Bundles: what is packed comes back as it was, and what somebody else made of one is refused."""

import io
import json
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from belljar.errors import TooLarge
from belljar.journal.bundle_records import Row, RowsRefused
from belljar.sessions.bundles import (
    Aborted,
    BundleRefused,
    Packing,
    Sealer,
    compressed,
    compression,
    decompressed,
    unpack,
    unpacking,
)

NAME = "sessions/abc/0000000001.bundle"
MOST = 1 << 30
ROW: Row = ("sessions", {"id": "abc", "end": "slept"})
KEY = "k" * 40


def packed(folder: Path, *, most: int = MOST, key: str = KEY) -> bytes:
    packing = Packing(folder, [ROW], most, lambda: False)
    return b"".join(Sealer(key).seal(NAME, compressed(packing.chunks()), compression=compression()))


def unpacked(sealed: bytes, target: Path, *, most: int = MOST, name: str = NAME, key: str = KEY) -> list[Row]:
    rows: list[Row] = []
    told, content = Sealer(key).open(name, [sealed])
    with unpacking(target / "half") as half:
        unpack(decompressed(content, told["compression"], most), half, lambda some, _: rows.extend(some))
        half.rename(target / "whole")
    return rows


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Every entry below a folder, with its kind, mode and content."""
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = ""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = f"{status.st_size} bytes, {zlib.crc32(path.read_bytes()[:100_000])}, at {int(status.st_mtime)}"
        found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found


def make_session(folder: Path) -> Path:
    root = folder / "session"
    for name in ("workspace/deep/er", "home", "layer", "displays/x", "scratch", "snapshots/one", "skills"):
        (root / name).mkdir(parents=True)
    (root / "state").write_bytes(b"state" * 300_000)
    (root / "workspace" / "notes.txt").write_text("kept")
    (root / "workspace" / os.fsdecode(b"\xff\xfe name")).write_text("named in bytes")
    (root / "workspace" / ("long" * 60)).write_text("a long name")
    (root / "workspace" / "link").symlink_to("/etc/passwd")
    (root / "workspace" / "deep" / "er" / "program").write_text("#!")
    (root / "workspace" / "deep" / "er" / "program").chmod(0o4755)
    (root / "displays" / "x" / "figure.png").write_bytes(os.urandom(70_000))
    os.mkfifo(root / "workspace" / "pipe")
    (root / "scratch" / "socket").write_text("of the server")
    return root


def test_a_session_s_folder_comes_back_as_it_was_without_what_is_its_servers(tmp_path: Path) -> None:
    root = make_session(tmp_path)
    assert unpacked(packed(root), tmp_path) == [ROW]
    before, after = tree(root), tree(tmp_path / "whole")
    gone = {name for name in before if name.partition("/")[0] in ("scratch", "snapshots", "skills")}
    assert {*before} - {*after} == gone | {"workspace/pipe"}
    mode, _ = after["workspace/deep/er/program"]
    assert not mode & stat.S_ISUID, "a program that runs with its owner's rights comes back as a plain one"
    same = {*after} - {"workspace/deep/er/program"}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}


def test_a_file_of_a_time_that_nothing_can_keep_is_packed_all_the_same(tmp_path: Path) -> None:
    # Only some file systems, like that of /dev/shm, take any time.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (root := Path(folder, "workspace")).mkdir()
        (root / "late").write_text("kept")
        os.utime(root / "late", (2**63 - 1, 2**63 - 1))
        unpacked(packed(Path(folder)), tmp_path)
    assert (tmp_path / "whole" / "workspace" / "late").read_text() == "kept"


def test_a_file_of_a_terabyte_of_nothing_takes_neither_time_nor_room(tmp_path: Path) -> None:
    (root := tmp_path / "session" / "workspace").mkdir(parents=True)
    with (root / "holes").open("wb") as file:
        file.truncate(10**12)
        file.seek(7 * 10**11)
        file.write(b"in the middle")
    sealed = packed(root.parent)
    assert len(sealed) < 10_000
    unpacked(sealed, tmp_path)
    copy = tmp_path / "whole" / "workspace" / "holes"
    assert (copy.stat().st_size, copy.stat().st_blocks * 512 < 1_000_000) == (10**12, True)
    with copy.open("rb") as file:
        file.seek(7 * 10**11)
        assert file.read(14) == b"in the middle\0"


def flipped(sealed: bytes, at: int) -> bytes:
    return sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sealed: flipped(sealed, len(sealed) // 2), "altered or cut"),
        (lambda sealed: flipped(sealed, len(sealed) - 1), "altered or cut"),
        (lambda sealed: sealed[:-1], "cut off"),
        (lambda sealed: sealed[: len(sealed) // 2], "cut off"),
        (lambda sealed: sealed[:20], "none of belljar's objects"),
        (lambda _: b"", "none of belljar's objects"),
        (lambda sealed: sealed + b"more", "altered or cut|cut off|damaged"),
        (lambda sealed: sealed.replace(b'"compression": "', b'"compression": "x', 1), "cannot read"),
        (lambda sealed: sealed.replace(b'"belljar": 1', b'"belljar": 2', 1), "of a later belljar"),
        (lambda _: b"[" * 4000 + b"\n", "none of belljar's objects"),
    ],
)
def test_a_bundle_that_was_altered_or_cut_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    root = make_session(tmp_path)
    with pytest.raises(BundleRefused, match=said):
        unpacked(change(packed(root)), tmp_path)
    assert not (tmp_path / "whole").exists()
    assert not (tmp_path / "half").exists()


def test_chunks_of_one_bundle_in_another_order_or_without_the_last_are_refused(tmp_path: Path) -> None:
    content = [os.urandom(1024 * 1024) for _ in range(3)]
    sealed = b"".join(Sealer(KEY).seal(NAME, content))
    start, step = sealed.index(b"\n") + 1, 4 + 1024 * 1024 + 16
    first, second, third = (sealed[start + at * step : start + (at + 1) * step] for at in range(3))
    for forged in (second + first + third, first + third, first + second, first + first + third):
        with pytest.raises(BundleRefused, match="altered or cut"):
            b"".join(Sealer(KEY).open(NAME, [sealed[:start] + forged])[1])


def test_a_bundle_of_another_key_or_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    sealed = packed(make_session(tmp_path))
    with pytest.raises(BundleRefused, match="has another key"):
        unpacked(sealed, tmp_path, key="x" * 40)
    with pytest.raises(BundleRefused, match="altered or cut"):
        unpacked(sealed, tmp_path, name="sessions/xyz/0000000001.bundle")


def forged(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A bundle as somebody who has the key could make it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            info, content = member if isinstance(member, tuple) else (member, b"")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return b"".join(Sealer(KEY).seal(NAME, compressed([made.getvalue()]), compression=compression()))


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


WORKSPACE = entry("folder/workspace", tarfile.DIRTYPE)


@pytest.mark.parametrize(
    "members",
    [
        [entry("folder/../escaped")],
        [entry("folder/workspace/../../escaped")],
        [entry("/folder/escaped")],
        [entry("folder//escaped")],
        [entry("folder/./escaped")],
        [entry("elsewhere/escaped")],
        [entry("folder/workspace", tarfile.SYMTYPE, "/etc")],
        [entry("folder/state", tarfile.SYMTYPE, "/etc/passwd")],
        [entry("folder/displays", tarfile.DIRTYPE), entry("folder/displays/x", tarfile.SYMTYPE, "/etc/passwd")],
        [WORKSPACE, entry("folder/workspace/x", tarfile.SYMTYPE, "/tmp"), entry("folder/workspace/x/escaped")],
        [WORKSPACE, entry("folder/workspace/x", tarfile.LNKTYPE, "/etc/passwd")],
        [WORKSPACE, entry("folder/workspace/x", tarfile.CHRTYPE)],
        [WORKSPACE, entry("folder/workspace/x", tarfile.BLKTYPE)],
        [WORKSPACE, entry("folder/workspace/x", tarfile.FIFOTYPE)],
        [WORKSPACE, entry("folder/workspace/x"), entry("folder/workspace/x")],
        [WORKSPACE, entry("folder/workspace/x"), entry("folder/workspace/x", tarfile.DIRTYPE)],
        [entry("folder/workspace/no/folder/made/it")],
        [entry("folder/" + "/".join("d" * 70))],
        [WORKSPACE, entry("folder/workspace/" + "n" * 256)],
        [(entry("rows/000000"), b"no rows\n")],
        [(entry("rows/000000"), b'["sessions", ["a", "list"]]\n')],
        [entry("rows/000000", tarfile.SYMTYPE, "/etc/passwd")],
    ],
    ids=count(),
)
def test_names_and_entries_that_no_session_has_are_refused(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    before = {*Path(tmp_path).iterdir()}
    with pytest.raises((BundleRefused, RowsRefused)):
        unpacked(forged(*members), tmp_path)
    assert {*Path(tmp_path).iterdir()} == before, "nothing is left of it, and nothing beside it"


def test_a_device_that_is_refused_was_not_made_first(tmp_path: Path) -> None:
    with pytest.raises(BundleRefused):
        unpacked(forged(WORKSPACE, entry("folder/workspace/null", tarfile.CHRTYPE)), tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_what_unpacks_to_more_than_it_says_is_refused_before_the_disk_is_full(tmp_path: Path) -> None:
    def zeros() -> Iterator[bytes]:
        yield tarfile.TarInfo("rows/000000").tobuf()
        info = tarfile.TarInfo("folder/state")
        info.size = 100 * 10**9
        yield info.tobuf(tarfile.PAX_FORMAT)
        for _ in range(64):
            yield bytes(1024 * 1024)

    sealed = b"".join(Sealer(KEY).seal(NAME, compressed(zeros()), compression=compression()))
    with pytest.raises(BundleRefused, match="unpacks to more than"):
        unpacked(sealed, tmp_path, most=10 * 1024 * 1024)


def test_a_session_that_is_too_large_or_wanted_is_not_packed(tmp_path: Path) -> None:
    root = make_session(tmp_path)
    with pytest.raises(TooLarge, match="more than 1,000,000 bytes"):
        packed(root, most=1_000_000)
    with pytest.raises(Aborted):
        b"".join(Packing(root, [ROW], MOST, lambda: True).chunks())


def test_what_the_store_sees_of_a_session_is_a_header_alone(tmp_path: Path) -> None:
    (root := tmp_path / "session" / "workspace").mkdir(parents=True)
    (root / "secret-name").write_text("secret-content")
    sealed = packed(root.parent)
    header, _, rest = sealed.partition(b"\n")
    assert {*json.loads(header)} == {"belljar", "salt", "compression"}
    assert b"secret" not in rest
    assert packed(root.parent) != sealed, "the same content twice is not told"
