"""`belljar run`: a file or a line of Python in a fresh session, from the command line to an exit status.

Stdout carries only what the code prints; belljar's own messages go to stderr.
"""

import asyncio
import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from belljar.cli.saved_outputs import OutputSaver, check_folder
from belljar.cli.streams import log_to_stderr
from belljar.cli.terminal import INTERRUPTED, OutputPrinter, StandardInput, exit_status, is_input_piped, on_sigint
from belljar.environments import prepare
from belljar.errors import InvalidArgument
from belljar.files.transfer import download_folder
from belljar.inside import FOLDER
from belljar.python.local import open_session
from belljar.python.session_handle import SessionHandle
from belljar.settings import Settings, load_command_settings
from belljar.settings.environments import KERNEL_PREFIX

# These prepare later sessions or earlier states, and a command has one session that only goes forward.
_SINGLE_SESSION = {"fork_start": False, "pool_size": 0, "checkpoints": 0, "hibernate": False}


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to run, and what to do with its results."""

    code: str
    out: Path | None
    """The folder for files; None for a new folder of the session below `download_directory`."""
    as_json: bool
    is_stdin_free: bool
    arguments: tuple[str, ...] = ("",)
    """What the code finds as `sys.argv`."""
    files: tuple[Path, ...] = ()
    """Files to copy into the session folder first."""
    out_told_as: str = ""
    """What people know `out` by, where that is not its path here: in a container that is started for them."""


def command(
    file: Annotated[str | None, typer.Argument(help="Python file to run; - reads the code from stdin.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="arg", help="Arguments of the code, as it finds them in sys.argv."),
    ] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="Run this code instead of a file.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New or empty folder for figures and files of the code; without it, a new one in download_directory."
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", metavar="PATH", help="Copy this file into the session folder first; repeatable."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Interrupt the code after this many seconds.")] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(help="namespace, container, gvisor, microvm, process, or one of an installed package."),
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Environment to run in.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs for it: all, or indices and uuids with commas.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
    out_told_as: Annotated[
        str, typer.Option(hidden=True, help="What people know --out by, where it is mounted into a container for them.")
    ] = "",
) -> None:
    """Run Python in a fresh session and save the figures it shows and the files it writes, apart from yours.

    Options stand before the file; what follows it is the code's own, and so is what is piped in. The exit status is the
    code's: sys.exit(n) gives n, an exception 1, a timeout 124, Ctrl-C 130, a crash 137.
    """
    flags = {"sandbox": sandbox, "environment": environment, "execution_timeout_s": timeout, "gpus": gpus}
    if code is not None and file is not None:  # as with Python's own -c
        arguments, file = [file, *(arguments or [])], None
    request = RunRequest(
        _read_code(file, code),
        out=out,
        as_json=as_json,
        is_stdin_free=file != "-",
        arguments=("-c" if code is not None else file or "", *(arguments or [])),
        files=tuple(files or ()),
        out_told_as=out_told_as,
    )
    raise typer.Exit(run(_single_session_settings(load_command_settings(flags)), request))


def _read_code(file: str | None, code: str | None) -> str:
    """Return the code from `-c`, from a file or from stdin; refuse none or two of them."""
    if code is not None:
        return code
    if file is None:
        raise InvalidArgument("belljar run takes either a file or -c CODE", hint="Use - to read the code from stdin")
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file or "").read_bytes()
    except OSError as error:
        hint = f"Code goes after -c: belljar run -c {shlex.quote(file)}" if _looks_like_code(file) else ""
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}", hint=hint) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error


def _looks_like_code(name: str) -> bool:
    return not name.endswith((".py", ".ipynb")) and any(sign in name for sign in " ()=+*'\"\n")


def _single_session_settings(settings: Settings) -> Settings:
    """Return the settings without what a single session does not need, unless the person set it."""
    return settings.model_copy(
        update={name: value for name, value in _SINGLE_SESSION.items() if name not in settings.model_fields_set}
    )


def run(settings: Settings, request: RunRequest) -> int:
    """Run the code to its end and return the exit status."""
    # Warnings are shown, for example that nothing is isolated; belljar's progress would only disturb the code's output.
    level = logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING
    log_to_stderr(level)
    try:
        return asyncio.run(_run(settings, request))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _run(settings: Settings, request: RunRequest) -> int:
    # Check the folder first, so that a wrong one is refused before the code runs.
    out = check_folder(request.out) if request.out is not None else None
    copies = [_read_file(path, settings.max_upload_bytes) for path in request.files]
    await prepare_environment(settings)
    async with open_session(settings=settings) as session:
        for name, content in copies:
            await session.upload(name, content)
        is_piped = request.is_stdin_free and is_input_piped()
        if is_piped or request.arguments != RunRequest.arguments:
            await _set_up(session, request.arguments, is_piped=is_piped)
        printer = OutputPrinter(session, is_quiet=request.as_json)
        folder = out or download_folder(settings.download_directory, session.id)
        saver = OutputSaver(session, folder, told_as=request.out_told_as)
        stream = session.stream(request.code, on_input=StandardInput().answer if request.is_stdin_free else None)
        with _interrupt_on_sigint(session):
            async for event in stream:
                saver.add(event)
                await printer.show(event)
        await printer.end(stream.result)
        if request.as_json:
            print(json.dumps(stream.result.model_dump(mode="json"), indent=2), flush=True)
        await saver.save(stream.result.files)
        return exit_status(stream.result)


async def _set_up(session: SessionHandle, arguments: tuple[str, ...], *, is_piped: bool) -> None:
    """Give the session its `sys.argv` and `sys.stdin`, in a cell that leaves no names behind."""
    source = (FOLDER / "script_input.py").read_text()
    call = f"scope['install']({[*arguments]!r}, is_piped={is_piped})"
    code = f"(lambda scope: (exec({source!r}, scope), {call}))({{'__name__': 'belljar_script'}});"
    result = await session.execute(code)
    if not result.success:
        raise InvalidArgument(
            f"the session cannot be given arguments and input: {result.error}", hint="Call it without them"
        )


def _read_file(path: Path, limit_bytes: int) -> tuple[str, bytes]:
    """Return the name and the content of a file that is to be copied in."""
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        hint = "Show whole folders with the setting `folders`" if isinstance(error, IsADirectoryError) else ""
        raise InvalidArgument(f"--file {path} cannot be read: {error.strerror}", hint=hint) from error
    if len(content) > limit_bytes:
        raise InvalidArgument(
            f"--file {path} has more than {limit_bytes:,} bytes",
            hint="Raise max_upload_bytes, or show its folder with the setting `folders`",
        )
    return path.resolve().name, content


async def prepare_environment(settings: Settings) -> None:
    """Make the default environment if the session needs it and it is missing, and show progress on stderr."""
    if settings.environment != "default" and not settings.environment.startswith(KERNEL_PREFIX):
        return
    is_terminal = sys.stderr.isatty()
    lines: list[str] = []

    def on_progress(line: str) -> None:
        # On a terminal uv draws its progress; elsewhere only the first line is printed, not a page of package names.
        if is_terminal or not lines:
            print(line, file=sys.stderr, flush=True)
        lines.append(line)

    await prepare(settings, show=is_terminal, on_progress=on_progress)


@contextlib.contextmanager
def _interrupt_on_sigint(session: SessionHandle) -> Generator[None]:
    """Interrupt the session's code on the first Ctrl-C, and cancel the current task, which ends it, on the second."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    interrupts: list[asyncio.Task[list[str]]] = []

    def on_signal() -> None:
        if not interrupts:
            interrupts.append(loop.create_task(session.interrupt()))
        elif main is not None:
            main.cancel()

    with on_sigint(on_signal):
        yield
