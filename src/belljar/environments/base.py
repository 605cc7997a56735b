"""What an environment is: an interpreter, and the trees of the host it needs in order to run.

It asks the interpreter itself, once, and believes it: an environment is the operator's choice, not a session's. It
knows nothing of how environments are made or of what is installed in them.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from belljar.errors import EnvironmentBroken

# `sys.stdlib_module_names` came with Python 3.10: before, what lies in the folders of the library is asked.
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
_WORDS_LIMIT = 2_000
_LINKS_LIMIT = 40
# Every sandbox shows these already.
_SYSTEM_TREES = tuple(Path(tree) for tree in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"))


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter for sessions; `readable` are the trees a sandbox must show at their own path for it to run."""

    name: str
    python: Path
    readable: tuple[Path, ...]
    kind: str = ""
    """How it was found or made: venv, venv-uv, conda, system or managed; empty where nobody said."""
    version: str = ""
    """Of its Python."""
    support: Path | None = None
    """A folder with IPython for our runner, where the environment has none: searched after all of its own."""
    channels: tuple[str, ...] = ()
    """The URLs of conda's channels that packages for it come from; none for what is not conda's."""

    @property
    def prefix(self) -> Path:
        """The folder that holds its `bin`."""
        return self.python.parent.parent


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What an interpreter says of itself in isolated mode; `paths` is where it looks for modules."""

    executable: Path
    version: str
    prefix: Path
    base_prefix: Path
    paths: tuple[Path, ...]
    standard_library: frozenset[str] = field(repr=False)
    tag: str = ""
    """Interpreters of one tag can use the same compiled packages."""

    @property
    def is_virtual(self) -> bool:
        """Whether it belongs to a virtual environment."""
        return self.prefix != self.base_prefix

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def inspect_interpreter(python: Path, *, timeout_s: float = 30) -> Interpreter:
    """Run an interpreter once, isolated from the caller's variables and folders, and return what it says of itself."""
    status, answer, words = run_briefly([str(python), "-I", "-c", _INSPECTION], timeout_s)
    if status:
        raise EnvironmentBroken(f"{python} does not run: {last_words(words) or f'it ended with status {status}'}")
    try:
        told = json.loads(answer.rstrip().rpartition("\n")[2])
        return Interpreter(
            executable=Path(told["executable"]),
            version=told["version"],
            prefix=Path(told["prefix"]),
            base_prefix=Path(told["base_prefix"]),
            paths=tuple(Path(entry) for entry in told["paths"]),
            standard_library=frozenset(told["standard_library"]),
            tag=str(told["tag"]),
        )
    except (ValueError, KeyError, TypeError):
        raise EnvironmentBroken(f"{python} is not a Python interpreter: it answered {last_words(answer)!r}") from None


def describe(
    name: str,
    interpreter: Interpreter,
    *,
    kind: str = "",
    support: Path | None = None,
    channels: tuple[str, ...] = (),
) -> Environment:
    """The environment of an interpreter that was inspected."""
    # A virtual environment is found through the link in its bin folder, anything else through the real file.
    python = interpreter.executable if interpreter.is_virtual else interpreter.executable.resolve()
    readable = (*_readable(python, interpreter), *([support] if support else []))
    return Environment(name, python, readable, kind, interpreter.version, support, channels)


def run_briefly(command: list[str], timeout_s: float) -> tuple[int, str, str]:
    """The status of a command on the host, and what it wrote to stdout and stderr; it has nothing to read."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentBroken(f"{command[0]} does not run: {error.strerror}") from error
    with process:
        try:
            answer, words = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # A wrapper script's children hold the pipes too: without the whole group, closing them would wait on.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise EnvironmentBroken(f"{command[0]} gave no answer in {timeout_s:g} s") from None
    return process.returncode, answer, words


def last_words(words: str) -> str:
    """The end of what a command said."""
    return words.strip()[-_WORDS_LIMIT:]


def _readable(python: Path, interpreter: Interpreter) -> tuple[Path, ...]:
    needed = [interpreter.prefix, interpreter.base_prefix, *_link_folders(python)]
    for tree in needed:
        if would_bare(tree):
            raise EnvironmentBroken(
                f"{python} needs {tree}, which sessions must not see",
                hint="Use an interpreter that has a folder of its own",
            )
    # Editable installs put folders of their own on the path.
    found = [path for path in interpreter.paths if path.is_dir() and not would_bare(path)]
    trees = {form for tree in (*needed, *found) for form in (Path(os.path.abspath(tree)), tree.resolve())}  # noqa: PTH100 - keeps links
    own = [tree for tree in trees if not any(tree.is_relative_to(system) for system in _SYSTEM_TREES)]
    return tuple(sorted(tree for tree in own if not any(parent in own for parent in tree.parents)))


def _link_folders(executable: Path) -> Iterator[Path]:
    """The folders that the links of an executable lead through: Python walks them to find its own library."""
    hop = executable
    for _ in range(_LINKS_LIMIT):
        yield hop.parent
        if not hop.is_symlink():
            return
        hop = hop.parent.resolve() / hop.readlink()


def would_bare(tree: Path) -> bool:
    """Whether showing a tree would show the whole host or the home folder with it."""
    try:
        home = Path.home().resolve()
    except RuntimeError:
        home = Path("/")
    return home.is_relative_to(tree.resolve())
