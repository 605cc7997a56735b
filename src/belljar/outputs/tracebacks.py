"""Tracebacks as models and people read them: libraries' frames are one line each, without the server's paths.

IPython shows several lines of source around every frame and the whole path of every file. A model knows the code that
it sent, cannot change a library, and pays for each line. A person wants the message and the lines of the cell, and the
rest when they ask for it; the structured answer and notebooks keep the whole.
Warnings are shortened in the same way where code printed them.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

MAX_LIBRARY_FRAMES = 4
"""The most library frames of a row that are shown: the first, and the last ones."""

_LINKS = {
    "The above exception was the direct cause of the following exception:": "which caused:",
    "During handling of the above exception, another exception occurred:": "and while that was handled:",
}
_RULE = re.compile(r"-{20,}")
_HEADING = re.compile(r"[\w.]+ {2,}Traceback \(most recent call last\)")
_CELL = re.compile(r"(?P<place>Cell In\[\d+\], line \d+)(?P<of>, in [^(]+)?(?:\(.*)?")
_FILE = re.compile(r"File (?P<path>.+?):(?P<line>\d+)(?:, in (?P<name>[^(]+)(?:\(.*)?)?", re.DOTALL)
# The arrow is as long as the number of the line leaves room for: `----> 1`, `> 13788`, `>137880`.
_SOURCE = re.compile(r"\s*(?:-*> ?)?\d+(?: .*)?|\s*\(\.\.\.\).*")
_ARROW = re.compile(r"\s*-*> ?\d++ ?+(?P<code>.*)")
_HIDDEN = re.compile(r"\s*\[\.\.\. skipping hidden \d+ frames?\]")
_OURS = "/belljar/inside/"
"""In the paths of our own files, which say nothing to who wrote the cell; IPython shows the last frame even so."""
_NO_SOURCE = "'Could not get source"
_LIBRARY = re.compile(
    r"\A.*?/(?:site-packages|dist-packages|lib/python3\.\d+)/(?:site-packages/|dist-packages/)?", re.DOTALL
)
_OWN_CODE = ("/mnt/data/", "~/", "/tmp/", "./")  # noqa: S108 - paths inside a sandbox
_WARNED_CELL = re.compile(r"^<ipython-input-(\d+)-[0-9a-f]+>:(\d+): ", re.MULTILINE)
_WARNED_FILE = re.compile(r"^(?P<path>/[^\s:]++)(?P<said>:\d++: \w*Warning: )", re.MULTILINE)
_CELL_FILE = re.compile(r" ?\(<ipython-input-\d+-[0-9a-f]+>, line \d+\)")


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a traceback; of a library's frame only the place is worth showing."""

    place: str
    is_library: bool
    code: str = ""
    """The line that ran, where its source was there."""
    source: tuple[str, ...] = ()
    """That line with those around it, numbered, as IPython shows them."""

    @property
    def line(self) -> str:
        """Return the frame as one line."""
        return f"{self.place}: {self.code}" if self.code and not self.is_library else self.place


@dataclass(frozen=True, slots=True)
class RaisedException:
    """An exception of a traceback: its frames, the lines with its name and words, and how it led to the next one."""

    frames: list[Frame]
    words: list[str]
    link: str = ""

    @property
    def is_inner(self) -> bool:
        """Return whether it was raised and handled in libraries alone."""
        return all(frame.is_library for frame in self.frames)


def raised_exceptions(lines: Sequence[str]) -> list[RaisedException]:
    """Return the exceptions of a traceback, the one that the cell ended with last.

    Of one that came before it, in libraries alone, there are only the words, and it is left out if the last one has
    the same words. Lines that are not in IPython's form are words.
    """
    blocks: list[tuple[list[str], str]] = []
    block: list[str] = []
    for line in lines:
        if link := _LINKS.get(line.strip()):
            blocks.append((block, link))
            block = []
        else:
            block.append(line)
    last = _exception(block, "")
    last_text = "\n".join(last.words)
    earlier: list[RaisedException] = []
    for block, link in blocks:
        raised = _exception(block, link)
        message = "\n".join(raised.words).partition(": ")[2]
        if raised.is_inner and message and message in last_text:
            continue
        earlier.append(replace(raised, frames=[]) if raised.is_inner else raised)
    return [*earlier, last]


