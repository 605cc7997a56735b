"""The formats of an exported session: names, file endings, media types and writers. Whatever exports uses these."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from belljar.outputs.html import page_of
from belljar.outputs.markdown import ImageFiles, markdown_of
from belljar.outputs.notebook import written
from belljar.outputs.script import script_of

ExportFormat = Literal["ipynb", "html", "py", "md"]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What can be chosen of an export; an option that a format does not have changes nothing."""

    has_outputs: bool | None = None
    """With what cells said, or the code alone; None for what the format usually has."""
    runs_scripts: bool = False
    """Whether scripts of what cells showed run in the page."""
    images: ImageFiles | None = None
    """Collects the pictures that become files beside the text; None to embed them."""


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """How one format is named and written."""

    endings: tuple[str, ...]
    media_type: str
    write: Callable[[Any, ExportOptions], str]
    has_outputs: bool = True
    """Whether it usually has what cells said."""


EXPORT_FORMATS: Final[dict[ExportFormat, FormatInfo]] = {
    "ipynb": FormatInfo((".ipynb",), "application/x-ipynb+json", lambda notebook, _: written(notebook)),
    "html": FormatInfo(
        (".html", ".htm"),
        "text/html; charset=utf-8",
        lambda notebook, options: page_of(notebook, runs_scripts=options.runs_scripts),
    ),
    "py": FormatInfo(
        (".py",), "text/x-python; charset=utf-8", lambda notebook, _: script_of(notebook), has_outputs=False
    ),
    "md": FormatInfo(
        (".md", ".markdown"),
        "text/markdown; charset=utf-8",
        lambda notebook, options: markdown_of(notebook, options.images or ImageFiles()),
    ),
}


def format_named(name: str) -> ExportFormat | None:
    """Return the format of this name, if there is one."""
    return next((each for each in EXPORT_FORMATS if each == name), None)


def format_of_file(ending: str) -> ExportFormat | None:
    """Return the format of files with this ending, if there is one."""
    return next((name for name, info in EXPORT_FORMATS.items() if ending.lower() in info.endings), None)


def export(notebook: Any, form: ExportFormat, options: ExportOptions | None = None) -> str:
    """Return a notebook in a format. Removes the notebook's outputs, if they are not wanted."""
    info, options = EXPORT_FORMATS[form], options or ExportOptions()
    if not (info.has_outputs if options.has_outputs is None else options.has_outputs):
        for cell in notebook.cells:
            cell.outputs = []
    return info.write(notebook, options)
