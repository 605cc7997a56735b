from base64 import b64encode
from pathlib import Path

import pytest

from belljar.errors import InvalidArgument, InvalidPath, SettingsError, TooLarge
from belljar.files.transfer import decode_upload, save_download

SESSION = "0123456789abcdef"


async def decode(upload: dict[str, str], max_bytes: int) -> bytes:
    return await decode_upload(
        text=upload.get("text"), base64=upload.get("base64"), url=upload.get("url"), max_bytes=max_bytes
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("upload", "data"),
    [
        ({"text": "größe"}, "größe".encode()),
        ({"text": ""}, b""),
        ({"base64": "AAH/"}, b"\x00\x01\xff"),
        ({"base64": "QUJD\nREVG\r\n"}, b"ABCDEF"),
        ({"base64": ""}, b""),
        ({"url": "data:,Hello%2C%20World"}, b"Hello, World"),
        ({"url": "data:text/plain;charset=utf-8,a,b"}, b"a,b"),
        ({"url": "data:,%ff"}, b"\xff"),
        ({"url": "data:image/png;base64,AAH/"}, b"\x00\x01\xff"),
        ({"url": " DATA:;BASE64,QUI%3D"}, b"AB"),
    ],
)
async def test_uploads_become_bytes(upload: dict[str, str], data: bytes):
    assert await decode(upload, 100) == data


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("upload", "words"),
    [
        ({}, "none of them"),
        ({"text": "", "url": "data:,"}, "the call has text, url"),
        ({"text": "a", "base64": "YQ==", "url": "data:,"}, "the call has text, base64, url"),
        ({"text": "\ud800"}, "lone surrogate at character 0"),
        ({"base64": "YQ="}, "base64 of 3 characters is not valid base64"),
        ({"base64": "YQ==YQ=="}, "not valid base64"),
        ({"base64": "a-_b"}, "not valid base64"),
        ({"base64": "ü123"}, "not valid base64"),
        ({"url": "data:text/plain"}, "has no comma"),
        ({"url": "data:;base64,***"}, "the data: URL of 3 characters is not valid base64"),
        ({"url": "http://example.com/a"}, "only https is fetched"),
        ({"url": "file:///etc/passwd"}, "only https is fetched"),
        ({"url": ""}, "only https is fetched"),
        ({"url": "https://127.0.0.1/"}, "a private address"),
    ],
)
async def test_bad_uploads_are_the_callers_to_mend(upload: dict[str, str], words: str):
    with pytest.raises(InvalidArgument, match=words) as refused:
        await decode(upload, 100)
    assert refused.value.hint


@pytest.mark.anyio
@pytest.mark.parametrize("size", [9, 10, 11, 12, 1000])
async def test_the_limit_is_on_the_decoded_bytes(size: int):
    encoded = b64encode(b"x" * size).decode()
    for upload in (
        {"text": "x" * size},
        {"base64": encoded},
        {"url": "data:," + "%78" * size},
        {"url": "data:;base64," + encoded},
    ):
        if size <= 10:
            assert await decode(upload, 10) == b"x" * size
        else:
            with pytest.raises(TooLarge, match="the limit is 10"):
                await decode(upload, 10)


def test_a_download_is_saved_in_a_folder_of_the_session(tmp_path: Path):
    saved = save_download(tmp_path / "new" / "downloads", SESSION, "plots/a.png", b"image")
    assert saved == tmp_path / "new" / "downloads" / "01234567" / "plots" / "a.png"
    assert saved.read_bytes() == b"image"


def test_a_different_file_is_never_overwritten_and_the_same_is_not_saved_twice(tmp_path: Path):
    saved = [save_download(tmp_path, SESSION, "a.tar.gz", data).name for data in (b"1", b"2", b"1", b"3", b"2")]
    assert saved == ["a.tar.gz", "a.tar-1.gz", "a.tar.gz", "a.tar-2.gz", "a.tar-1.gz"]
    assert sorted(path.read_bytes() for path in (tmp_path / "01234567").iterdir()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("name", "saved_as"),
    [
        ("../../etc/passwd", "etc/passwd"),
        ("/etc/passwd", "etc/passwd"),
        ("..", "file"),
        ("", "file"),
        ("a\\..\\b", "a_.._b"),
        ("C:\\autoexec.bat", "C__autoexec.bat"),
        ("new\nline\x1b[0m", "new_line_[0m"),
        (".bashrc", "_bashrc"),
        ("a. ", "a"),
        ("a\0b", "a_b"),
        ("invoice\u202efdp.exe", "invoice_fdp.exe"),
        ("\udcff.txt", "_.txt"),
        ("x" * 300 + ".csv", "x" * 196 + ".csv"),
        ("é" * 200, "é" * 100),
    ],
)
def test_saved_names_are_safe_and_stay_inside(tmp_path: Path, name: str, saved_as: str):
    assert save_download(tmp_path, SESSION, name, b"") == tmp_path / "01234567" / saved_as
    assert (tmp_path / "01234567" / saved_as).is_file()


@pytest.mark.parametrize("session_id", ["../../..", "/etc", "..", "", "a/b"])
def test_the_session_id_cannot_lead_outside(tmp_path: Path, session_id: str):
    directory = tmp_path / "downloads"
    saved = save_download(directory, session_id, "a.txt", b"x")
    assert saved.parent.parent.samefile(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


def test_links_in_the_download_directory_are_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_bytes(b"old")
    directory = tmp_path / "downloads"
    (directory / "01234567").mkdir(parents=True)
    (directory / "01234567" / "a.txt").symlink_to(outside / "a.txt")
    (directory / "01234567" / "sub").symlink_to(outside)
    (directory / "76543210").symlink_to(outside)

    assert save_download(directory, SESSION, "a.txt", b"old").name == "a-1.txt"
    for session_id, name in ((SESSION, "sub/a.txt"), ("76543210", "a.txt")):
        with pytest.raises(InvalidPath):
            save_download(directory, session_id, name, b"new")
    assert [path.read_bytes() for path in outside.iterdir()] == [b"old"]


def test_a_download_directory_that_cannot_be_made_is_a_matter_of_settings(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be used"):
        save_download(tmp_path / "file", SESSION, "a.txt", b"")