def short_traceback(lines: Sequence[str]) -> list[str]:
    """Return a traceback with one line for each frame; what is not in IPython's form stays as it is."""
    shown: list[str] = []
    for raised in raised_exceptions(lines):
        shown += [each if isinstance(each, str) else each.line for each in folded_frames(raised.frames)]
        shown += [*raised.words, *filter(None, [raised.link])]
    return shown


def folded_frames(frames: Sequence[Frame]) -> Iterator[Frame | str]:
    """Yield frames; of a long row of library frames only the first and the last ones, with how many are left out."""
    for is_library, row in groupby(frames, key=lambda frame: frame.is_library):
        shown: list[Frame | str] = [*row]
        if is_library and len(shown) > MAX_LIBRARY_FRAMES + 1:
            shown[1 : 1 - MAX_LIBRARY_FRAMES] = [f"... {len(shown) - MAX_LIBRARY_FRAMES} more library frames ..."]
        yield from shown


def _exception(lines: Sequence[str], link: str) -> RaisedException:
    """Return one exception of the lines between two links."""
    frames: list[Frame] = []
    words: list[str] = []
    rest = deque(lines)
    while rest:
        line = rest.popleft()
        if _RULE.fullmatch(line) or _HEADING.fullmatch(line) or _HIDDEN.fullmatch(line):
            continue
        if cell := _CELL.fullmatch(line):
            place = f"{cell['place']}{(cell['of'] or '').rstrip()}"
            frames.append(Frame(place, False, *_take_source(rest)))
        elif file := _FILE.fullmatch(line):
            source = _take_source(rest)
            if _OURS not in file["path"]:
                frames.append(_frame(file, *source))
        elif line or words:
            words.append(line)
    while words and not words[-1]:
        words.pop()
    return RaisedException(frames, words, link)


def without_cell_file(error: str) -> str:
    """Return an error's words without the name that Python knows the cell by."""
    return _CELL_FILE.sub("", error)


def short_warnings(text: str) -> str:
    """Return printed text in which warnings name the cell, or the library's file without the folders above it."""
    text = _WARNED_CELL.sub(r"Cell In[\1], line \2: ", text)
    return _WARNED_FILE.sub(lambda found: f"{_LIBRARY.sub('', found['path'])}{found['said']}", text)


def _take_source(rest: deque[str]) -> tuple[str, tuple[str, ...]]:
    """Remove the lines of source that follow a frame; return the one that the arrow points at, and all of them."""
    code, source = "", list[str]()
    while rest and (not rest[0].strip() or _SOURCE.fullmatch(rest[0])):
        if not rest[0].strip() and len(rest) > 1 and not _SOURCE.fullmatch(rest[1]):
            break  # an empty line ends the frames
        line = rest.popleft()
        source += [line] if line.strip() else []
        if arrow := _ARROW.fullmatch(line):
            code = arrow["code"].strip()
    return ("", ()) if code.startswith(_NO_SOURCE) else (code, tuple(source))


def _frame(file: re.Match[str], code: str, source: tuple[str, ...]) -> Frame:
    """Return a frame in a file."""
    path, name = file["path"], (file["name"] or "").strip()
    of = f", in {name}" if name else ""
    if path.startswith(_OWN_CODE) and not _LIBRARY.match(path):
        return Frame(f"{path}:{file['line']}{of}", False, code, source)
    short = _LIBRARY.sub("", path, count=1)
    if short.startswith("/"):  # neither installed nor the session's: the last folder says enough
        short = "/".join(short.split("/")[-2:])
    return Frame(f"{short}:{file['line']}{of}", True)
