"""The conda prefix inside a session's layer, which holds the session's own packages on top of the environment's.

Libraries find each other by their place in the prefix, so the layer's prefix has a link for whatever it lacks and the
environment has. Everything is opened by descriptor and no link is followed, so that nothing in the layer, which a
session can write, leads a write or a removal out of it.
"""

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, cast

from belljar.environments.conda.places import META
from belljar.environments.installed_packages import PackageFolder
from belljar.environments.layers import is_folder, move, names_in, open_folder, unlink, withdraw
from belljar.files.private import make_missing

_FOLDER = ".conda"
_RECORDS_LIMIT = 5_000
_RECORD_BYTES = 32_000_000
_NOT_LINKED = frozenset({META, "envs", "pkgs"})
_NOT_MOVED = frozenset({"CACHEDIR.TAG"})


def own_prefix(layer: Path) -> Path:
    """Return the folder of a layer's prefix, which need not exist yet. Its name cannot be imported."""
    return layer / _FOLDER


def own_packages(layer: Path, version: str) -> Path:
    """Return the folder of Python packages in a layer's prefix, for a Python of that version."""
    return _packages_of(own_prefix(layer), version)


def layer_package_folders(layer: Path, version: str) -> list[PackageFolder]:
    """Return the folders of packages of a layer, in the order in which Python searches them."""
    return [PackageFolder(layer, is_trusted=False), PackageFolder(own_packages(layer, version), is_trusted=False)]


def copy_records(prefix: Path, folder: Path) -> str:
    """Copy a prefix's records, readable by all, to a new folder inside `folder`; return its name, or "" for none."""
    place: Path | None = None
    # Copied one by one, because the records of a large environment are a hundred megabytes.
    for name, content in records_of(prefix):
        if place is None:
            place = Path(tempfile.mkdtemp(dir=folder, prefix="records-"))
            place.chmod(0o755)
        (place / name).write_bytes(content)
        (place / name).chmod(0o644)
    return place.name if place else ""


def move_into_prefix(layer: Path, tree: Path, environment: Path, version: str) -> None:
    """Move fetched packages into the layer's prefix, replacing other versions, and link to what the environment has."""
    make_missing(layer)
    coming = [file.name for file in (tree / META).iterdir() if file.suffix == ".json"]
    with open_folder(layer) as target:
        with contextlib.suppress(FileExistsError):
            os.mkdir(_FOLDER, 0o755, dir_fd=target)
        wheels = PackageFolder(layer, is_trusted=False)
        for name in PackageFolder(_packages_of(tree, version), is_trusted=False).distributions:
            # Python would find the layer's wheel before the package of conda.
            if distribution := wheels.find(name):
                withdraw(distribution, wheels.read_record(distribution), target)
        with open_folder(_FOLDER, target) as own, open_folder(tree) as source:
            os.fchmod(own, 0o755)
            _withdraw_others(layer, {_name(file) for file in coming}, own)
            for name in names_in(source):
                if name not in _NOT_MOVED:
                    move(name, source, own)
            _link(environment, own)


def relocate(layer: Path, origin: Path) -> None:
    """Rewrite the old prefix's path in the files of a copied one, because packages contain the path they are at."""
    old, new = (os.fsencode(own_prefix(place)) for place in (origin, layer))
    if len(old) != len(new):
        return
    for _, content in records_of(own_prefix(layer)):
        for path in _located(content):
            with contextlib.suppress(OSError, ValueError):
                _rewrite(own_prefix(layer), path, old, new)


def own_record(layer: Path, name: str) -> list[str]:
    """Return the files of a package in the layer's prefix; empty if there is no such package."""
    for file, content in records_of(own_prefix(layer)):
        if _name(file) == name:
            return [*files_of(content)]
    return []


def _packages_of(prefix: Path, version: str) -> Path:
    return prefix / "lib" / f"python{'.'.join(version.split('.')[:2])}" / "site-packages"


def _withdraw_others(layer: Path, names: set[str], own: int) -> None:
    """Remove the files that the prefix has of these packages."""
    for file, content in [*records_of(own_prefix(layer))]:
        if _name(file) in names:
            for path in (*files_of(content), f"{META}/{file}"):
                with contextlib.suppress(OSError, ValueError):
                    unlink(PurePosixPath(path), own)


def _link(source: Path, target: int) -> None:
    """Make links in one folder to all that another has and it lacks; to whole folders where possible."""
    with os.scandir(source) as entries:
        for entry in entries:
            # Python finds its own library and the environment's packages by itself.
            if entry.name in _NOT_LINKED or Path(entry.path, "site-packages").is_dir():
                continue
            with contextlib.suppress(FileExistsError):
                os.symlink(entry.path, entry.name, dir_fd=target)
                continue
            if entry.is_dir(follow_symlinks=False) and is_folder(entry.name, target):
                with open_folder(entry.name, target) as inner:
                    _link(Path(entry.path), inner)


def records_of(prefix: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the records of a prefix's packages: the name of each file and its content."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(open_folder(META, stack.enter_context(open_folder(prefix))))
        except OSError:
            return
        for name in islice(names_in(folder), _RECORDS_LIMIT):
            if name.endswith(".json"):
                with contextlib.suppress(OSError):
                    yield name, _read(name, folder)


def _read(name: str, folder: int) -> bytes:
    # Without O_NONBLOCK, opening a named pipe that a session left here would block for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:  # noqa: PTH123 - opens a descriptor
        return file.read(_RECORD_BYTES)


def _name(file: str) -> str:
    """Return the package of a record called NAME-VERSION-BUILD.json, where only NAME may contain dashes."""
    return file.rsplit("-", 2)[0]


def _table(content: bytes) -> dict[str, Any]:
    try:
        parsed: Any = json.loads(content)
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}


def files_of(content: bytes) -> Iterator[str]:
    """Yield the files that a record names, as paths within its prefix."""
    files: Any = _table(content).get("files")
    for path in cast("list[Any]", files) if isinstance(files, list) else []:
        if isinstance(path, str) and _is_inside(path):
            yield path


def _located(content: bytes) -> Iterator[str]:
    """Yield files that contain the prefix's path: those built with a placeholder for it, and generated scripts."""
    data: Any = _table(content).get("paths_data")
    paths: Any = cast("dict[str, Any]", data).get("paths") if isinstance(data, dict) else None
    for each in cast("list[Any]", paths) if isinstance(paths, list) else []:
        entry = cast("dict[str, Any]", each) if isinstance(each, dict) else {}
        path = str(entry.get("_path", ""))
        is_script = "entry_point" in str(entry.get("path_type", ""))
        if (entry.get("prefix_placeholder") or is_script) and _is_inside(path):
            yield path


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts


def _rewrite(prefix: Path, path: str, old: bytes, new: bytes) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(open_folder(prefix))
        *parents, name = PurePosixPath(path).parts
        for part in parents:
            folder = stack.enter_context(open_folder(part, folder))
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=folder)
        stack.callback(os.close, file)
        # Rewritten in place through a mapping, because a record may name a file that is larger than our memory.
        content = stack.enter_context(mmap.mmap(file, 0))
        place = content.find(old)
        while place >= 0:
            content[place : place + len(new)] = new
            place = content.find(old, place + len(new))
