"""The environments that belljar makes, once for each list of requirements and Python, under the data directory.

An environment that can be used has a marker file that is written last. One without it was left by a server that died;
the next server goes on with the packages that are complete in it and with uv's cache. Its packages are compiled after
that, while it is used already, and another marker says that this is done. This module does not know who uses an
environment. What uv says meanwhile is passed on with how much of it is done: packages and megabytes.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from anyio import to_thread
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from belljar.environments.base import inspect_interpreter
from belljar.environments.conda.installs import make_prefix
from belljar.environments.installed_packages import PackageFolder
from belljar.environments.lockfile import conda_lock
from belljar.environments.requirements import EnvironmentRequirements
from belljar.environments.uv import UvAnswer, run_compiler, run_uv
from belljar.errors import EnvironmentBroken
from belljar.file_lock import open_lock, try_lock
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_missing, write_file
from belljar.servers import shared_folder
from belljar.settings import Settings

SHARED = "managed"
LOCK = "requirements.lock"
"""In a finished environment whose versions uv chose: the file that lists them."""
CONDA_LOCK = "environment.lock.yml"
"""The same file in an environment with packages of conda."""
_READY = ".ready"
_COMPILED = ".compiled"
_STARTUP = "belljar-startup.pth"
# `python -I` does not look at PYTHONPATH, on which sessions have the `sitecustomize` that catches `-m pip install`.
_STARTUP_LINE = (
    'import os, sys; sys.flags.ignore_environment and "BELLJAR_STARTUP" in os.environ '
    'and sys.path.append(os.environ["BELLJAR_STARTUP"])\n'
)
_BUILD_TIMEOUT_S = 1800
_NICENESS = 10
_RESOLVED = re.compile(r"Resolved (\d+) packages? in ")
_BEGUN = re.compile(r"Downloading (\S+) \(([\d.]+)(KiB|MiB|GiB)\)")
_FETCHED = re.compile(r"Downloaded (\S+)")
_MEGABYTES = {"KiB": 1024 / 1e6, "MiB": 1024**2 / 1e6, "GiB": 1024**3 / 1e6}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a managed environment is made of: a complete list of pins, or requirements for which uv chooses versions."""

    name: str
    lock: Path | None = None
    requirements: EnvironmentRequirements = field(default=EnvironmentRequirements(""))

    @property
    def text(self) -> str:
        """Return the text that identifies it: the same text makes the same environment."""
        if self.lock:
            return self.lock.read_text("utf-8")
        ours = self.requirements
        return "\n".join(["conda", *ours.channels, *ours.specs, ours.text]) if ours.specs else ours.text


DEFAULT = Recipe("default", Path(__file__).with_name("science.lock.txt"))


def recipe_folder(settings: Settings, recipe: Recipe = DEFAULT) -> Path:
    """Return the folder of a recipe's environment, made or not; it depends on the text, the Python and the platform.

    Recipes without a lock share one folder if they are the same, whatever their names.
    """
    wanted = [recipe.requirements.python] if recipe.requirements.python else []
    parts = (recipe.text, *wanted, sys.base_prefix, sysconfig.get_platform(), sys.implementation.cache_tag)
    key = hashlib.sha256("\0".join((*parts, str(sysconfig.get_config_var("SOABI")))).encode()).hexdigest()[:12]
    return environments_folder(settings) / f"{recipe.name if recipe.lock else SHARED}-{key}"


def environments_folder(settings: Settings) -> Path:
    """Return the folder that holds all managed environments."""
    return shared_folder(settings.data_directory) / "environments"


def interpreter_path(root: Path) -> Path:
    """Return the interpreter of the environment in a folder."""
    return root / "bin" / "python"


def is_ready(root: Path) -> bool:
    """Tell whether an environment was finished and its interpreter is still there."""
    return (root / _READY).is_file() and os.access(interpreter_path(root), os.X_OK)


def mark_ready(root: Path) -> None:
    """Say that an environment is finished."""
    (root / _READY).touch()


