"""Folders of the host that the settings name: what may be shown, who sees which, and reading files in them."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BelljarError, FileMissing, InvalidPath, SandboxUnavailable, SettingsError, TooLarge
from belljar.files.host_folders import open_host_folder, read_host_file
from belljar.provisioning.host_folders import HostFolders, open_host_folders, revoked
from belljar.sandboxes.base import HostFolder
from belljar.sandboxes.microvm import MicroVMProvider
from belljar.sandboxes.process import ProcessProvider
from belljar.settings import Settings, load_settings

NOBODY = 65534


@pytest.fixture
def sales(tmp_path: Path) -> Path:
    folder = tmp_path / "sales"
    folder.mkdir()
    (folder / "q1.csv").write_text("a,b\n1,2\n")
    return folder


def settings(tmp_path: Path, **folders: Any) -> Settings:
    return Settings(data_directory=tmp_path / "belljar", folders=folders)


def test_a_folder_is_a_path_or_a_table(tmp_path: Path, sales: Path):
    chosen = settings(tmp_path, sales=str(sales), out={"path": str(tmp_path), "writable": True, "owners": ["ann"]})
    folders = HostFolders(chosen)
    assert folders.of("") == folders.of("local") == (HostFolder("sales", str(sales)),)
    assert folders.of("key:ann") == (HostFolder("out", str(tmp_path), True), HostFolder("sales", str(sales)))
    assert [folder.inside for folder in folders.all()] == ["/mnt/sales", "/mnt/out"]


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ({"data": "/srv"}, "/mnt/data is the session's own folder"),
        ({"../etc": "/srv"}, "is no name"),
        ({"sales": "relative"}, "absolute path"),
        ({"sales": {"path": "/srv", "writeable": True}}, "there is no such field"),
        ({"sales": 'a"b'}, "absolute path"),
        ({"sales": '/a"b'}, "no commas, quotes or line ends"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(folders: dict[str, object], words: str):
    with pytest.raises(SettingsError, match=words.replace("/", "\\/")):
        load_settings({"folders": folders})


def test_a_file_of_an_untrusted_working_directory_shows_nothing(
    tmp_path: Path, sales: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "belljar.toml").write_text(f'folders = {{sales = "{sales}"}}\n')
    assert load_settings().folders == {}
    monkeypatch.setenv("BELLJAR_CONFIG", str(tmp_path / "belljar.toml"))
    assert load_settings().folders["sales"].path == str(sales)


def test_what_belongs_to_the_machine_or_to_belljar_is_not_shown(tmp_path: Path, sales: Path):
    provider = ProcessProvider()
    own = tmp_path / "belljar"
    own.mkdir()
    for path, words in (
        ("/", "belongs to the machine"),
        ("/proc/self", "belongs to the machine"),
        ("/run", "belongs to the machine"),
        (str(tmp_path), "belljar's own folder"),
        (str(own), "belljar's own folder"),
        (str(tmp_path / "missing"), "No such file"),
        (str(sales / "q1.csv"), "it is a regular file"),
    ):
        with pytest.raises(SettingsError, match=words):
            open_host_folders(settings(tmp_path, it=path), provider)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sales / "door"))
        with pytest.raises(SettingsError, match=r"has a socket, door"):
            open_host_folders(settings(tmp_path, sales=str(sales)), provider)


def test_a_provider_that_cannot_show_folders_refuses_the_setting(tmp_path: Path, sales: Path):
    with pytest.raises(SettingsError, match="the sandbox microvm shows none"):
        open_host_folders(settings(tmp_path, sales=str(sales)), MicroVMProvider())
    folders = open_host_folders(settings(tmp_path, sales=str(sales)), ProcessProvider())
    assert [folders.place(folder) for folder in folders.all()] == [str(sales)]


def test_a_link_of_another_user_does_not_decide_what_is_shown(tmp_path: Path, sales: Path):
    link = tmp_path / "link"
    link.symlink_to(sales)
    os.close(open_host_folder(str(link)))
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's link")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(SandboxUnavailable, match="belongs to another user"):
        open_host_folder(str(link))
    os.chown(sales, NOBODY, NOBODY)
    os.close(open_host_folder(str(link)))  # whoever owns the folder may say where it is
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(SandboxUnavailable, match="Too many levels"):
        open_host_folder(str(tmp_path / "round"))


def test_files_are_read_by_their_path_in_a_session(tmp_path: Path, sales: Path):
    folders = HostFolders(settings(tmp_path, sales=str(sales), own={"path": str(sales), "owners": ["ann"]}))
    assert folders.read("local", "/mnt/sales/q1.csv", 100) == b"a,b\n1,2\n"
    assert folders.read("key:ann", "/mnt/own/q1.csv", 100) == b"a,b\n1,2\n"
    for path in ("/mnt/own/q1.csv", "/etc/passwd", "/mnt/nothing/q1.csv", "/mnt/sales"):
        with pytest.raises(FileMissing, match=r"is in no folder that sessions see.*below /mnt/sales"):
            folders.read("local", path, 100)


def test_nothing_but_a_regular_file_within_the_folder_is_read(tmp_path: Path, sales: Path):
    (tmp_path / "secret").write_text("secret")
    (sales / "link").symlink_to(tmp_path / "secret")
    (sales / "folder-link").symlink_to(tmp_path)
    os.mkfifo(sales / "pipe")
    folder = open_host_folder(str(sales))
    try:
        attempts: list[tuple[str, type[BelljarError]]] = [
            ("link", FileMissing),
            ("folder-link/secret", FileMissing),
            ("pipe", FileMissing),
            ("../secret", InvalidPath),
            ("", InvalidPath),
            ("q1.csv\0", InvalidPath),
            ("none/q1.csv", FileMissing),
        ]
        for name, refusal in attempts:
            with pytest.raises(refusal):
                read_host_file(folder, name, 100)
        with pytest.raises(TooLarge):
            read_host_file(folder, "q1.csv", 7)
        assert read_host_file(folder, "q1.csv", 8) == b"a,b\n1,2\n"
    finally:
        os.close(folder)


def test_what_the_settings_take_away_is_told_from_what_they_add():
    shown, more = HostFolder("a", "/a"), HostFolder("a", "/a", True)
    assert revoked([shown], [shown, HostFolder("b", "/b")]) == []
    assert revoked([shown], [more]) == []
    assert revoked([more], [shown]) == ["a"]
    assert revoked([shown], []) == revoked([shown], [HostFolder("a", "/b")]) == ["a"]
