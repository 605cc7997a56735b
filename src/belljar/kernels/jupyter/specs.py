"""Kernelspecs: which Jupyter kernels are installed, the command of one, and what a sandbox must show it.

Starts no kernel.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

from jupyter_client.kernelspec import KernelSpecManager
from pydantic import BaseModel, Field, ValidationError

from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.errors import EnvironmentBroken

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


class _KernelFile(BaseModel):
    """The parts of a `kernel.json` that we use."""

    argv: list[str] = Field(min_length=1)
    env: dict[str, str] = {}
    interrupt_mode: Literal["signal", "message"] = "signal"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One installed kernel."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    resources: Path
    """The folder of the `kernel.json`."""
    is_interrupted_by_message: bool = False

    @property
    def executable(self) -> str:
        """Return the kernel's program: a path, or a name to be found on the session's PATH."""
        return self.argv[0]

    @property
    def is_python(self) -> bool:
        """Return whether the kernel's program is a Python."""
        return _PYTHON.fullmatch(Path(self.executable).name) is not None

    def command(self, connection_file: str) -> list[str]:
        """Return the command that starts the kernel."""
        values = {"{connection_file}": connection_file, "{resource_dir}": str(self.resources)}
        pattern = re.compile("|".join(map(re.escape, values)))
        return [self.argv[0], *(pattern.sub(lambda found: values[found[0]], word) for word in self.argv[1:])]

    def variables(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the session's variables overridden by the spec's.

        The folder of the kernel's program comes first on PATH, unless the spec sets PATH itself.
        """
        own = {name: Template(value).safe_substitute(base) for name, value in self.environment.items()}
        merged = {**base, **own}
        if "PATH" not in own and "/" in self.executable:
            merged["PATH"] = f"{Path(self.executable).parent}:{base.get('PATH', '/usr/bin:/bin')}"
        return merged


def find_kernelspec(name: str, extra_folders: Iterable[Path] = ()) -> KernelSpec:
    """Return the kernelspec of that name; the extra folders are searched before Jupyter's own."""
    # Without `ensure_native_kernel=False` it would offer the server's own interpreter and packages.
    finder = KernelSpecManager(ensure_native_kernel=False)
    finder.kernel_dirs = [*map(str, extra_folders), *finder.kernel_dirs]
    installed = finder.find_kernel_specs()
    folder = installed.get(name.lower())
    if folder is None:
        known = ", ".join(sorted(installed))
        raise EnvironmentBroken(
            f"no Jupyter kernel is named {name!r}",
            hint=f"Installed: {known}" if known else "None is installed: `jupyter kernelspec install` adds one",
        )
    return _read(name, Path(folder))


def kernel_readable(spec: KernelSpec) -> tuple[Path, ...]:
    """Return the trees that a sandbox must show this kernel; blocks for a moment, because it runs its interpreter."""
    return (*_program(Path(spec.executable)), spec.resources)


def kernel_environment(spec: KernelSpec) -> Environment | None:
    """Return the environment of the kernel's interpreter; None if it is not Python, or has no absolute path."""
    executable = Path(spec.executable)
    if not executable.is_absolute() or not _PYTHON.fullmatch(executable.name):
        return None
    return describe(spec.name, inspect_interpreter(executable))


def _read(name: str, folder: Path) -> KernelSpec:
    file = folder / "kernel.json"
    try:
        content = _KernelFile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EnvironmentBroken(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise EnvironmentBroken(f"{file} is not a kernelspec: {place} {fault['msg']}".replace(":  ", ": ")) from error
    argv = (_own_python(content.argv[0], folder), *content.argv[1:])
    return KernelSpec(name, argv, content.env, folder, content.interrupt_mode == "message")


def _own_python(executable: str, folder: Path) -> str:
    """Resolve a bare `python` to PREFIX/bin/python, for a kernelspec in PREFIX/share/jupyter/kernels/NAME."""
    if not _PYTHON.fullmatch(executable) or folder.parts[-4:-1] != ("share", "jupyter", "kernels"):
        return executable
    python = folder.parents[3] / "bin" / executable
    return str(python) if python.is_file() else executable


def _program(executable: Path) -> tuple[Path, ...]:
    if not executable.is_absolute():
        return ()
    if _PYTHON.fullmatch(executable.name):
        return describe(executable.name, inspect_interpreter(executable)).readable
    prefix = executable.parent.parent
    if (prefix / "conda-meta").is_dir():
        return (prefix,)
    # The program alone, because the folder around it may be somebody's ~/.local/bin.
    return (executable, executable.resolve())
