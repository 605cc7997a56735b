"""Files that commands save: figures and files of a cell, in a folder that holds nothing else; and files of `--output`.

The code in the sandbox chooses the names of its files, and many programs obey a file for its name: `belljar.toml`,
`conftest.py`, `typer.py`. So a cell's files are never saved among the person's own, nor in a folder that programs are
started from. Hidden files are not saved at all, because shells and tools obey those most.
"""

import asyncio
import base64
import errno
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from belljar.cli.streams import one_line
from belljar.errors import BelljarError, InvalidArgument
from belljar.files.transfer import safe_path
from belljar.files.workspace import Workspace
from belljar.models import Display, FileReference, OutputEvent
from belljar.outputs.forms import PAGE, PLAIN, extension_of, form_of, is_readable
from belljar.python.session_handle import SessionHandle
from belljar.sandboxes.data_path import container_note

_MAX_LISTED_FILES = 20
_MAX_FORMS = 3


def display_in(event: OutputEvent) -> Display | None:
    """Return the rich form of an output, if it has one, with the event's own text as its plain form."""
    display = event.display
    return display.model_copy(update={"plain": event.text}) if display is not None and event.text else display


def saved_forms(display: Display) -> list[Display]:
    """Return the forms of a rich output that are saved as files; none for a table that a terminal can show as text."""
    forms = [display, *display.also]
    pages = [form for form in forms if form.mime == PAGE]
    media = [form for form in forms if form_of(form.mime).is_media]
    if media or is_readable(display.plain):
        return [*media, *pages] if media else []
    return pages or [form for form in forms if form.uri]


def check_folder(out: Path) -> Path:
    """Return a folder that may take a session's files: new or empty, and not the working directory or above it."""
    place = out.expanduser().resolve()
    here = Path.cwd().resolve()
    if place == here or place in here.parents:
        raise InvalidArgument(
            f"{out} is the folder that you work in",
            hint="Name a new one: what the code calls its files must not count as yours",
        )
    try:
        is_free = not place.exists() or not any(place.iterdir())
    except OSError as error:
        raise InvalidArgument(f"{out} cannot be used: {error.strerror}", hint="Name another folder") from error
    if not is_free:
        raise InvalidArgument(
            f"{out} has files in it", hint="Name a new folder or an empty one: files of a session are kept apart"
        )
    return place


class FigureFiles:
    """Saves the figures of Jupyter outputs as they come, in a folder that holds nothing else; at most so many."""

    def __init__(self, folder: Path, most: int = 200) -> None:
        self._folder = folder
        self._left = most

    def save(self, bundle: Mapping[str, Any]) -> list[Path]:
        """Save what a terminal cannot show of one output, and return the files; none if it can be read as text."""
        media = [mime for mime in bundle if form_of(mime).is_media]
        wanted = media or ([PAGE] if PAGE in bundle and not is_readable(bundle.get(PLAIN)) else [])
        saved: list[Path] = []
        for mime in wanted[:_MAX_FORMS]:
            suffix, content = extension_of(mime), bundle[mime]
            if self._left <= 0 or not isinstance(content, str):
                continue
            try:
                is_binary = form_of(mime).is_binary
                data = base64.b64decode("".join(content.split()), validate=True) if is_binary else content.encode()
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{_free_stem(self._folder)}{suffix}"
                _write_figure(path, data)
            except (OSError, ValueError):
                continue  # what it holds is not what it says, or the disk is full; the text still names its kind
            self._left -= 1
            saved.append(path)
        return saved


