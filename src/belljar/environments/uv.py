"""Runs uv or conda's solver as a subprocess with captured output and a time limit, which ends when the server does.

The subprocess gets the server's environment variables, so that the user's index settings apply. It never writes to our
stdout, which may be an MCP connection. This module does not know what is installed or where. It also has the interface
of a uv that runs elsewhere than on the host; `provisioning.confined_uv` implements it for a sandbox.
"""

import codecs
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import anyio
import platformdirs
from anyio.abc import Process
from uv import find_uv_bin

from belljar.distribution import install_extra
from belljar.environments.base import Environment
from belljar.errors import EnvironmentBroken
from belljar.inside import FOLDER

SOLVER = FOLDER / "conda_solver.py"
GUARD = FOLDER / "kill_with_parent.py"
LANDLOCK = FOLDER / "landlock.py"
COMPILER = FOLDER / "compile_packages.py"
SIDE = ".uv-"
"""Prefix of the names of folders that uv has beside its working folder while it runs."""
EXTRA = install_extra("conda")
"""The command that installs rattler."""
_CERTIFICATE_CHOICES = ("UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "SSL_CERT_FILE", "SSL_CERT_DIR")
_CERTIFICATE_KEYS = {"system-certs", "native-tls"}
_CERTIFICATE_PLACES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Gentoo
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # Alpine
)
_CAPTURED_LIMIT = 1_000_000
_COMPLAINT_LIMIT = 20_000
_CHATTER = ("Using ", "Resolved ", "Downloading ", " Downloaded ", "Prepared ", "Audited ", "Checked ")


@dataclass(frozen=True, slots=True)
class UvAnswer:
    """uv's exit status and its output."""

    status: int
    output: str

    @property
    def complaint(self) -> str:
        """Return uv's error message, without the progress lines before it."""
        lines = self.output.strip().splitlines()
        start = next((number for number, line in enumerate(lines) if line.startswith("error:")), None)
        kept = lines[start:] if start is not None else [line for line in lines if not line.startswith(_CHATTER)]
        return "\n".join(kept).strip()[-_COMPLAINT_LIMIT:] or f"uv ended with status {self.status}"


class Uv(Protocol):
    """uv in the folder that it was opened for, on the host or in a sandbox."""

    async def __call__(self, arguments: Sequence[str], *, timeout_s: float) -> UvAnswer:
        """Run uv once. An installation calls this several times."""
        ...

    async def solve(self, request: str, *, timeout_s: float) -> UvAnswer:
        """Run conda's solver in the same place, on a request file in the folder. Called for environments of conda."""
        ...


OpenUv = Callable[[Environment, Path], AbstractAsyncContextManager[Uv]]
"""Opens uv for an environment and a working folder; no process of uv is left when the block has ended."""


@asynccontextmanager
async def open_uv_on_host(environment: Environment, folder: Path) -> AsyncGenerator[Uv]:
    """Open uv as a process of this server's user, with everything that this user can reach."""
    yield _UvOnHost(folder)


@dataclass(frozen=True, slots=True)
class _UvOnHost:
    folder: Path

    async def __call__(self, arguments: Sequence[str], *, timeout_s: float) -> UvAnswer:
        # The cache is inside the folder, so that what uv unpacks is measured and removed with the folder.
        own = {"UV_LINK_MODE": "hardlink", "UV_CACHE_DIR": str(self.folder / "cache")}
        return await run_uv(arguments, directory=self.folder, timeout_s=timeout_s, variables=own)

    async def solve(self, request: str, *, timeout_s: float) -> UvAnswer:
        return await run_solver(request, directory=self.folder, timeout_s=timeout_s)


def find_rattler() -> Path | None:
    """Return the folder of rattler, which comes with the extra `conda`, without importing it; None if it is missing."""
    found = find_spec("rattler")
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) if places else None


def check_rattler() -> Path:
    """Return the folder of rattler, or raise an error that says how to install it."""
    if rattler := find_rattler():
        return rattler
    raise EnvironmentBroken(
        "packages of conda are brought by rattler, which is missing",
        hint=f'Run: {EXTRA}; or make it of wheels: an environment.yml can be the file of kind = "managed" too',
    )


def solver_command(request: str, python: str = sys.executable) -> list[str]:
    """Return the command that solves a request file in the working directory."""
    return [python, "-I", str(SOLVER), str(check_rattler().parent), request]


async def run_solver(
    request: str,
    *,
    directory: Path,
    timeout_s: float,
    target: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    pass_fds: Sequence[int] = (),
) -> UvAnswer:
    """Solve and install packages of conda in a process of this server's user that can write to these folders only.

    It is confined because rattler follows paths that lead out of the target, and a package chooses its paths.
    """
    command = solver_command(request)
    if sys.platform == "linux":
        folders = [str(folder) for folder in (directory, target) if folder is not None]
        command = [sys.executable, "-I", str(LANDLOCK), *folders, "--", *command]
    return await _run_captured(
        command,
        directory=directory,
        timeout_s=timeout_s,
        on_line=on_line,
        pass_fds=pass_fds,
        variables={"TMPDIR": str(directory)},
    )


