"""One session, from the journal to a file. Starts nothing and changes nothing but the file it writes."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from belljar.cli.files import write_file
from belljar.cli.pipes import put_out
from belljar.control import ask_sessions
from belljar.errors import InvalidArgument
from belljar.outputs.markdown import Album, markdown_of
from belljar.outputs.notebook import notebook_of, written
from belljar.outputs.pages import page_of
from belljar.outputs.percent import script_of
from belljar.sessions.archive import Archive, open_archive

_KERNEL = "kernel:"
_FORMS = {".ipynb": "ipynb", ".html": "html", ".htm": "html", ".py": "py", ".md": "md", ".markdown": "md"}


@dataclass(frozen=True, slots=True)
class Export:
    """What to export, and as what."""

    session: str
    output: str
    form: str | None = None
    has_outputs: bool | None = None
    limit_chars: int = 0
    runs_scripts: bool = False
    force: bool = False

    @property
    def path(self) -> Path | None:
        """The file to write; None for stdout."""
        return None if self.output == "-" else Path(self.output)


def export(data_directory: Path, chosen: Export) -> int:
    """Write the file and say so; the exit status."""
    form = _form_of(chosen)
    album = Album(f"{chosen.path.stem}_files" if chosen.path and form == "md" else "")
    _check_free(chosen, album)
    missing: list[str] = []
    with open_archive(data_directory) as archive:
        notebook = _notebook(archive, data_directory, chosen, missing)
    text = _rendered(notebook, form, chosen, album)
    if missing:
        print(f"warning: {len(missing)} displays are no longer on disk and left out", file=sys.stderr)
    if chosen.path is None:
        return put_out(text)
    write_file(chosen.path, text.encode(errors="replace"), force=chosen.force)
    _write_album(chosen.path.parent / album.folder, album, force=chosen.force)
    count = len(notebook.cells)
    print(f"saved {chosen.path}: {count} execution{'' if count == 1 else 's'}", file=sys.stderr)
    return 0


def _form_of(chosen: Export) -> str:
    if chosen.form is not None:
        return chosen.form
    if chosen.path is None:
        raise InvalidArgument("stdout has no name that says a format", hint="Add --format ipynb, html, py or md")
    suffix = chosen.path.suffix.lower()
    if suffix not in _FORMS:
        raise InvalidArgument(
            f"{chosen.path} has no ending that says a format", hint="Use .ipynb, .html, .py or .md, or add --format"
        )
    return _FORMS[suffix]


def _check_free(chosen: Export, album: Album) -> None:
    """Told before the work rather than after it."""
    if chosen.path is None or chosen.force:
        return
    taken = [chosen.path, *([chosen.path.parent / album.folder] if album.folder else [])]
    for path in taken:
        if os.path.lexists(path):
            raise InvalidArgument(f"{path} exists already", hint="Name another file, or add --force")


def _notebook(archive: Archive, data_directory: Path, chosen: Export, missing: list[str]) -> Any:
    entry = archive.find(chosen.session)
    read = archive.display_reader(entry.id)

    def noting(uri: str) -> bytes | None:
        content = read(uri)
        if content is None:
            missing.append(uri)
        return content

    cells = archive.cells(entry.id, is_live=cache(partial(_is_live, data_directory, entry.id)))
    kernel = entry.environment.removeprefix(_KERNEL) if entry.environment.startswith(_KERNEL) else ""
    return notebook_of(entry.id, cells, noting, kernel=kernel, limit_chars=chosen.limit_chars)


def _is_live(data_directory: Path, session_id: str) -> bool:
    """Whether a running server has the session; one that does not answer may."""
    found, silent = asyncio.run(ask_sessions(data_directory))
    return bool(silent) or any(info.session_id == session_id for _, _, info in found)


def _rendered(notebook: Any, form: str, chosen: Export, album: Album) -> str:
    has_outputs = chosen.has_outputs if chosen.has_outputs is not None else form != "py"
    if not has_outputs:
        for cell in notebook.cells:
            cell.outputs = []
    renderers: dict[str, Callable[[], str]] = {
        "ipynb": partial(written, notebook),
        "html": partial(page_of, notebook, runs_scripts=chosen.runs_scripts),
        "py": partial(script_of, notebook),
        "md": partial(markdown_of, notebook, album),
    }
    return renderers[form]()


def _write_album(folder: Path, album: Album, *, force: bool) -> None:
    if album.files:
        try:
            folder.mkdir(exist_ok=force)
        except OSError as error:
            raise InvalidArgument(f"{folder} cannot be made: {error.strerror}", hint="Name another file") from error
    for name, content in album.files.items():
        write_file(folder / name, content, force=force)
