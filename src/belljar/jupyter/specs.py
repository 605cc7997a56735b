"""Writes and removes the kernelspec, by which Jupyter's front ends find belljar. Starts nothing."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager

from belljar.errors import InvalidArgument
from belljar.settings import variable

NAME = "belljar"


def kernel_file(display_name: str, *, settings: dict[str, str], on_server: bool) -> dict[str, object]:
    """Return the content of `kernel.json`; settings are passed as environment variables."""
    arguments = ["--on-server"] if on_server else []
    return {
        # -P, because nothing may be imported from the folder of a notebook, least of all outside the sandbox.
        "argv": [sys.executable, "-P", "-m", "belljar", "kernel", *arguments, "-f", "{connection_file}"],
        "display_name": display_name,
        "language": "python",
        "interrupt_mode": "message",
        "env": {variable(name): value for name, value in settings.items()},
        "metadata": {"debugger": False, "belljar": True},
    }


def install(name: str, content: dict[str, object], *, user: bool = False, prefix: str | None = None) -> Path:
    """Write the kernelspec where front ends look for it; a kernelspec of that name is replaced if it is ours."""
    name = name.lower()  # as Jupyter does
    finder = KernelSpecManager(ensure_native_kernel=False)
    folder = _folder(finder, name, user=user, prefix=prefix)
    if (folder / "kernel.json").exists() and not _is_ours(folder):
        raise InvalidArgument(f"{folder} holds another kernel", hint="Choose another --name")
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "kernel.json").write_text(json.dumps(content, indent=1) + "\n")
        try:
            return Path(finder.install_kernel_spec(source, name, user=user, prefix=prefix))
        except OSError as error:
            raise InvalidArgument(
                f"{folder} cannot be written: {error.strerror}", hint="Choose --user, --sys-prefix or --prefix"
            ) from error
        except ValueError as error:
            raise InvalidArgument(f"{name!r} cannot name a kernel", hint="Use letters, digits, - _ and .") from error


def remove(name: str, *, user: bool = False, prefix: str | None = None) -> Path:
    """Remove the kernelspec of that name, if it is ours: the one that front ends find, or that of one place."""
    finder = KernelSpecManager(ensure_native_kernel=False)
    if user or prefix:
        finder.kernel_dirs = [str(_folder(finder, name, user=user, prefix=prefix).parent)]
    installed = finder.find_kernel_specs()
    folder = installed.get(name)
    if folder is None:
        ours = [known for known, place in installed.items() if _is_ours(Path(place))]
        raise InvalidArgument(
            f"no Jupyter kernel is named {name!r}", hint=f"Ours are: {', '.join(sorted(ours)) or 'none'}"
        )
    if not _is_ours(Path(folder)):
        raise InvalidArgument(f"{folder} is not a kernel of belljar's", hint="`jupyter kernelspec remove` removes any")
    return Path(finder.remove_kernel_spec(name))


def _folder(finder: KernelSpecManager, name: str, *, user: bool, prefix: str | None) -> Path:
    if user:
        return Path(finder.user_kernel_dir) / name
    return Path(prefix or "/usr/local") / "share/jupyter/kernels" / name


def _is_ours(folder: Path) -> bool:
    try:
        content = json.loads((folder / "kernel.json").read_bytes())
    except (OSError, ValueError):
        return False
    argv: Sequence[object] = content.get("argv") or []
    return "belljar" in argv and "kernel" in argv
