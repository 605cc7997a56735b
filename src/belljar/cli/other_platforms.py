"""`belljar serve`, `run` and `doctor` on a Mac or on Windows, where sessions cannot be sealed off natively.

They start the Linux container, if docker or podman answers, and say in two lines what to do if neither does. This
module and what it imports do without the modules that only Linux has; `cli/__init__.py` imports it instead of theirs.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from belljar.cli.findings import HostFinding, print_findings
from belljar.cli.install import START_ENGINE, container_command, find_engine
from belljar.errors import InvalidArgument, SandboxUnavailable
from belljar.sandboxes.container.engines import ContainerEngine, EngineSilent, ask, find_engines
from belljar.settings import Settings, load_command_settings

_PORT = 8000
_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - which nobody can reach by that name
_FILES = "/files"
"""Where files of this machine that settings name are seen in the container."""
_HERE_ONLY = ("BELLJAR_DATA_DIRECTORY", "BELLJAR_CONTAINER_IMAGE", "BELLJAR_HTTP", "BELLJAR_DOWNLOAD_DIRECTORY")
"""Variables that mean something on this machine only."""
_GET_ENGINE = f"{START_ENGINE}; or use belljar in WSL2 or Lima, or a server elsewhere: belljar.connect(URL)"
_NO_SESSIONS = "`belljar serve` and `belljar run` cannot start; `install`, `config`, `key` and belljar.connect can"


# The commands


def serve_command(
    http: Annotated[str | None, typer.Option(help="HOST:PORT to serve over HTTP; stdio without it.")] = None,
    environment: Annotated[str | None, typer.Option(help="Environment of sessions.")] = None,
    surface: Annotated[list[str] | None, typer.Option(help="Surface to serve; repeatable.")] = None,
    mcp_config: Annotated[Path | None, typer.Option(help="File that lists the MCP servers of the toolbox.")] = None,
    policy: Annotated[Path | None, typer.Option(help="File of guardrails: what tools and code are allowed.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Serve MCP over stdio, or over HTTP with --http HOST:PORT.

    Here it starts the Linux container of belljar, with docker or podman.
    """
    variables = {
        "ENVIRONMENT": environment or "",
        "SURFACES": ",".join(surface or []),
        "LOG_LEVEL": log_level or "",
    }
    options = [word for name, value in variables.items() if value for word in ("-e", f"BELLJAR_{name}={value}")]
    for name, file in {"MCP_CONFIG": mcp_config, "POLICY": policy}.items():
        if file is not None:
            options += _shared_file(name, file)
    if http is not None:
        address = _address(http)
        options += ["-p", f"{address}:{_PORT}", "-e", f"BELLJAR_HTTP=0.0.0.0:{_PORT}"]
        if not os.environ.get("BELLJAR_PUBLIC_URL"):
            # The server cannot know at which address of this machine it is reached.
            host, _, port = address.rpartition(":")
            name = "localhost" if host in _WILDCARDS else host
            options += ["-e", f"BELLJAR_PUBLIC_URL=http://{name}:{port}"]
    raise typer.Exit(_start([*_forwarded(), *options], ["container"]))


def run_command(
    file: Annotated[str | None, typer.Argument(help="Python file to run; - reads the code from stdin.")] = None,
    argv: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="What the code finds in sys.argv.")] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="Run this code instead of a file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="New or empty folder for figures and files of the code; without it, a new one.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Interrupt the code after this many seconds.")] = None,
    environment: Annotated[str | None, typer.Option(help="Environment to run in.")] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--file", help="File to copy into the session; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Run Python in a fresh session and save the figures it shows and the files it writes, apart from yours.

    Here it does so in the Linux container of belljar, with docker or podman; the code cannot read stdin.
    """
    if code is not None and file is not None:  # as with Python's own -c
        argv, file = [file, *(argv or [])], None
    text = _read_code(file, code)
    folder = _new_folder(out)
    arguments = ["run", "--out", "/out", "--out-told-as", str(folder), *(["--json"] if as_json else [])]
    arguments += ["--timeout", f"{timeout:g}"] if timeout is not None else []
    arguments += ["--environment", environment] if environment else []
    mounts: list[str] = []
    for given in files or ():
        if not given.is_file():
            raise InvalidArgument(f"{given} is no file", hint="Give --file the path of a file")
        mounts += ["-v", f"{given.absolute()}:{_FILES}/{given.name}:ro"]
        arguments += ["--file", f"{_FILES}/{given.name}"]
    arguments += ["-", *(argv or [])]
    # The container's user is an ordinary one, whom not every engine takes for the owner of this folder.
    folder.chmod(0o777)
    try:
        status = _start([*_forwarded(), *mounts, "-v", f"{folder}:/out"], arguments, text)
    finally:
        folder.chmod(0o755)
        if not any(folder.iterdir()):
            folder.rmdir()
    raise typer.Exit(status)


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what this host can do.

    Sessions run in a Linux container here; `belljar doctor` in it says what that gives.
    """
    settings = load_command_settings()
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    detail = f"{system}: sessions run in a Linux container"
    findings = [
        HostFinding("host", "ok", "system", detail),
        HostFinding("host", "ok", "python", f"{platform.python_version()} at {sys.executable}"),
        *_engine_findings(settings),
    ]
    raise typer.Exit(print_findings(findings, as_json=as_json))


