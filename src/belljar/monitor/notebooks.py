"""A session's notebook as a file in one of four forms, bounded as `session://…/notebook` is."""

from functools import partial
from pathlib import Path

from belljar.monitor.base import NotebookForm
from belljar.outputs.displays import read_display
from belljar.outputs.html import page_of
from belljar.outputs.markdown import ImageFiles, markdown_of
from belljar.outputs.notebook import written
from belljar.outputs.script import script_of
from belljar.sessions.history import bounded_notebook


def notebook_file(data_directory: Path, session_id: str, form: NotebookForm) -> bytes:
    """Return the file. Opens a connection of its own, so any thread may call it."""
    read = partial(read_display, data_directory / "sessions" / session_id / "displays")
    notebook = bounded_notebook(data_directory, session_id, read)
    match form:
        case "ipynb":
            text = written(notebook)
        case "html":
            text = page_of(notebook)
        case "md":
            text = markdown_of(notebook, ImageFiles(""))
        case "py":
            for cell in notebook.cells:
                cell.outputs = []
            text = script_of(notebook)
    return text.encode(errors="replace")
