"""Bundles: environments of sessions as one file, for hosts that reach no package index.

A bundle is a compressed tar archive. Its first member says what is in it and for which Python; then come the packages
of managed environments, without the links to the interpreter they were made with, and support folders. Unpacking makes
a virtual environment of the host's own interpreter and puts the packages there. A bundle is as trusted as the index it
replaces: its packages run on the host when an environment is inspected. Its names are checked all the same.
"""

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import sys
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from anyio import to_thread

from belljar.distribution import own_version
from belljar.environments.catalogue import managed_names
from belljar.environments.file_lock import open_lock
from belljar.environments.managed import (
    DEFAULT,
    Recipe,
    environments_folder,
    is_ready,
    mark_ready,
    recipe_folder,
)
from belljar.environments.selection import open_environment, recipe_of
from belljar.environments.uv import run_uv
from belljar.errors import EnvironmentBroken, InvalidArgument
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_missing
from belljar.settings import Settings

__all__ = ["BundlePart", "bundle", "unbundle"]

Tell = Callable[[str], None]

_FORM = 1
_MANIFEST = "belljar-bundle.json"
_MANIFEST_BYTES = 1 << 20
_MAX_FILES = 1_000_000
_MAX_BYTES = 100 << 30
_VENV_TIMEOUT_S = 120
# Packages are large, and the index serves them compressed already: more effort wins 4 % and takes four times as long.
_COMPRESSION = 1
_OF_THE_INTERPRETER = (
    "bin/python",
    "bin/activate",
    "bin/pydoc",
    "pyvenv.cfg",
    "lib64",
    ".ready",
    ".lock",
    "CACHEDIR.TAG",
)
_SHEBANG = b"#!"


