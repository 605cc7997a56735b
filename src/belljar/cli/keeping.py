"""What a cell leaves for the person: figures it showed and files it wrote, in a folder that holds nothing else.

The code behind the glass chooses the names of its files, and many names are obeyed where they lie: `belljar.toml`,
`conftest.py`, `typer.py`. So they never go among the person's own files, nor where anything is started from. Hidden
ones, which shells and tools obey most, are not taken at all.
"""

import asyncio
import mimetypes
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path, PurePosixPath

from belljar.cli.streams import one_line
from belljar.errors import BelljarError, InvalidArgument
from belljar.files.transfer import safe_path
from belljar.files.workspace import Workspace
from belljar.handles import SessionHandle
from belljar.models import Display, FileReference, OutputEvent
from belljar.outputs.bundles import is_readable

_MEDIA = ("image/", "audio/", "video/", "application/pdf")
_PAGE = "text/html"
_TOLD_FILES = 20


def display_in(event: OutputEvent) -> Display | None:
    """The rich form of an output, if it has one; the plain form of a result is the event's own text."""
    value = event.data.get("display")
    if not isinstance(value, dict):
        return None
    display = Display.model_validate(value)
    return display.model_copy(update={"plain": event.text}) if event.text else display


def kept_forms(display: Display) -> list[Display]:
    """The forms of a rich output that are worth a file; none for a table that can be read in a terminal."""
    forms = [display, *display.also]
    pages = [form for form in forms if form.mime == _PAGE]
    media = [form for form in forms if form.mime.startswith(_MEDIA)]
    if media or is_readable(display.plain):
        return [*media, *pages] if media else []
    return pages or [form for form in forms if form.uri]


def check_folder(out: Path) -> Path:
    """Return a folder that a session's files may fill: one that is not there, or empty, and not where we are."""
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


class Keeper:
    """Collects what one cell shows, by a notebook's rules, and saves it in a folder when the cell is over."""

    def __init__(self, session: SessionHandle, out: Path) -> None:
        self._session = session
        self._out = out
        self._saved: list[str] = []
        self._left: list[str] = []
        self._figures: list[Display] = []
        self._is_clear_pending = False

    def notice(self, event: OutputEvent) -> None:
        """Take in the next event."""
        is_clear = event.kind == "clear"
        if (is_clear and not event.data.get("wait")) or (self._is_clear_pending and not is_clear):
            self._figures.clear()
        self._is_clear_pending = is_clear and bool(event.data.get("wait"))
        display = display_in(event)
        if display is not None and kept_forms(display):
            self._keep(display, is_update=bool(event.data.get("update")))

    def _keep(self, display: Display, *, is_update: bool) -> None:
        for place, shown in enumerate(self._figures):
            is_same = is_update and shown.display_id is not None and shown.display_id == display.display_id
            # A figure that is shown and is also the last expression comes twice, byte for byte.
            if is_same or (shown.uri is not None and shown.uri == display.uri):
                self._figures[place] = display
                return
        self._figures.append(display)

    async def save(self, files: Sequence[FileReference]) -> None:
        """Save the figures and files, and say on stderr where they are."""
        if not self._figures and not files:
            return
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            for figure in self._figures:
                await self._save_figure(figure)
        except OSError as error:
            raise InvalidArgument(
                f"{self._out} cannot be written: {error.strerror}", hint="Name another folder with --out"
            ) from error
        for file in files:
            await self._save_file(file.name)
        self._tell()

    async def _save_figure(self, figure: Display) -> None:
        stem = await asyncio.to_thread(_free_stem, self._out)
        for form in kept_forms(figure):
            path = self._out / (stem + _suffix(form))
            content = form.text.encode() if form.text is not None else await self._session.display(form.uri or "")
            try:
                await asyncio.to_thread(_write_new, path, content)
            except FileExistsError:
                continue  # two forms of one kind: the first is the better one
            self._saved.append(path.name)

    async def _save_file(self, name: str) -> None:
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            self._left.append(f"{name} is hidden")
            return
        target = str(safe_path(name))
        try:
            content = await self._session.download(name)
            await asyncio.to_thread(Workspace(self._out.resolve()).create, target, content)
        except FileExistsError:
            self._left.append(f"{target} exists already")
        except BelljarError as error:
            self._left.append(f"{name}: {error.message}")
        else:
            self._saved.append(target)

    def _tell(self) -> None:
        if self._saved:
            more = len(self._saved) - _TOLD_FILES
            names = ", ".join([*self._saved[:_TOLD_FILES], *([f"and {more} more"] if more > 0 else [])])
            _say(f"saved in {self._out}: {names}")
        for line in self._left[:_TOLD_FILES]:
            _say(f"not saved: {line}")
        if len(self._left) > _TOLD_FILES:
            _say(f"not saved: {len(self._left) - _TOLD_FILES} more files")


def _free_stem(folder: Path) -> str:
    """The first `figure-N` that no file has for its stem, whatever its kind."""
    taken = {path.stem for path in folder.glob("figure-*")}
    return next(stem for number in count(1) if (stem := f"figure-{number}") not in taken)


def _suffix(form: Display) -> str:
    if form.uri:
        return PurePosixPath(form.uri).suffix
    return mimetypes.guess_extension(form.mime) or ".txt"


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)


def _say(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)
