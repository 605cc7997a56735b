"""`belljar export`: everything a session ran, from its journal to a notebook, a page, a script or a text.

The command starts no session and changes nothing but the files it writes.
"""

import asyncio
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli.saved_outputs import write_file
from belljar.cli.streams import write_output
from belljar.control import ask_sessions
from belljar.errors import InvalidArgument
from belljar.journal.archive import Archive, open_archive
from belljar.outputs.export_formats import (
    EXPORT_FORMATS,
    ExportFormat,
    ExportOptions,
    ImageFiles,
    export,
    format_of_file,
)
from belljar.outputs.notebook import execution_count, notebook_of
from belljar.settings import load_command_settings
from belljar.settings.environments import KERNEL_PREFIX


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


_NAMES = _listed(EXPORT_FORMATS)
_ENDINGS = _listed(info.endings[0] for info in EXPORT_FORMATS.values())


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export, and in which format."""

    session: str
    output: str
    form: ExportFormat | None = None
    has_outputs: bool | None = None
    limit_chars: int = 0
    runs_scripts: bool = False
    force: bool = False

    @property
    def path(self) -> Path | None:
        """Return the file to write; None for stdout."""
        return None if self.output == "-" else Path(self.output)


def command(
    session: Annotated[str, typer.Argument(help="The session's id, or enough of its beginning.")],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help=f"File to write, {_ENDINGS}; - for stdout."),
    ],
    form: Annotated[
        ExportFormat | None,
        typer.Option("--format", help="Its format, where the name does not say."),
    ] = None,
    has_outputs: Annotated[
        bool | None,
        typer.Option("--outputs/--no-outputs", help="With what cells said, or the code alone; .py has it as comments."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Characters of text kept of one execution, from both ends; 0 for all.")
    ] = 1_000_000,
    runs_scripts: Annotated[
        bool, typer.Option("--scripts", help="Let scripts of what cells showed run in the page, sealed off.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    data_directory: Annotated[Path | None, typer.Option(help="Where the server keeps its sessions.")] = None,
) -> None:
    """Save everything a session ran, with its output.

    Works for sessions of running servers, for sleeping ones, and for those of a server that died. Outputs are on in
    every format but .py.
    """
    request = ExportRequest(
        session=session,
        output=output,
        form=form,
        has_outputs=has_outputs,
        limit_chars=limit,
        runs_scripts=runs_scripts,
        force=force,
    )
    raise typer.Exit(_export(load_command_settings({"data_directory": data_directory}).data_directory, request))


def _export(data_directory: Path, request: ExportRequest) -> int:
    """Write the file and return the exit status."""
    form = _form_of(request)
    album = ImageFiles(f"{request.path.stem}_files" if request.path and form == "md" else "")
    _check_free(request, album)
    missing: list[str] = []
    with open_archive(data_directory) as archive:
        notebook = _notebook(archive, data_directory, request, missing)
    options = ExportOptions(request.has_outputs, runs_scripts=request.runs_scripts, images=album)
    text = export(notebook, form, options)
    if missing:
        print(f"warning: {len(missing)} displays are no longer on disk and left out", file=sys.stderr)
    if request.path is None:
        write_output(sys.stdout, text)
        return 0
    write_file(request.path, text.encode(errors="replace"), force=request.force)
    _write_album(request.path.parent / album.folder, album, force=request.force)
    count = execution_count(notebook)
    print(f"saved {request.path}: {count} execution{'' if count == 1 else 's'}", file=sys.stderr)
    return 0


def _form_of(request: ExportRequest) -> ExportFormat:
    if request.form is not None:
        return request.form
    if request.path is None:
        raise InvalidArgument("stdout has no name that says a format", hint=f"Add --format {_NAMES}")
    form = format_of_file(request.path.suffix)
    if form is None:
        raise InvalidArgument(
            f"{request.path} has no ending that says a format", hint=f"Use {_ENDINGS}, or add --format"
        )
    return form


def _check_free(request: ExportRequest, album: ImageFiles) -> None:
    """Refuse to overwrite files before the session is read rather than after it."""
    if request.path is None or request.force:
        return
    taken = [request.path, *([request.path.parent / album.folder] if album.folder else [])]
    for path in taken:
        if os.path.lexists(path):
            raise InvalidArgument(f"{path} exists already", hint="Name another file, or add --force")


def _notebook(archive: Archive, data_directory: Path, request: ExportRequest, missing: list[str]) -> Any:
    entry = archive.find(request.session)
    read = archive.display_reader(entry.id)

    def read_display(uri: str) -> bytes | None:
        content = read(uri)
        if content is None:
            missing.append(uri)
        return content

    cells = archive.cells(entry.id, is_live=cache(partial(_is_live, data_directory, entry.id)))
    kernel = entry.environment.removeprefix(KERNEL_PREFIX) if entry.environment.startswith(KERNEL_PREFIX) else ""
    return notebook_of(entry.id, cells, read_display, kernel=kernel, limit_chars=request.limit_chars)


def _is_live(data_directory: Path, session_id: str) -> bool:
    """Return whether a running server has the session; a server that does not answer may have it."""
    found, silent = asyncio.run(ask_sessions(data_directory))
    return bool(silent) or any(info.session_id == session_id for _, _, info in found)


def _write_album(folder: Path, album: ImageFiles, *, force: bool) -> None:
    if album.files:
        try:
            folder.mkdir(exist_ok=force)
        except OSError as error:
            raise InvalidArgument(f"{folder} cannot be made: {error.strerror}", hint="Name another file") from error
    for name, content in album.files.items():
        write_file(folder / name, content, force=force)
