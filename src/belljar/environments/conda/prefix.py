"""The packages of conda that are a session's own: a prefix inside its layer, stacked on the environment's.

Libraries look for others by their place in the prefix, so that whatever the environment has and this one lacks is here
as a link. As in every layer, nothing that lies there can lead a write or a removal out of it.
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

from belljar.environments.installed_packages import PackageFolder
from belljar.environments.layers import is_folder, move, names_in, open_folder, unlink, withdraw
from belljar.files.private import make_missing

META = "conda-meta"
_FOLDER = ".conda"
_RECORDS_LIMIT = 5_000
_RECORD_BYTES = 32_000_000
_NOT_LINKED = frozenset({META, "envs", "pkgs"})
_NOT_MOVED = frozenset({"CACHEDIR.TAG"})


def own_prefix(layer: Path) -> Path:
    """Where the prefix is or will be; no name that could be imported."""
    return layer / _FOLDER


def own_packages(layer: Path, version: str) -> Path:
    """Its folder of Python packages, for a Python of that version."""
    return _packages_of(own_prefix(layer), version)


def layer_shelves(layer: Path, version: str) -> list[PackageFolder]:
    """The folders of packages of a layer, in the order in which Python looks into them."""
    return [PackageFolder(layer, is_trusted=False), PackageFolder(own_packages(layer, version), is_trusted=False)]


def hand_out_records(prefix: Path, folder: Path) -> str:
    """Copies of a prefix's records for anyone to read, in a new folder inside another: its name, or empty for none."""
    place: Path | None = None
    # One by one: those of a large environment are a hundred megabytes.
    for name, content in records_of(prefix):
        if place is None:
            place = Path(tempfile.mkdtemp(dir=folder, prefix="records-"))
            place.chmod(0o755)
        (place / name).write_bytes(content)
        (place / name).chmod(0o644)
    return place.name if place else ""


def put_in(layer: Path, tree: Path, environment: Path, version: str) -> None:
    """Move what was fetched into the prefix in place of other versions of the same, and link to the environment's."""
    make_missing(layer)
    coming = [file.name for file in (tree / META).iterdir() if file.suffix == ".json"]
    with open_folder(layer) as target:
        with contextlib.suppress(FileExistsError):
            os.mkdir(_FOLDER, 0o755, dir_fd=target)
        wheels = PackageFolder(layer, is_trusted=False)
        for name in PackageFolder(_packages_of(tree, version), is_trusted=False).distributions:
            # It would come before the one of conda.
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
    """Make paths in the files of a copied prefix its own: packages know where they are."""
    old, new = (os.fsencode(own_prefix(place)) for place in (origin, layer))
    if len(old) != len(new):
        return
    for _, content in records_of(own_prefix(layer)):
        for path in _located(content):
            with contextlib.suppress(OSError, ValueError):
                _rewrite(own_prefix(layer), path, old, new)


def own_record(layer: Path, name: str) -> list[str]:
    """The files of a package of the layer's prefix, by its name; none where there is no such package."""
    for file, content in records_of(own_prefix(layer)):
        if _name(file) == name:
            return [*files_of(content)]
    return []


def _packages_of(prefix: Path, version: str) -> Path:
    return prefix / "lib" / f"python{'.'.join(version.split('.')[:2])}" / "site-packages"


def _withdraw_others(layer: Path, names: set[str], own: int) -> None:
    """Remove what the prefix has of these packages."""
    for file, content in [*records_of(own_prefix(layer))]:
        if _name(file) in names:
            for path in (*files_of(content), f"{META}/{file}"):
                with contextlib.suppress(OSError, ValueError):
                    unlink(PurePosixPath(path), own)


def _link(source: Path, target: int) -> None:
    """Links to all that one folder has and another lacks; whole folders where they can be."""
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
    """The records of a prefix's packages by the names of their files."""
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
    # Without O_NONBLOCK, a named pipe that a session left here would hold us for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:  # noqa: PTH123 - of a descriptor
        return file.read(_RECORD_BYTES)


def _name(file: str) -> str:
    """NAME-VERSION-BUILD.json, where only the name may have dashes."""
    return file.rsplit("-", 2)[0]


def _table(content: bytes) -> dict[str, Any]:
    try:
        told: Any = json.loads(content)
    except ValueError:
        return {}
    return cast("dict[str, Any]", told) if isinstance(told, dict) else {}


def files_of(content: bytes) -> Iterator[str]:
    """The files that a record names, as paths within its prefix."""
    files: Any = _table(content).get("files")
    for path in cast("list[Any]", files) if isinstance(files, list) else []:
        if isinstance(path, str) and _is_inside(path):
            yield path


def _located(content: bytes) -> Iterator[str]:
    """Files that hold the path of the prefix: those that were made with one, and scripts that were made for it."""
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
        # In place: a package may say so of a file that is larger than our memory.
        content = stack.enter_context(mmap.mmap(file, 0))
        place = content.find(old)
        while place >= 0:
            content[place : place + len(new)] = new
            place = content.find(old, place + len(new))