# The engine


def _has_image(engine: ContainerEngine, image: str) -> bool:
    try:
        ask(engine.command("image", "inspect", image))
    except EngineSilent:
        return False
    return True


def _engine_findings(settings: Settings) -> list[HostFinding]:
    engines = [*find_engines("auto", first="docker")]
    found = [
        HostFinding("container", "ok", engine.kind, f"{engine.version}, {engine.program}")
        if isinstance(engine, ContainerEngine)
        else HostFinding("container", "warn", *engine)
        for engine in engines
    ]
    answering = next((engine for engine in engines if isinstance(engine, ContainerEngine)), None)
    if answering is None:
        detail = "neither docker nor podman answers"
        return [*found, HostFinding("container", "fail", "engine", detail, _GET_ENGINE, _NO_SESSIONS)]
    image = settings.container_image
    if _has_image(answering, image):
        return [*found, HostFinding("container", "ok", "image", image)]
    hint = _build_hint(answering, image)
    return [*found, HostFinding("container", "fail", "image", f"{image} is not there", hint, _NO_SESSIONS)]


def _build_hint(engine: ContainerEngine, image: str) -> str:
    return f"{engine.kind} build -t {image} . (in a checkout of belljar), or set container_image to an image of yours"


def _start(options: Sequence[str], arguments: Sequence[str], text: str | None = None) -> int:
    """Run the container to its end, with `text` or our own stdin as its input; return its exit status."""
    engine = find_engine(reason=f"sessions need Linux, this is {sys.platform}, and ", hint=_GET_ENGINE)
    image = load_command_settings().container_image
    if not _has_image(engine, image):
        raise SandboxUnavailable(f"{engine.kind} has no image {image}", hint=_build_hint(engine, image))
    # The command that `install --docker` writes has what the engine must allow for sealed sessions.
    _, *command = container_command(image, [], engine=engine)
    command[command.index(image) :] = [*options, image, *arguments]
    if "-p" in options:
        # A container that nobody writes to serves HTTP.
        command.remove("-i")
    try:
        return subprocess.run([engine.program, *command], input=text, text=True, check=False).returncode
    except KeyboardInterrupt:
        return 130


# What of this machine is seen in the container


def _forwarded() -> list[str]:
    """Return the options that pass our settings on; the engine reads their values from our variables."""
    names = [name for name in os.environ if name.startswith("BELLJAR_") and name not in _HERE_ONLY]
    return [word for name in sorted(names) for word in ("-e", name)]


def _shared_file(name: str, file: Path) -> list[str]:
    path = file.expanduser().absolute()
    if not path.is_file():
        raise InvalidArgument(f"{path} is no file", hint=f"Give the path of the file for {name.lower()}")
    inside = f"{_FILES}/{name.lower()}{path.suffix}"
    return ["-v", f"{path}:{inside}:ro", "-e", f"BELLJAR_{name}={inside}"]


def _address(http: str) -> str:
    host, _, port = http.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise InvalidArgument(f"{http[:200]} is no HOST:PORT", hint="Say --http 127.0.0.1:8000")
    return f"{host or '127.0.0.1'}:{port}"


def _read_code(file: str | None, code: str | None) -> str:
    if (file is None) == (code is None):
        raise InvalidArgument("belljar run takes either a file or -c CODE", hint="Use - to read the code from stdin")
    if code is not None:
        return code
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file or "").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from error


def _new_folder(out: Path | None) -> Path:
    """Return a new or empty folder: the one that was named, or one below `download_directory`.

    Never among the person's own files, because code chooses the names in it.
    """
    above = load_command_settings().download_directory
    try:
        if out is None:
            above.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="run-", dir=above))
        folder = out.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{out or above} cannot be written: {error.strerror}") from error
    if any(folder.iterdir()):
        raise InvalidArgument(f"{folder} is not empty", hint="Give a new folder, or an empty one")
    return folder
