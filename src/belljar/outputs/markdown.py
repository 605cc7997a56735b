"""A session's notebook as Markdown. All output of cells is in fences that the output cannot close."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from belljar.outputs.mime_bundles import RASTER, Picture, picture_in, readable_text
from belljar.outputs.notebook import UNDONE
from belljar.outputs.terminal_text import as_plain, printable

_TICKS = re.compile("`+")


@dataclass(slots=True)
class ImageFiles:
    """Pictures that become files in a folder beside the text; without a folder they are embedded in the text."""

    folder: str = ""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def add(self, name: str, picture: Picture) -> str:
        """Add a picture and return its address. SVG stays in the text, because a file of it would run scripts."""
        suffix = RASTER.get(picture.mime)
        if not self.folder or suffix is None:
            return picture.uri
        self.files[name + suffix] = picture.content
        return f"{quote(self.folder)}/{name}{suffix}"


def markdown_of(notebook: Any, images: ImageFiles) -> str:
    """Return the text; pictures are added to `images`."""
    language = str(notebook.metadata.get("language_info", {}).get("name", ""))
    parts = [f"# belljar session `{notebook.metadata.belljar.session_id}`"]
    for number, cell in enumerate(notebook.cells, start=1):
        parts.append(f"## Cell {number}{_status(cell)}")
        parts.append(fenced(printable(cell.source.replace("\r\n", "\n")), language))
        for place, output in enumerate(cell.outputs, start=1):
            parts.append(_output(output, lambda picture, name=f"{number}-{place}": images.add(name, picture)))
    return "\n\n".join(filter(None, parts)) + "\n"


def fenced(text: str, language: str = "text") -> str:
    """Return text in a fence longer than any in it."""
    longest = max(map(len, _TICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"


def _status(cell: Any) -> str:
    notes = cell.metadata.get("belljar", {})
    statuses = [str(notes.get("status", "running")).replace("_", " ")]
    statuses += ["undone"] if UNDONE in cell.metadata.get("tags", []) else []
    shown = [status for status in statuses if status != "ok"]
    return f" ({', '.join(shown)})" if shown else ""


def _output(output: Any, add: Callable[[Picture], str]) -> str:
    match output.output_type:
        case "stream":
            return fenced(as_plain(output.text), "text") if output.text else ""
        case "error":
            return fenced(as_plain("\n".join(output.traceback) or f"{output.ename}: {output.evalue}"), "text")
        case _:
            if (picture := picture_in(output.data)) is not None:
                return f"![output]({add(picture)})"
            text, language = readable_text(output.data)
            return fenced(as_plain(text), language) if text else ""
