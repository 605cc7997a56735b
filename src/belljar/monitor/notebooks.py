"""A session's notebook as a file in one of the formats of exports, bounded as `session://…/notebook` is."""

from functools import partial
from pathlib import Path

from belljar.outputs.displays import read_display
from belljar.outputs.export_formats import ExportFormat, export
from belljar.sessions.history import bounded_notebook


def notebook_file(data_directory: Path, session_id: str, form: ExportFormat) -> bytes:
    """Return the file. Opens a connection of its own, so any thread may call it."""
    read = partial(read_display, data_directory / "sessions" / session_id / "displays")
    return export(bounded_notebook(data_directory, session_id, read), form).encode(errors="replace")
