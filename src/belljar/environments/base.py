"""An environment: an interpreter, and the trees of the host that it needs in order to run.

This module runs the interpreter once to ask for its version and paths, and believes the answer, because the operator
chose the environment and no session did. It does not know how environments are made or what is installed in them.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from belljar.errors import EnvironmentBroken
from belljar.sandboxes.child import ProgramAnswer, ProgramSilent, run_program

# `sys.stdlib_module_names` exists since Python 3.10. For older ones, list the folders of the standard library.
_INSPECTION = """
import json, os, pkgutil, platform, sys, sysconfig
names = getattr(sys, "stdlib_module_names", None)
if names is None:
    places = [os.path.dirname(os.__file__), sysconfig.get_config_var("DESTSHARED") or ""]
    names = {*sys.builtin_module_names, *(found.name for found in pkgutil.iter_modules(places))}
print()
print(json.dumps({
    "executable": sys.executable, "version": platform.python_version(), "prefix": sys.prefix,
    "base_prefix": sys.base_prefix, "paths": sys.path, "standard_library": sorted(names),
    "tag": "%s-%s" % (sys.implementation.cache_tag, sysconfig.get_platform()),
}))
"""
_OUTPUT_CHARS = 2_000
_LINKS_LIMIT = 40
# Every sandbox shows these already, so an environment need not list them as readable.
_SYSTEM_TREES = tuple(Path(tree) for tree in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"))


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter for sessions; `readable` are the trees a sandbox must show at their own path for it to run."""

    name: str
    python: Path
    readable: tuple[Path, ...]
    kind: str = ""
    """How it was found or made: venv, venv-uv, conda, system or managed; empty if the caller did not say."""
    version: str = ""
    """The version of its Python."""
    support: Path | None = None
    """A folder with IPython for our runner, if the environment has none; it is searched after the environment's own."""
    channels: tuple[str, ...] = ()
    """The URLs of the conda channels that packages for it come from; empty if it is not an environment of conda."""

    @property
    def prefix(self) -> Path:
        """Return the folder that holds its `bin`."""
        return self.python.parent.parent


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What an interpreter reports about itself in isolated mode; `paths` is where it looks for modules."""

    executable: Path
    version: str
    prefix: Path
    base_prefix: Path
    paths: tuple[Path, ...]
    standard_library: frozenset[str] = field(repr=False)
    tag: str = ""
    """Interpreters with the same tag can use the same compiled packages."""

    @property
    def is_virtual(self) -> bool:
        """Tell whether it belongs to a virtual environment."""
        return self.prefix != self.base_prefix

    @property
    def release(self) -> tuple[int, int]:
        """Return the major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def inspect_interpreter(python: Path, *, timeout_s: float = 30) -> Interpreter:
    """Run an interpreter once, isolated from the caller's variables and folders, and return what it reports."""
    status, answer, errors = run_briefly([str(python), "-I", "-c", _INSPECTION], timeout_s)
    if status:
        raise EnvironmentBroken(f"{python} does not run: {end_of(errors) or f'it ended with status {status}'}")
    try:
        facts = json.loads(answer.rstrip().rpartition("\n")[2])
        return Interpreter(
            executable=Path(facts["executable"]),
            version=facts["version"],
            prefix=Path(facts["prefix"]),
            base_prefix=Path(facts["base_prefix"]),
            paths=tuple(Path(entry) for entry in facts["paths"]),
            standard_library=frozenset(facts["standard_library"]),
            tag=str(facts["tag"]),
        )
    except (ValueError, KeyError, TypeError):
        raise EnvironmentBroken(f"{python} is not a Python interpreter: it answered {end_of(answer)!r}") from None


def describe(
    name: str,
    interpreter: Interpreter,
    *,
    kind: str = "",
    support: Path | None = None,
    channels: tuple[str, ...] = (),
) -> Environment:
    """Return the environment of an interpreter that was inspected."""
    # A virtual environment is found through the link in its bin folder, anything else through the real file.
    python = interpreter.executable if interpreter.is_virtual else interpreter.executable.resolve()
    readable = (*_readable(python, interpreter), *([support] if support else []))
    return Environment(name, python, readable, kind, interpreter.version, support, channels)


def run_briefly(command: list[str], timeout_s: float) -> ProgramAnswer:
    """Run a command on the host with an empty stdin."""
    try:
        # Users of sessions read the bytecode that it caches.
        return run_program(command, timeout_s=timeout_s, umask=0o022 if os.geteuid() == 0 else -1)
    except ProgramSilent as silence:
        raise EnvironmentBroken(str(silence)) from silence


def end_of(output: str) -> str:
    """Return the end of a command's output."""
    return output.strip()[-_OUTPUT_CHARS:]


def _readable(python: Path, interpreter: Interpreter) -> tuple[Path, ...]:
    needed = [interpreter.prefix, interpreter.base_prefix, *_link_folders(python)]
    for tree in needed:
        if exposes_home(tree):
            raise EnvironmentBroken(
                f"{python} needs {tree}, which sessions must not see",
                hint="Use an interpreter that has a folder of its own",
            )
    # Editable installs put folders of their own on the path.
    found = [path for path in interpreter.paths if path.is_dir() and not exposes_home(path)]
    trees = {form for tree in (*needed, *found) for form in (Path(os.path.abspath(tree)), tree.resolve())}  # noqa: PTH100 - keeps links
    own = [tree for tree in trees if not any(tree.is_relative_to(system) for system in _SYSTEM_TREES)]
    return tuple(sorted(tree for tree in own if not any(parent in own for parent in tree.parents)))


def _link_folders(executable: Path) -> Iterator[Path]:
    """Yield the folders that the links of an executable lead through, because Python walks them to find its library."""
    hop = executable
    for _ in range(_LINKS_LIMIT):
        yield hop.parent
        if not hop.is_symlink():
            return
        hop = hop.parent.resolve() / hop.readlink()


def exposes_home(tree: Path) -> bool:
    """Tell whether showing a tree to a sandbox would show it the user's home folder too, or the whole host."""
    try:
        home = Path.home().resolve()
    except RuntimeError:
        home = Path("/")
    return home.is_relative_to(tree.resolve())
