"""The environments we make ourselves, once per list of requirements and Python, under the data directory.

A finished one has a marker, written last: one without it was left by a server that died, and the next one goes on with
what is whole of it, and with what uv's cache has. Nothing
here knows who uses an environment.
"""

import hashlib
import os
import platform
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
from belljar.environments.conda.lockfile import conda_lock
from belljar.environments.file_lock import open_lock
from belljar.environments.installed_packages import PackageFolder
from belljar.environments.requirements import EnvironmentRequirements
from belljar.environments.uv import UvAnswer, run_uv
from belljar.errors import EnvironmentBroken
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_missing
from belljar.settings import Settings

SHARED = "managed"
LOCK = "requirements.lock"
"""In a finished environment that uv chose the versions of: which ones those are."""
CONDA_LOCK = "environment.lock.yml"
"""The same of one with packages of conda."""
_READY = ".ready"
_BUILD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a managed environment is made of: a complete list of pinned requirements, or some for uv to choose from."""

    name: str
    lock: Path | None = None
    ingredients: EnvironmentRequirements = field(default=EnvironmentRequirements(""))

    @property
    def text(self) -> str:
        """What makes it what it is."""
        if self.lock:
            return self.lock.read_text("utf-8")
        ours = self.ingredients
        return "\n".join(["conda", *ours.channels, *ours.specs, ours.text]) if ours.specs else ours.text


DEFAULT = Recipe("default", Path(__file__).with_name("science.lock.txt"))


def folder(settings: Settings, recipe: Recipe = DEFAULT) -> Path:
    """Where a recipe's environment is or will be; another lock, Python or platform has another folder.

    Recipes for uv to choose from share one, whatever their names, if they are the same.
    """
    wanted = [recipe.ingredients.python] if recipe.ingredients.python else []
    parts = (recipe.text, *wanted, sys.base_prefix, sysconfig.get_platform(), sys.implementation.cache_tag)
    key = hashlib.sha256("\0".join((*parts, str(sysconfig.get_config_var("SOABI")))).encode()).hexdigest()[:12]
    return environments_folder(settings) / f"{recipe.name if recipe.lock else SHARED}-{key}"


def environments_folder(settings: Settings) -> Path:
    """Where all of them are."""
    return settings.data_directory / "environments"


def interpreter_path(root: Path) -> Path:
    """The interpreter of the virtual environment in a folder."""
    return root / "bin" / "python"


def is_ready(root: Path) -> bool:
    """Whether an environment was finished and the interpreter behind it is still there."""
    return (root / _READY).is_file() and os.access(interpreter_path(root), os.X_OK)


async def prepare(
    settings: Settings,
    recipe: Recipe = DEFAULT,
    *,
    show: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """Make the environment unless it is there, and return its interpreter; `show` lets uv draw on our stderr."""
    root = folder(settings, recipe)
    tell = on_progress or _keep_quiet
    if is_ready(root):
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
    return interpreter_path(root)


def _keep_quiet(_: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class _Build:
    root: Path
    recipe: Recipe
    lock: int
    show: bool
    tell: Callable[[str], None]

    async def run(self) -> None:
        self.tell(f"preparing the {self.recipe.name} environment in {self.root}: once, may take a minute")
        is_begun = await to_thread.run_sync(self._has_beginning)
        if self.root.exists() and not is_begun:
            await to_thread.run_sync(shutil.rmtree, self.root)
        if self.recipe.ingredients.specs:
            await make_prefix(self.root, self.recipe.ingredients, self.tell, lock=self.lock, timeout_s=_BUILD_TIMEOUT_S)
            if self.recipe.ingredients.text:
                await self._install("--break-system-packages")
        else:
            if not is_begun:
                await self._uv("venv", "--no-project", "--python", self._python(), str(self.root))
            await self._install()
        if self.recipe.lock is None:
            await to_thread.run_sync(self._write_lock)
        (self.root / _READY).touch()
        self.tell(f"the {self.recipe.name} environment is ready")

    def _has_beginning(self) -> bool:
        """Whether a server that was cut off left something to go on with; packages it left in part are withdrawn."""
        is_venv = (self.root / "pyvenv.cfg").is_file() and os.access(interpreter_path(self.root), os.X_OK)
        if self.recipe.ingredients.specs or not is_venv or (self.root / _READY).exists():
            return False
        for information in self.root.glob("lib/python*/site-packages/*.dist-info"):
            if not _is_complete(information):
                remove_tree(information)
        return True

    async def _install(self, *options: str) -> None:
        # Sessions see the tree read-only and could not keep what they compile: `import pandas, sklearn` took 8 s
        # instead of 2.5 s, in every session. Compiling costs 18 s and 250 MB, once.
        wheels = ("--only-binary", ":all:", "--compile-bytecode", *options, *self._requirements())
        await self._uv("pip", "install", "--python", str(interpreter_path(self.root)), *wheels)

    def _python(self) -> str:
        """The server's own where that will do."""
        wanted = self.recipe.ingredients.python
        try:
            is_fit = not wanted or SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
        except InvalidSpecifier:
            is_fit = False
        return sys.executable if is_fit else wanted

    def _requirements(self) -> tuple[str, ...]:
        if self.recipe.lock is not None:
            return ("--no-deps", "-r", str(self.recipe.lock))
        if self.recipe.ingredients.file is not None:
            return ("-r", str(self.recipe.ingredients.file))
        file = self.root / "requirements.in"
        file.write_text(self.recipe.ingredients.text, "utf-8")
        return ("-r", str(file))

    def _write_lock(self) -> None:
        """By what is there rather than by what uv said."""
        if self.recipe.ingredients.specs:
            interpreter = inspect_interpreter(interpreter_path(self.root))
            lock = conda_lock(interpreter, self.recipe.name, self.recipe.ingredients.channels)
            (self.root / CONDA_LOCK).write_text(lock, "utf-8")
            return
        shelves = [PackageFolder(path) for path in self.root.glob("lib/python*/site-packages")]
        found = {name: each.version for shelf in shelves for name, each in shelf.distributions.items()}
        (self.root / LOCK).write_text("".join(f"{name}=={found[name]}\n" for name in sorted(found)), "utf-8")

    async def _uv(self, *arguments: str) -> None:
        answer = await run_uv(
            arguments,
            directory=self.root.parent,
            timeout_s=_BUILD_TIMEOUT_S,
            show=self.show,
            on_line=self.tell,
            # Should this server be killed, the next one must not start over while uv still writes.
            pass_fds=(self.lock,),
        )
        if answer.status:
            raise _failed(self.recipe, answer)


def _is_complete(information: Path) -> bool:
    """Whether uv was done with a package: the last that it writes is a list of all its files, its own included."""
    try:
        record = (information / "RECORD").read_text("utf-8")
    except (OSError, ValueError):
        return False
    return record.endswith("\n") and f"{information.name}/INSTALLER" in record and (information / "INSTALLER").exists()


def _failed(recipe: Recipe, answer: UvAnswer) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"the {recipe.name} environment could not be made: {answer.complaint}",
        hint="See that the package index can be reached (uv reads UV_DEFAULT_INDEX and uv.toml, not pip.conf), "
        "or set environment to the path of a virtual environment",
    )
