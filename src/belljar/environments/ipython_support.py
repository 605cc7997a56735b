"""IPython and cloudpickle for environments without them, in a separate folder: no environment is changed.

There is one folder for each kind of interpreter, made once under the data directory: of the server's own packages where
the interpreter can use them, else by uv. Our runner searches it after everything that the environment has itself, so
that it hides nothing.
"""

import hashlib
import logging
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from anyio import to_thread
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from belljar.environments.base import Interpreter, end_of, run_briefly
from belljar.environments.installed_packages import PackageFolder
from belljar.environments.uv import run_uv
from belljar.errors import EnvironmentBroken
from belljar.file_lock import open_lock
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, make_missing, shown_mode
from belljar.servers import shared_folder
from belljar.settings import Settings

# The newest that each Python can have: IPython 8.18 is the last one for 3.9. Sessions hibernate to disk with
# cloudpickle.
REQUIREMENTS = ("ipython>=8.18,<10", "matplotlib-inline", "cloudpickle>=3")
_BUILD_TIMEOUT_S = 600
_PROBE_TIMEOUT_S = 60

log = logging.getLogger(__name__)

_PROBE = "import sys; sys.path.append(sys.argv[1]); from IPython.core.interactiveshell import InteractiveShell"


def has_ipython(interpreter: Interpreter) -> bool:
    """Tell whether the environment has its own IPython, which is then used."""
    return _has(interpreter, "ipython")


def support_folder(settings: Settings, interpreter: Interpreter) -> Path:
    """Return the support folder for such an interpreter, which need not exist yet."""
    release = ".".join(map(str, interpreter.release))
    key = hashlib.sha256("\0".join((interpreter.tag, release, *REQUIREMENTS)).encode()).hexdigest()[:12]
    return shared_folder(settings.data_directory) / "support" / f"python{release}-{key}"


async def provide(
    settings: Settings, interpreter: Interpreter, *, on_progress: Callable[[str], None] | None = None
) -> Path | None:
    """Return the support folder, made if missing and checked to work; None if the environment has all packages."""
    if has_ipython(interpreter) and _has(interpreter, "cloudpickle"):
        return None
    folder = support_folder(settings, interpreter)
    if not _is_whole(folder):
        try:
            await _make(folder, interpreter, on_progress)
        except EnvironmentBroken as error:
            if not has_ipython(interpreter):
                raise
            log.warning("%s has no cloudpickle: classes of sleeping sessions are lost (%s)", interpreter.prefix, error)
            return None
    await to_thread.run_sync(check_support, interpreter, folder, abandon_on_cancel=True)
    return folder


def check_support(interpreter: Interpreter, folder: Path) -> None:
    """Check that IPython imports, because the environment's own packages come first and may be too old for it."""
    command = [str(interpreter.executable), "-I", "-c", _PROBE, str(folder)]
    status, _, errors = run_briefly(command, _PROBE_TIMEOUT_S)
    if status:
        raise EnvironmentBroken(
            f"IPython does not run in {interpreter.executable}, where it meets packages that are there already: "
            f"{end_of(errors).rpartition(chr(10))[2]}",
            hint=f"Install it there: uv pip install --python {interpreter.executable} ipython",
        )


async def _make(folder: Path, interpreter: Interpreter, on_progress: Callable[[str], None] | None) -> None:
    tell: Callable[[str], None] = on_progress or (lambda _: None)
    version = ".".join(map(str, interpreter.release))
    try:
        make_missing(folder.parent)
        async with open_lock(
            folder.with_name(f".{folder.name}.lock"),
            on_wait=lambda: tell(f"another server is fetching IPython for Python {version}: waiting for it"),
        ) as lock:
            if _is_whole(folder):
                return
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            await to_thread.run_sync(remove_tree, unfinished)
            if packages := await to_thread.run_sync(server_packages, interpreter, REQUIREMENTS):
                tell(f"copying the server's IPython for Python {version}, once")
                await to_thread.run_sync(_copy_packages, packages, unfinished)
            else:
                tell(f"fetching IPython for Python {version}, once")
                await _fetch(unfinished, interpreter, lock, tell)
            unfinished.replace(folder)
    except OSError as error:
        raise EnvironmentBroken(
            f"{folder} cannot be written: {error.strerror or error}",
            hint="Set data_directory to a folder you can write",
        ) from error


async def _fetch(folder: Path, interpreter: Interpreter, lock: int, tell: Callable[[str], None]) -> None:
    options = ("--target", str(folder), "--only-binary", ":all:", "--compile-bytecode", "--break-system-packages")
    answer = await run_uv(
        ("pip", "install", "--python", str(interpreter.executable), *options, *REQUIREMENTS),
        directory=folder.parent,
        timeout_s=_BUILD_TIMEOUT_S,
        on_line=tell,
        pass_fds=(lock,),
        variables={"UV_LINK_MODE": "copy"},
    )
    if answer.status:
        raise EnvironmentBroken(
            f"{interpreter.executable} lacks IPython or cloudpickle, and they could not be fetched: {answer.complaint}",
            hint=f"See that the package index can be reached, or install it there: uv pip install --python "
            f"{interpreter.executable} ipython; on a host without an index set UV_OFFLINE=1, and UV_FIND_LINKS to a "
            "folder of wheels",
        )


# The server needs IPython and cloudpickle itself, so wherever it is installed they are there too, also on a host
# without an index. An interpreter of the same kind can use the very same files.


def server_packages(interpreter: Interpreter, requirements: Sequence[str]) -> list[Distribution]:
    """Return the server's packages that satisfy the requirements, with all that they need; none where that is not so.

    None are returned for an interpreter of another version or platform either.
    """
    ours = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    if interpreter.tag != ours or interpreter.release != sys.version_info[:2]:
        return []
    found: dict[str, Distribution] = {}
    wanted = [Requirement(requirement) for requirement in requirements]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            return []
        if not requirement.specifier.contains(package.version, prereleases=True) or not package.files:
            return []
        if name not in found:
            found[name] = package
            wanted += _needs(package)
    return [*found.values()]


def _copy_packages(packages: Sequence[Distribution], folder: Path) -> None:
    """Copy the files of packages into a folder, without their commands; `OSError` if that cannot be done."""
    for package in packages:
        for file in package.files or []:
            source = Path(str(package.locate_file(file)))
            # Commands and manuals lie above the packages, and nobody calls them in there.
            if ".." in PurePosixPath(file).parts or not source.is_file():
                continue
            target = folder / file
            _make_shown(target.parent)
            shutil.copy2(source, target)
            target.chmod(shown_mode(is_folder=False))


def _make_shown(folder: Path) -> None:
    """Make a folder that sessions can read, whatever the umask is, and the missing ones above it."""
    if not folder.is_dir():
        _make_shown(folder.parent)
        make_folder(folder, shown_mode(is_folder=True))


def _needs(package: Distribution) -> Iterator[Requirement]:
    for text in package.requires or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _has(interpreter: Interpreter, name: str) -> bool:
    return any(PackageFolder(path).find(name) for path in interpreter.paths)


def _is_whole(folder: Path) -> bool:
    """Tell whether a folder is complete: it gets its final name only when nothing is missing in it."""
    return folder.is_dir()
