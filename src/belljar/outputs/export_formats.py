"""The formats of an exported session: names, file endings, media types and writers. Whatever exports uses these.

Python scripts and Markdown are written here. In a script (cells as `# %%`, as editors and jupytext read it) only the
code of cells becomes code: output is in comments, and so is code that Python itself could not parse. In Markdown all
output is in fences that the output cannot close.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import quote

from belljar.outputs.forms import SVG, Picture, form_of, picture_in, readable_text
from belljar.outputs.notebook import UNDONE, written
from belljar.outputs.terminal_text import as_plain, printable

ExportFormat = Literal["ipynb", "html", "py", "md"]
_NOT_PYTHON = ("%", "!", "?")
_TICKS = re.compile("`+")


@dataclass(slots=True)
class ImageFiles:
    """Pictures that become files in a folder beside the text; without a folder they are embedded in the text."""

    folder: str = ""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def add(self, name: str, picture: Picture) -> str:
        """Add a picture and return its address. SVG stays in the text, because a file of it would run scripts."""
        if not self.folder or picture.mime == SVG:
            return picture.uri
        suffix = form_of(picture.mime).ending
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


def script_of(notebook: Any) -> str:
    """Return the script. Its first two lines are ours, so that no cell can declare an encoding."""
    head = f"# Session {notebook.metadata.belljar.session_id}, exported by belljar.\n#\n"
    return head + "".join(map(_cell, notebook.cells))


def _cell(cell: Any) -> str:
    tags = cell.metadata.get("tags", [])
    title = '# %% tags=["undone", "skip-execution"]' if UNDONE in tags else "# %%"
    code = _commented(cell.source) if UNDONE in tags else as_python(cell.source)
    output = "\n".join(filter(None, map(_text_of, cell.outputs)))
    shown = f"# Output:\n{_commented(output)}\n" if output else ""
    return f"\n{title}\n{code}\n{shown}"


def as_python(code: str) -> str:
    """Return the code, with what only IPython understands in comments."""
    if _is_python(code):
        return code.rstrip("\n")
    if not code.lstrip().startswith("%%"):
        lines = code.split("\n")
        commented_magics = "\n".join(f"# {printable(line)}" if line.startswith(_NOT_PYTHON) else line for line in lines)
        if _is_python(commented_magics):
            return commented_magics.rstrip("\n")
    return _commented(code)


def _is_python(code: str) -> bool:
    try:
        compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _commented(text: str) -> str:
    # Split at every line end that Python or an editor knows: behind one that is left, the comment would go on as code.
    return "\n".join(f"# {printable(line)}".rstrip() for line in text.splitlines())


def _text_of(output: Any) -> str:
    match output.output_type:
        case "stream":
            text = output.text
        case "error":
            text = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        case _:
            text, _ = readable_text(output.data)
    return as_plain(text).rstrip("\n")


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


def _page(notebook: Any, options: ExportOptions) -> str:
    # Imported here, because every server knows the formats, and few write a page.
    from belljar.outputs.html import page_of

    return page_of(notebook, runs_scripts=options.runs_scripts)


EXPORT_FORMATS: Final[dict[ExportFormat, FormatInfo]] = {
    "ipynb": FormatInfo((".ipynb",), "application/x-ipynb+json", lambda notebook, _: written(notebook)),
    "html": FormatInfo(
        (".html", ".htm"),
        "text/html; charset=utf-8",
        _page,
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
