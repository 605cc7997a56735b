"""Files in a session's folder that belljar makes of what a cell showed: of its figures, and of long data: URIs.

They hold what the result shows, after the screens. Knows nothing of how a cell runs.
"""

import asyncio
import re
from contextlib import suppress

from belljar.errors import BelljarError
from belljar.executions.context import ExecutionContext
from belljar.executions.transcript import Transcript
from belljar.executions.working_folder import FileChanges, file_uri
from belljar.outputs.displays import extension_of, read_display

MAX_COMPARED = 16
_OURS = re.compile(r"figure-\d{1,9}\.\w{1,16}")


async def keep_uris(session: ExecutionContext, transcript: Transcript) -> None:
    """Make files of the data: URIs that the result has no room for, and say which."""
    for uri in transcript.summary.uris_left_out():
        if (content := uri.content()) is not None:
            with suppress(BelljarError):  # without room for it there is still the whole output
                name = await session.add_file("data", extension_of(uri.mime), content)
                transcript.notice(
                    f"the data: URI of {uri.chars:,} characters that was printed is the file {name}: "
                    f"{file_uri(session.id, name)}"
                )


async def keep_figures(session: ExecutionContext, transcript: Transcript, changes: FileChanges) -> None:
    """Make files of the figures that the cell showed, unless its code has saved as many pictures itself.

    A shown figure and a saved one differ in their margins, so their bytes do not tell which figure was saved.
    """
    summary = transcript.summary
    figures = {shown.uri: shown.mime for shown in summary.displays if shown.uri and shown.mime.startswith("image/")}
    if not figures or changes.pictures() >= len(figures):
        return
    with suppress(BelljarError):  # without room for them there are still the displays
        for uri, mime in figures.items():
            content = await asyncio.to_thread(read_display, session.displays, uri)
            if content is not None and not await asyncio.to_thread(_is_in, session, changes, content):
                name = await session.add_file("figure", extension_of(mime), content)
                summary.note_file(uri, file_uri(session.id, name))
    await changes.scan_again()


def _is_in(session: ExecutionContext, changes: FileChanges, content: bytes) -> bool:
    """Return whether a file that code made has this content, as where a cell shows a picture from the folder."""
    for name in changes.names_of_size(len(content))[:MAX_COMPARED]:
        with suppress(BelljarError):
            if not _OURS.fullmatch(name) and session.workspace.read(name, len(content)) == content:
                return True
    return False