@dataclass(frozen=True, slots=True)
class BundlePart:
    """One folder of a bundle."""

    kind: Literal["environment", "support"]
    name: str
    """The environment's name in the settings."""
    recipe: str
    """The digest of what an environment is made of; of a support folder its name, which depends on that too."""
    prefix: str
    """Where it was, as the commands in its `bin` say."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    tag: str
    libc: str
    belljar: str
    parts: list[BundlePart] = field(default_factory=list[BundlePart])
    form: int = _FORM


# Making one


async def bundle(settings: Settings, names: Sequence[str], file: Path, tell: Tell) -> list[BundlePart]:
    """Write a bundle of environments, which are made first if they are missing; return what is in it."""
    parts: dict[Path, BundlePart] = {}
    for name in names:
        environment = await open_environment(settings, name, on_progress=tell)
        if name in managed_names(settings):
            recipe = _recipe(settings, name)
            if recipe.requirements.specs:
                raise InvalidArgument(
                    f"environment {name} has packages of conda, which cannot be moved to another place",
                    hint="Move it with conda-pack, and name it in environments with its path",
                )
            if environment.version.split(".")[:2] != platform.python_version().split(".")[:2]:
                raise InvalidArgument(
                    f"environment {name} has Python {environment.version}, this belljar {platform.python_version()}",
                    hint="Use belljar with that Python on both hosts: the other one makes it of the server's own",
                )
            root = recipe_folder(settings, recipe)
            parts[root] = BundlePart("environment", name, _digest(recipe), str(root))
        if environment.support:
            parts[environment.support] = BundlePart("support", name, environment.support.name, str(environment.support))
    if not parts:
        raise InvalidArgument(
            f"nothing in {', '.join(names)} was made by belljar",
            hint="Environments of yours are yours to move; they have all that sessions need",
        )
    await to_thread.run_sync(_write, parts, file, tell)
    return [*parts.values()]


def _write(parts: dict[Path, BundlePart], file: Path, tell: Tell) -> None:
    unfinished = file.with_name(f".{file.name}.unfinished")
    manifest = _Manifest(_own_tag(), _own_libc(), own_version(), [*parts.values()])
    try:
        with (
            gzip.open(unfinished, "wb", compresslevel=_COMPRESSION) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            text = json.dumps(asdict(manifest), indent=2).encode()
            member = tarfile.TarInfo(_MANIFEST)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
            for number, (root, part) in enumerate(parts.items()):
                tell(f"packing {part.name}: {root}")
                for path in _files(root):
                    _add(archive, path, f"{number}/{path.relative_to(root).as_posix()}")
        unfinished.replace(file)
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _files(root: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(root):
        folders.sort()
        for name in sorted((*files, *(each for each in folders if Path(directory, each).is_symlink()))):
            path = Path(directory, name)
            if not path.relative_to(root).as_posix().startswith(_OF_THE_INTERPRETER):
                yield path


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.lstat()
    member = tarfile.TarInfo(name)
    # Compiled modules remember the time of their source in whole seconds.
    member.mtime = int(status.st_mtime)
    if stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        archive.addfile(member)
    elif stat.S_ISREG(status.st_mode):
        member.size, member.mode = status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        with path.open("rb") as content:
            archive.addfile(member, content)


# Unpacking one


async def unbundle(settings: Settings, file: Path, tell: Tell) -> list[BundlePart]:
    """Put the environments of a bundle in their places; return those that were not there yet."""
    try:
        make_missing(settings.data_directory)
        make_missing(environments_folder(settings))
        make_missing(settings.data_directory / "support")
        staging = settings.data_directory / "environments" / f".unbundle-{os.getpid()}"
        try:
            manifest = await to_thread.run_sync(_unpack, settings, file, staging, tell)
            return [
                part
                for number, part in enumerate(manifest.parts)
                if await _place(settings, part, staging / str(number), tell)
            ]
        finally:
            await to_thread.run_sync(remove_tree, staging)
    except OSError as error:
        raise EnvironmentBroken(
            f"{settings.data_directory} cannot be written: {error.strerror or error}",
            hint="Set data_directory to a folder you can write",
        ) from error


def _unpack(settings: Settings, file: Path, staging: Path, tell: Tell) -> _Manifest:
    remove_tree(staging)
    staging.mkdir(mode=0o755)
    try:
        source = file.open("rb")
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}") from error
    try:
        with source, tarfile.open(fileobj=source, mode="r|gz") as archive:
            manifest = _read_manifest(archive, file)
            _check(settings, manifest, file)
            tell(f"unpacking {file.name}")
            _extract(archive, staging, len(manifest.parts), file)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidArgument(
            f"{file} is damaged, or no bundle: {error}", hint="Copy it again; nothing was changed"
        ) from error
    return manifest


def _read_manifest(archive: tarfile.TarFile, file: Path) -> _Manifest:
    member = archive.next()
    content = archive.extractfile(member) if member and member.isfile() and member.name == _MANIFEST else None
    if member is None or content is None or member.size > _MANIFEST_BYTES:
        raise InvalidArgument(f"{file} is no bundle of belljar's", hint="Make one: belljar env bundle FILE")
    try:
        manifest: dict[str, Any] = json.loads(content.read())
        if manifest["form"] != _FORM:
            raise InvalidArgument(
                f"{file} was made by belljar {manifest['belljar']}, in a form that this one does not know",
                hint="Use the same version of belljar on both hosts",
            )
        parts = [
            BundlePart(
                "support" if each["kind"] == "support" else "environment",
                *(str(each[name]) for name in ("name", "recipe", "prefix")),
            )
            for each in manifest["parts"]
        ]
        return _Manifest(str(manifest["tag"]), str(manifest["libc"]), str(manifest["belljar"]), parts)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidArgument(f"{file} does not say in order what is in it", hint="Make it again") from None


def _check(settings: Settings, manifest: _Manifest, file: Path) -> None:
    """Refuse a bundle that this host or these settings cannot use, before anything is unpacked."""
    ours = (_own_tag(), _own_libc())
    if (manifest.tag, manifest.libc) != ours:
        raise InvalidArgument(
            f"{file} is for {manifest.tag} ({manifest.libc}), and this belljar runs on {ours[0]} ({ours[1]})",
            hint="Make the bundle with the same version of Python, on the same kind of machine",
        )
    for part in manifest.parts:
        if part.kind == "support":
            if PurePosixPath(part.recipe).name != part.recipe or not part.recipe.startswith("python"):
                raise InvalidArgument(f"{file} has a support folder with a wrong name: {part.recipe[:200]!r}")
            continue
        if part.name not in managed_names(settings):
            raise InvalidArgument(
                f"{file} has the environment {part.name[:200]}, which these settings do not name",
                hint="Copy its table in environments and its file of requirements to this host too",
            )
        if part.recipe != _digest(_recipe(settings, part.name)):
            raise InvalidArgument(
                f"the environment {part.name} in {file} is made of other packages than the one of these settings",
                hint=f"Use the same requirements and belljar on both hosts; it was made by belljar {manifest.belljar}",
            )


def _extract(archive: tarfile.TarFile, staging: Path, count: int, file: Path) -> None:
    left = _MAX_BYTES
    roots = {str(number) for number in range(count)}
    links: set[Path] = set()
    number = 0
    while (member := archive.next()) is not None:
        number += 1
        left -= member.size
        parts = PurePosixPath(member.name).parts
        target = staging.joinpath(*parts)
        # A link on the way to a file could lead anywhere, however it looks by itself.
        is_ours = len(parts) > 1 and parts[0] in roots and ".." not in parts and links.isdisjoint(target.parents)
        if not is_ours:
            raise InvalidArgument(f"{file} has a file with a wrong name: {member.name[:200]!r}")
        if number > _MAX_FILES or left < 0:
            raise InvalidArgument(f"{file} has more than {_MAX_FILES:,} files, or is larger than a bundle can be")
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.issym():
            links.add(target)
            _link(member.linkname, target, target.parents[len(parts) - 2], file)
        elif member.isfile() and (content := archive.extractfile(member)) is not None:
            # Never through a link, and never over what is there.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as copy:
                shutil.copyfileobj(content, copy, 1 << 20)
                os.fchmod(descriptor, 0o755 if member.mode & stat.S_IXUSR else 0o644)
            os.utime(target, (member.mtime, member.mtime))
        else:
            raise InvalidArgument(f"{file} has something in it that is no file: {member.name[:200]!r}")


def _link(destination: str, target: Path, root: Path, file: Path) -> None:
    """Make a link that leads to somewhere in the same folder."""
    landed = Path(os.path.normpath(target.parent / destination))
    if destination.startswith("/") or not landed.is_relative_to(root):
        raise InvalidArgument(f"{file} has a link that leads out of it: {destination[:200]!r}")
    target.symlink_to(destination)


async def _place(settings: Settings, part: BundlePart, staged: Path, tell: Tell) -> bool:
    """Move what was unpacked to where sessions look for it; return whether it was missing there."""
    if part.kind == "support":
        target = settings.data_directory / "support" / part.recipe
    else:
        target = recipe_folder(settings, _recipe(settings, part.name))
    async with open_lock(target.with_name(f".{target.name}.lock")) as lock:
        if is_ready(target) if part.kind == "environment" else target.is_dir():
            tell(f"{part.name} is there already: {target}")
            return False
        if part.kind == "environment":
            await _make_environment(target, part, staged, lock)
        else:
            await to_thread.run_sync(os.replace, staged, target)
    return True


async def _make_environment(root: Path, part: BundlePart, staged: Path, lock: int) -> None:
    """Make a virtual environment of our own interpreter, and move the packages into it."""
    await to_thread.run_sync(remove_tree, root)
    arguments = ("venv", "--no-project", "--offline", "--python", sys.executable, str(root))
    answer = await run_uv(arguments, directory=root.parent, timeout_s=_VENV_TIMEOUT_S, pass_fds=(lock,))
    if answer.status:
        raise EnvironmentBroken(f"the environment {part.name} could not be made: {answer.complaint}")
    await to_thread.run_sync(_move_in, staged, root, part.prefix)
    mark_ready(root)


def _move_in(staged: Path, root: Path, prefix: str) -> None:
    for path in [*_files(staged)]:
        target = root / path.relative_to(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent == root / "bin" and not path.is_symlink():
            _rewrite_shebang(path, prefix, root)
        path.replace(target)


def _rewrite_shebang(command: Path, prefix: str, root: Path) -> None:
    """Have a command start with the interpreter of its new place."""
    content = command.read_bytes()
    first, separator, rest = content.partition(b"\n")
    if first.startswith(_SHEBANG) and prefix.encode() in first:
        command.write_bytes(first.replace(prefix.encode(), str(root).encode()) + separator + rest)


# What both ends compare


def _recipe(settings: Settings, name: str) -> Recipe:
    return DEFAULT if name == DEFAULT.name else recipe_of(name, settings.environments[name])


def _digest(recipe: Recipe) -> str:
    return hashlib.sha256("\0".join((recipe.text, recipe.requirements.python)).encode()).hexdigest()


def _own_tag() -> str:
    return f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def _own_libc() -> str:
    return platform.libc_ver()[0] or "another C library than glibc"
