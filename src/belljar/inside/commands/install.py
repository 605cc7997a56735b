"""`pip install` and `uv pip install` in a session: ask the host to install, because the session has no network.

Only requirements by name go to the host, which checks them again. Everything else that pip and uv can do is left to
the environment's own pip and uv, where it has them. The commands in `bin` run this file, and so does
`startup/sitecustomize.py` for `python -m pip` and `python -m uv`.
"""

import importlib.machinery
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "BELLJAR_PACKAGES"
PREFIX = "BELLJAR_PREFIX"

_COMMANDS = Path(__file__).resolve().parent
_HARMLESS = {
    *(
        "-q",
        "-qq",
        "-qqq",
        "--quiet",
        "-v",
        "-vv",
        "-vvv",
        "--verbose",
        "-y",
        "--yes",
        "--user",
        "--system",
        "--no-input",
    ),
    *("--no-cache-dir", "--no-cache", "-n", "--disable-pip-version-check", "--break-system-packages", "--no-color"),
    *("--prefer-binary", "--no-warn-script-location", "--no-python-version-warning", "--no-progress"),
    *("--root-user-action=ignore", "--progress-bar=off", "--no-warn-conflicts"),
}
_UPGRADES = {"-U", "--upgrade"}
# With these options pip and uv do not change the session's packages, so they may run themselves.
_NOT_OURS = {"-h", "--help", "-t", "--target", "--prefix", "--root", "--dry-run"}
_IMPORTS = """
import importlib, json, sys
errors = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors[name] = f"{type(error).__name__}: {error}"
sys.stderr.write("\\n" + json.dumps(errors))
"""


class InstallRefused(Exception):
    """The request cannot be passed to the host, or the host did not answer."""


def main(program: str, arguments: Sequence[str]) -> int:
    """Ask the host to install, or execute the environment's own program; return the exit status."""
    wanted = _install_arguments(program, arguments)
    if wanted is None or not is_for_host(program, arguments):
        return _run_real_program(program, arguments)
    try:
        return _print_answer(_ask(list(_requirements(wanted))))
    except InstallRefused as refusal:
        print(f"{program}: {refusal}", file=sys.stderr)
        return 2


def is_for_host(program: str, arguments: Sequence[str]) -> bool:
    """Return whether the call would change the session's packages, which only the host does."""
    if VARIABLE not in os.environ or _install_arguments(program, arguments) is None:
        return False
    # uv installs into the active virtual environment. pip needs no such test: a virtual environment has its own pip.
    active = os.environ.get("VIRTUAL_ENV") if program == "uv" else None
    return not active or os.path.realpath(active) == os.path.realpath(os.environ.get(PREFIX, ""))


def _install_arguments(program: str, arguments: Sequence[str]) -> "Sequence[str] | None":
    """Return the arguments after `install`; None when it is another call, or leaves the session's packages alone."""
    given = [argument for argument in arguments if argument not in _HARMLESS] if program == "pip" else list(arguments)
    subcommand = ["install"] if program == "pip" else ["pip", "install"]
    if given[: len(subcommand)] != subcommand or any(argument.partition("=")[0] in _NOT_OURS for argument in given):
        return None
    return given[len(subcommand) :]


def _requirements(arguments: Sequence[str]) -> Iterator[str]:
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if name in ("-r", "--requirement", "--requirements"):
            yield from _read(value if equals else next(left, ""))
        elif argument in _UPGRADES:
            print(
                "note: --upgrade is left out: a version that fits stays; ask for one, like 'name>=2'", file=sys.stderr
            )
        elif argument == "--progress-bar":
            next(left, None)
        elif argument.startswith("-") and argument not in _HARMLESS:
            raise InstallRefused(f"the option {argument} cannot be used in a session: name packages, like 'pandas>=2'")
        elif not argument.startswith("-"):
            yield argument


def _read(path: str) -> Iterator[str]:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            lines = file.read(1_000_000).replace("\\\n", " ").splitlines()
    except OSError as error:
        raise InstallRefused(f"{path or '-r'} cannot be read: {error.strerror}") from None
    for line in lines:
        requirement = line.partition(" #")[0].strip()
        if requirement.startswith("-"):
            raise InstallRefused(f"{path} has an option, which cannot be used in a session: {requirement}")
        if requirement and not requirement.startswith("#"):
            yield requirement


def _ask(requirements: "list[str]") -> "dict[str, Any]":
    if not requirements:
        raise InstallRefused("nothing to install: name at least one package")
    folder, name = os.path.split(os.environ[VARIABLE])
    here = os.open(".", os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            os.chdir(folder)  # because a UNIX socket's address holds 107 bytes, and the folder's path may be longer
            sock.connect(name)
            os.fchdir(here)
            sock.sendall(json.dumps({"requirements": requirements}).encode() + b"\n")
            with sock.makefile("rb") as answer:
                return json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise InstallRefused(f"the host did not answer: {error}") from None
    finally:
        os.close(here)


def _print_answer(answer: "dict[str, Any]") -> int:
    modules: list[str] = answer["modules"]
    for line in answer["lines"]:
        print(line)
    faults = _import(modules) if modules else {}
    for name, fault in faults.items():
        print(f"{name} is installed but does not import: {fault}", file=sys.stderr)
    for line in answer["errors"]:
        print(line, file=sys.stderr)
    return 1 if faults or answer["errors"] else 0


def _import(modules: "list[str]") -> "dict[str, str]":
    """Import the modules in a process of their own beside the kernel, and return the errors by module."""
    command = [sys.executable, "-c", _IMPORTS, *modules]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        return json.loads(process.stderr.rpartition(b"\n")[2])
    except ValueError:
        return {", ".join(modules): f"the interpreter ended with status {process.returncode}"}


def _run_real_program(program: str, arguments: Sequence[str]) -> int:
    command = _real_pip() if program == "pip" else _real_uv()
    if command:
        os.execv(command[0], [*command, *arguments])
    print(f"{program}: not here; '{'uv ' if program == 'uv' else ''}pip install NAME' works", file=sys.stderr)
    return 127


def _real_pip() -> "list[str]":
    spec = importlib.machinery.PathFinder.find_spec("pip")
    return [sys.executable, str(Path(spec.origin).parent)] if spec and spec.origin else []


def _real_uv() -> "list[str]":
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    others = [folder for folder in folders if Path(folder).resolve() != _COMMANDS / "bin"]
    found = shutil.which("uv", path=os.pathsep.join(others))
    return [found] if found else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