async def run_compiler(
    python: Path,
    folders: Sequence[str],
    *,
    niceness: int,
    directory: Path,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    pass_fds: Sequence[int] = (),
) -> UvAnswer:
    """Compile all packages in the folders with the Python that will import them; no code of theirs runs."""
    return await _run_captured(
        [str(python), "-I", "-S", str(COMPILER), str(niceness), *folders],
        directory=directory,
        timeout_s=timeout_s,
        on_line=on_line,
        pass_fds=pass_fds,
    )


def find_uv() -> str:
    """Return the uv binary that came with our dependency, or else one on the PATH."""
    try:
        return find_uv_bin()
    except FileNotFoundError as error:
        if found := shutil.which("uv"):
            return found
        raise EnvironmentBroken(
            "the uv binary is missing", hint="Reinstall it: pip install --force-reinstall uv"
        ) from error


async def run_uv(
    arguments: Sequence[str],
    *,
    directory: Path,
    timeout_s: float,
    show: bool = False,
    on_line: Callable[[str], None] | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> UvAnswer:
    """Run uv in a directory whose parents hold no project; with `show`, it writes to our stderr and is not captured."""
    return await _run_captured(
        [find_uv(), *([] if show else ["--color", "never"]), *arguments],
        directory=directory,
        timeout_s=timeout_s,
        show=show,
        on_line=on_line,
        pass_fds=pass_fds,
        variables={**certificate_variables(os.environ), **(variables or {})},
    )


def uv_files(variables: Mapping[str, str]) -> dict[str, Path]:
    """Return uv's configuration files, existing or not: the one that a variable names, or system's and user's."""
    if chosen := variables.get("UV_CONFIG_FILE"):
        return {"chosen": Path(chosen)}
    return {"system": Path("/etc/uv/uv.toml"), "user": platformdirs.user_config_path("uv") / "uv.toml"}


def certificate_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what makes uv trust the authorities that this system trusts, unless the user chose whom uv trusts.

    uv brings a list of its own, which a company's authority is not in; pip, curl and git use the system's.
    """
    if any(variables.get(name) for name in _CERTIFICATE_CHOICES) or not _has_certificates():
        return {}
    for file in uv_files(variables).values():
        with contextlib.suppress(OSError, ValueError):
            if _CERTIFICATE_KEYS & tomllib.loads(file.read_text("utf-8")).keys():
                return {}
    return {"UV_SYSTEM_CERTS": "1"}


def _has_certificates() -> bool:
    """Tell whether the system lists any authorities; a small image may have none, and then uv's own are the ones."""
    return sys.platform == "darwin" or any(Path(place).exists() for place in _CERTIFICATE_PLACES)


async def _run_captured(
    command: Sequence[str],
    *,
    directory: Path,
    timeout_s: float,
    show: bool = False,
    on_line: Callable[[str], None] | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> UvAnswer:
    # The server may be killed at any moment, and no process that fetches or compiles may outlive it: the guard kills
    # its process group when the other end of this pipe closes.
    lifeline, held = os.pipe()
    try:
        try:
            process = await anyio.open_process(
                [sys.executable, "-I", "-S", str(GUARD), str(lifeline), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if show else subprocess.PIPE,
                cwd=directory,
                start_new_session=True,
                pass_fds=(*pass_fds, lifeline),
                env={**os.environ, **variables} if variables else None,
                # Sessions of a server that runs as root are users of their own, and have to read what is made here.
                umask=0o022 if os.geteuid() == 0 else -1,
            )
        finally:
            os.close(lifeline)
        try:
            with anyio.fail_after(timeout_s):
                output = await listen(process.stderr, on_line) if process.stderr else ""
                return UvAnswer(await process.wait(), output)
        except TimeoutError:
            return stopped_after(timeout_s)
        finally:
            await _end(process)
    finally:
        os.close(held)


def stopped_after(timeout_s: float) -> UvAnswer:
    """Return the answer of a uv that was killed at its time limit."""
    return UvAnswer(-signal.SIGKILL, f"error: uv was stopped after {timeout_s:g} s")


async def listen(chunks: AsyncIterable[bytes], on_line: Callable[[str], None] | None = None) -> str:
    """Read uv's output to its end and return it, or the last million characters of it."""
    captured, line = "", ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for chunk in chunks:
        text = decoder.decode(chunk)
        captured = (captured + text)[-_CAPTURED_LIMIT:]
        *lines, line = (line + text).split("\n")
        if on_line:
            for complete in lines:
                on_line(complete.strip())
    return captured


def write_new(folder: Path, suffix: str, text: str) -> str:
    """Write a file that all can read, and return its name.

    The name is random, because whoever can write to the folder could put a link under a known one.
    """
    descriptor, path = tempfile.mkstemp(dir=folder, suffix=suffix)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - opens a descriptor
        os.fchmod(descriptor, 0o644)
        file.write(text)
    return Path(path).name


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with anyio.CancelScope(shield=True):
        await process.aclose()