async def prepare(
    settings: Settings,
    recipe: Recipe = DEFAULT,
    *,
    show: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """Make the environment unless it is there, and return its interpreter; `show` lets uv write to our stderr."""
    root = recipe_folder(settings, recipe)
    tell: Callable[[str], None] = on_progress or (lambda _: None)
    if is_ready(root):
        _add_startup_file(root)
        return interpreter_path(root)
    try:
        make_missing(root.parent)
        async with open_lock(
            root.with_name(f".{root.name}.lock"),
            on_wait=lambda: tell(f"another server is preparing the {recipe.name} environment: waiting for it"),
        ) as lock:
            if not is_ready(root):
                await _Build(root, recipe, lock, show, tell).run()
    except OSError as error:
        raise EnvironmentBroken(
            f"{root} cannot be written: {error.strerror or error}", hint="Set data_directory to a folder you can write"
        ) from error
    _add_startup_file(root)
    return interpreter_path(root)


def is_compiled(root: Path) -> bool:
    """Tell whether there is nothing to compile: all is compiled, or the folder is not ours to change."""
    return (root / _COMPILED).exists() or not (root / _READY).exists() or not os.access(root, os.W_OK)


async def compile_packages(
    root: Path, *, is_aside: bool = False, on_progress: Callable[[str], None] | None = None
) -> None:
    """Compile the packages of a finished environment, which may be in use.

    With `is_aside` this gives way to sessions, and does nothing if somebody else does it. What was compiled stays if
    this is cancelled or killed, and the next call goes on from there.
    """
    if is_compiled(root):
        return
    path = root.with_name(f".{root.name}.lock")
    async with try_lock(path) if is_aside else open_lock(path) as lock:
        if lock is None or is_compiled(root):
            return
        answer = await run_compiler(
            interpreter_path(root),
            [str(packages) for packages in await to_thread.run_sync(_package_folders, root)],
            niceness=_NICENESS if is_aside else 0,
            directory=root.parent,
            timeout_s=_BUILD_TIMEOUT_S,
            on_line=on_progress,
            pass_fds=(lock,),
        )
        if not answer.status:
            with contextlib.suppress(OSError):
                (root / _COMPILED).touch()


def _package_folders(root: Path) -> list[Path]:
    return [*root.glob("lib/python3*/site-packages")]


def _add_startup_file(root: Path) -> None:
    """Write the line that `python -I` reads, unless it is there; an environment that cannot be written does without."""
    for packages in _package_folders(root):
        if not (packages / _STARTUP).is_file():
            with contextlib.suppress(OSError):
                write_file(packages / _STARTUP, _STARTUP_LINE)
                (packages / _STARTUP).chmod(0o644)  # users of sessions read it


@dataclass(frozen=True, slots=True)
class _Build:
    root: Path
    recipe: Recipe
    lock: int
    show: bool
    tell: Callable[[str], None]

    async def run(self) -> None:
        self.tell(f"preparing the {self.recipe.name} environment in {self.root}: once, may take a minute")
        is_continued = await to_thread.run_sync(self._can_continue)
        if self.root.exists() and not is_continued:
            await to_thread.run_sync(shutil.rmtree, self.root)
        if self.recipe.requirements.specs:
            await make_prefix(
                self.root, self.recipe.requirements, self.tell, lock=self.lock, timeout_s=_BUILD_TIMEOUT_S
            )
            if self.recipe.requirements.text:
                await self._install("--break-system-packages")
        else:
            if not is_continued:
                await self._uv("venv", "--no-project", "--python", self._python(), str(self.root))
            await self._install()
        await to_thread.run_sync(self._write_lock)
        mark_ready(self.root)
        self.tell(f"the {self.recipe.name} environment is ready")

    def _can_continue(self) -> bool:
        """Tell whether a killed server left a virtual environment to continue; remove its incomplete packages."""
        is_venv = (self.root / "pyvenv.cfg").is_file() and os.access(interpreter_path(self.root), os.X_OK)
        if self.recipe.requirements.specs or not is_venv or (self.root / _READY).exists():
            return False
        for information in self.root.glob("lib/python*/site-packages/*.dist-info"):
            if not _is_complete(information):
                remove_tree(information)
        return True

    async def _install(self, *options: str) -> None:
        # Not compiled here: that takes as long as all the rest, and the first session need not wait for it.
        wheels = ("--only-binary", ":all:", "--no-compile-bytecode", *options, *self._requirements())
        await self._uv("pip", "install", "--python", str(interpreter_path(self.root)), *wheels)

    def _python(self) -> str:
        """Return the server's own interpreter if it fits, else the wanted version for uv to find."""
        wanted = self.recipe.requirements.python
        try:
            is_fit = not wanted or SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
        except InvalidSpecifier:
            is_fit = False
        return sys.executable if is_fit else wanted

    def _requirements(self) -> tuple[str, ...]:
        if self.recipe.lock is not None:
            return ("--no-deps", "-r", str(self.recipe.lock))
        if self.recipe.requirements.file is not None:
            return ("-r", str(self.recipe.requirements.file))
        file = self.root / "requirements.in"
        file.write_text(self.recipe.requirements.text, "utf-8")
        return ("-r", str(file))

    def _write_lock(self) -> None:
        """Write the lock from what is installed, rather than from what uv reported."""
        if self.recipe.requirements.specs:
            interpreter = inspect_interpreter(interpreter_path(self.root))
            lock = conda_lock(interpreter, self.recipe.name, self.recipe.requirements.channels)
            (self.root / CONDA_LOCK).write_text(lock, "utf-8")
            return
        site_folders = [PackageFolder(path) for path in self.root.glob("lib/python*/site-packages")]
        found = {name: each.version for site_folder in site_folders for name, each in site_folder.distributions.items()}
        (self.root / LOCK).write_text("".join(f"{name}=={found[name]}\n" for name in sorted(found)), "utf-8")

    async def _uv(self, *arguments: str) -> None:
        answer = await run_uv(
            arguments,
            directory=self.root.parent,
            timeout_s=_BUILD_TIMEOUT_S,
            show=self.show,
            on_line=BuildProgress(self.tell).on_line,
            # uv inherits the lock, so that if this server is killed, the next one does not start while uv still writes.
            pass_fds=(self.lock,),
        )
        if answer.status:
            raise _failed(self.recipe, answer)


def _is_complete(information: Path) -> bool:
    """Tell whether uv finished a package: the last file that it writes is RECORD, which lists all files and itself."""
    try:
        record = (information / "RECORD").read_text("utf-8")
    except (OSError, ValueError):
        return False
    return record.endswith("\n") and f"{information.name}/INSTALLER" in record and (information / "INSTALLER").exists()


def _failed(recipe: Recipe, answer: UvAnswer) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"the {recipe.name} environment could not be made: {answer.complaint}",
        hint="`belljar doctor` says whether the package index can be reached (uv reads UV_DEFAULT_INDEX and uv.toml, "
        "not pip.conf); or set environment to the path of a virtual environment; on a host without an index "
        "set UV_OFFLINE=1, and UV_FIND_LINKS to a folder of wheels",
    )


class BuildProgress:
    """Passes uv's lines on to `tell`; the lines about files also say how much of everything has been fetched."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._packages = 0
        self._sizes: dict[str, float] = {}
        self._fetched: set[str] = set()

    def on_line(self, line: str) -> None:
        """Take the next line of uv's."""
        if found := _RESOLVED.match(line):
            self._packages = int(found[1])
        if found := _BEGUN.match(line):
            self._sizes[found[1]] = float(found[2]) * _MEGABYTES[found[3]]
            self._tell(f"fetching {found[1]}, {self._sizes[found[1]]:.0f} MB: {self._summary()}")
        elif (found := _FETCHED.match(line)) and found[1] in self._sizes:
            self._fetched.add(found[1])
            self._tell(f"fetched {found[1]}: {self._summary()}")
        elif line and not line.startswith("Activate with:"):  # advice for shells, which use no such environment
            self._tell(line)

    def _summary(self) -> str:
        done = sum(self._sizes[name] for name in self._fetched)
        packages = f" of {self._packages} packages" if self._packages else ""
        return f"{done:.0f} of {sum(self._sizes.values()):.0f} MB{packages}"
