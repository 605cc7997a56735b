"""An image for containers without any registry: a few programs of this host, and the libraries that Python needs.

Interpreters come from the trees that a sandbox shows. Imported once, under a tag of its own content, and left there:
other test processes use it too.
"""

import functools
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from belljar.sandboxes.container.engines import ContainerEngine, find_engines

_PROGRAMS = [Path("/usr/bin") / name for name in ("true", "cat", "env", "dash", "id")]
# As images have them: closed to a session, which uses one and has to get through the other.
_FOLDERS = {"root": 0o700, "home": 0o755, "home/belljar": 0o700, "run": 0o755, "tmp": 0o1777}
_LINKS = ("bin", "sbin", "lib", "lib64")


@functools.cache
def import_image(choice: str = "auto") -> str:
    """The image's name; the default's, which is likely to be missing, where no engine answers."""
    engines = [engine for engine in find_engines(choice) if isinstance(engine, ContainerEngine)]
    if sys.platform != "linux" or not engines:
        return "belljar:latest"
    files = sorted({path.parent.resolve() / path.name for path in (*_PROGRAMS, *_libraries())})
    content = f"{_FOLDERS}\n" + "\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    image = f"belljar-test:{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    for engine in engines:
        if engine.complaint_about_image(image):
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / "root.tar"
                _pack(files, archive)
                subprocess.run(engine.command("import", str(archive), image), check=True, capture_output=True)
    return image


def _libraries() -> Iterator[Path]:
    """What the programs and the modules of this Python are linked with, as far as it is the system's."""
    modules = (Path(sysconfig.get_path("stdlib")) / "lib-dynload").glob("*.so")
    command = ["ldd", *map(str, _PROGRAMS), os.path.realpath(sys.executable), *map(str, modules)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    for path in re.findall(r"^\s+(?:\S+ => )?(/(?:usr/)?lib\S+) \(", answer.stdout, re.MULTILINE):
        yield Path(path)


def _pack(files: list[Path], archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for name in _LINKS:
            if (path := Path("/") / name).is_symlink():
                _add_link(tar, name, str(path.readlink()))
        for name, mode in _FOLDERS.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        for path in files:
            tar.add(path.resolve(), str(path).lstrip("/"))
        _add_link(tar, "usr/bin/sh", "dash")


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
