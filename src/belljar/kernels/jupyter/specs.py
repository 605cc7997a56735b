"""Kernelspecs: which Jupyter kernels are installed, how one is started and what it needs to see. Starts nothing."""

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
    """The parts of a `kernel.json` that we go by."""

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
        """Its program: a path, or a name to be found on the session's PATH."""
        return self.argv[0]

    @property
    def is_python(self) -> bool:
        """Whether its program is a Python."""
        return _PYTHON.fullmatch(Path(self.executable).name) is not None

    def command(self, connection_file: str) -> list[str]:
        """The command that starts it."""
        values = {"{connection_file}": connection_file, "{resource_dir}": str(self.resources)}
        pattern = re.compile("|".join(map(re.escape, values)))
        return [self.argv[0], *(pattern.sub(lambda found: values[found[0]], word) for word in self.argv[1:])]

    def variables(self, base: Mapping[str, str]) -> dict[str, str]:
        """The session's variables with the spec's own over them; programs beside the kernel's are found first."""
        own = {name: Template(value).safe_substitute(base) for name, value in self.environment.items()}
        merged = {**base, **own}
        if "PATH" not in own and "/" in self.executable:
            merged["PATH"] = f"{Path(self.executable).parent}:{base.get('PATH', '/usr/bin:/bin')}"
        return merged


def find_kernelspec(name: str, extra_folders: Iterable[Path] = ()) -> KernelSpec:
    """The kernel of that name; the extra folders of kernelspecs come before Jupyter's own places."""
    # Without `ensure_native_kernel=False` it would offer the server's own interpreter, packages and all.
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
    """The trees a sandbox must show for this kernel to run; asks its interpreter, so it blocks for a moment."""
    return (*_program(Path(spec.executable)), spec.resources)


def kernel_environment(spec: KernelSpec) -> Environment | None:
    """The interpreter that the kernel runs on; None where that is not Python, or not known by its path."""
    executable = Path(spec.executable)
    if not executable.is_absolute() or not _PYTHON.fullmatch(executable.name):
        return None
    return describe(spec.name, inspect_interpreter(executable))


def _read(name: str, folder: Path) -> KernelSpec:
    file = folder / "kernel.json"
    try:
        told = _KernelFile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EnvironmentBroken(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise EnvironmentBroken(f"{file} is not a kernelspec: {place} {fault['msg']}".replace(":  ", ": ")) from error
    argv = (_own_python(told.argv[0], folder), *told.argv[1:])
    return KernelSpec(name, argv, told.env, folder, told.interrupt_mode == "message")


def _own_python(executable: str, folder: Path) -> str:
    """A bare `python` means that of the tree the kernelspec is installed in, PREFIX/share/jupyter/kernels/NAME."""
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
    # Not the folder around it, which may be somebody's ~/.local/bin.
    return (executable, executable.resolve())