class OutputSaver:
    """Collects the figures that one cell shows, and saves them and the cell's files in a folder after the cell.

    Figures are replaced and cleared by the same rules as in a notebook. `told_as` is what people know the folder by,
    where that is not its path here.
    """

    def __init__(self, session: SessionHandle, out: Path, *, told_as: str = "") -> None:
        self._session = session
        self._out = out
        self._told_as = told_as or f"{out}{container_note(out)}"
        self._saved: list[str] = []
        self._skipped: list[str] = []
        self._figures: list[Display] = []
        self._is_clear_pending = False

    def add(self, event: OutputEvent) -> None:
        """Record the next event."""
        is_clear = event.kind == "clear"
        if (is_clear and not event.data.get("wait")) or (self._is_clear_pending and not is_clear):
            self._figures.clear()
        self._is_clear_pending = is_clear and bool(event.data.get("wait"))
        display = display_in(event)
        if display is not None and saved_forms(display):
            self._add_figure(display, is_update=bool(event.data.get("update")))

    def _add_figure(self, display: Display, *, is_update: bool) -> None:
        for place, shown in enumerate(self._figures):
            is_same = is_update and shown.display_id is not None and shown.display_id == display.display_id
            # A figure that is displayed and is also the last expression arrives twice with the same bytes.
            if is_same or (shown.uri is not None and shown.uri == display.uri):
                self._figures[place] = display
                return
        self._figures.append(display)

    async def save(self, files: Sequence[FileReference]) -> None:
        """Save the figures and the files, and list them on stderr."""
        if not self._figures and not files:
            return
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            for figure in self._figures:
                await self._save_figure(figure)
        except OSError as error:
            raise InvalidArgument(
                f"{self._told_as} cannot be written: {error.strerror}", hint="Name another folder with --out"
            ) from error
        for file in files:
            await self._save_file(file.name)
        self._print_summary()

    async def _save_figure(self, figure: Display) -> None:
        stem = await asyncio.to_thread(_free_stem, self._out)
        for form in saved_forms(figure):
            path = self._out / (stem + _suffix(form))
            content = form.text.encode() if form.text is not None else await self._session.display(form.uri or "")
            try:
                await asyncio.to_thread(_write_figure, path, content)
            except FileExistsError:
                continue  # the figure has two forms with this suffix, and the first is the better one
            self._saved.append(path.name)

    async def _save_file(self, name: str) -> None:
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            self._skipped.append(f"{name} is hidden")
            return
        target = str(safe_path(name))
        try:
            content = await self._session.download(name)
            await asyncio.to_thread(Workspace(self._out.resolve()).create, target, content)
        except FileExistsError:
            self._skipped.append(f"{target} exists already")
        except BelljarError as error:
            self._skipped.append(f"{name}: {error.message}")
        else:
            self._saved.append(target)

    def _print_summary(self) -> None:
        if self._saved:
            more = len(self._saved) - _MAX_LISTED_FILES
            names = ", ".join([*self._saved[:_MAX_LISTED_FILES], *([f"and {more} more"] if more > 0 else [])])
            _print_line(f"saved in {self._told_as}: {names}")
        for line in self._skipped[:_MAX_LISTED_FILES]:
            _print_line(f"not saved: {line}")
        if len(self._skipped) > _MAX_LISTED_FILES:
            _print_line(f"not saved: {len(self._skipped) - _MAX_LISTED_FILES} more files")


def _free_stem(folder: Path) -> str:
    """Return the first `figure-N` that is not the stem of any file in the folder."""
    taken = {path.stem for path in folder.glob("figure-*")}
    return next(stem for number in count(1) if (stem := f"figure-{number}") not in taken)


def _suffix(form: Display) -> str:
    if form.uri:
        return PurePosixPath(form.uri).suffix
    return extension_of(form.mime, unknown=".txt")


def _write_figure(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)


def _print_line(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)


def write_file(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file that the person named, completely or not at all; replace an existing one only with `force`."""
    try:
        if force:
            _replace(path, content)
        else:
            _write_new(path, content)
    except FileExistsError as error:
        raise InvalidArgument(f"{path} exists already", hint="Name another file, or add --force") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}", hint="Name another file") from error


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _replace(path: Path, content: bytes) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    staged = path.parent / f".{secrets.token_hex(4)}.tmp"
    _write_new(staged, content)
    try:
        staged.replace(path)
    except OSError:
        staged.unlink()
        raise
