"""Folders of the host in the sandboxes of every provider that mounts them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trials import Opener, run

from belljar.errors import SandboxUnavailable
from belljar.files import host_folders
from belljar.sandboxes.base import HostFolder, Provider
from belljar.sandboxes.container import provider as container_provider
from belljar.sandboxes.namespace import bwrap_args

pytestmark = pytest.mark.anyio

LOOK = """
import os
def tried(action):
    try: return str(action())
    except OSError as error: return error.strerror
print(tried(lambda: open('/mnt/read/a').read()), '|', tried(lambda: open('/mnt/read/b', 'w')), '|',
      tried(lambda: open('/mnt/write/b', 'w').write('written')), '|', tried(lambda: open('/mnt/read/out').read()), '|',
      tried(lambda: open('/mnt/read/null', 'w')))
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[HostFolder]:
    for name in ("read", "write"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "read" / "a").write_text("content")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "read" / "out").symlink_to(tmp_path / "secret")
    if os.geteuid() == 0:
        os.mknod(tmp_path / "read" / "null", 0o020666, os.makedev(1, 3))
    return [HostFolder("read", str(tmp_path / "read")), HostFolder("write", str(tmp_path / "write"), is_writable=True)]


async def test_a_folder_is_read_and_written_only_where_it_is_writable(
    mounting: Provider, open_sandbox: Opener, folders: list[HostFolder], tmp_path: Path
):
    sandbox, _ = await open_sandbox(mounting, folders=folders)
    read, new, written, outside, device = (await run(sandbox, LOOK)).output.strip().split(" | ")
    assert (read, new, written) == ("content", "Read-only file system", "7")
    assert outside == "No such file or directory", "links lead nowhere that the sandbox does not show"
    assert device != "None"
    assert "TextIOWrapper" not in device, "devices cannot be opened"
    assert (tmp_path / "write" / "b").read_text() == "written"
    assert not (tmp_path / "read" / "b").exists()


async def test_a_folder_that_is_exchanged_meanwhile_is_not_shown(
    mounting: Provider,
    open_sandbox: Opener,
    folders: list[HostFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Between the server's look at the folder and its mount, somebody puts another in its place."""
    (tmp_path / "private").mkdir(mode=0o755)
    (tmp_path / "private" / "a").write_text("secret")
    opened: Callable[[str], int] = host_folders.open_host_folder

    def open_and_exchange(path: str) -> int:
        descriptor = opened(path)
        if path.endswith("read") and not (tmp_path / "gone").exists():
            Path(path).rename(tmp_path / "gone")
            shutil.copytree(tmp_path / "private", path)
        return descriptor

    for module in (bwrap_args, container_provider):
        monkeypatch.setattr(module, "open_host_folder", open_and_exchange)
    sandbox, _ = await open_sandbox(mounting, folders=folders[:1])
    try:
        outcome = await run(sandbox, "print(open('/mnt/read/a').read())")
    except SandboxUnavailable:
        return
    assert "secret" not in outcome.output
