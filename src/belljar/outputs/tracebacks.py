"""Tracebacks as a model reads them: one line for each frame, without the server's paths.

IPython shows several lines of source around every frame and the whole path of every file. A model knows the code that
it sent, cannot change a library, and pays for each line; the structured answer, notebooks and people keep the whole.
Warnings are shortened in the same way where code printed them.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
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
_SOURCE = re.compile(r"\s*(?:-+> ?)?\d+(?: .*)?|\s*\(\.\.\.\).*")
_ARROW = re.compile(r"\s*-+> ?\d++ ?+(?P<code>.*)")
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


def short_traceback(lines: Sequence[str]) -> list[str]:
    """Return a traceback with one line for each frame; what is not in IPython's form stays as it is.

    Of an exception that came before the last one, in libraries alone, only the words are shown, and not even these if
    the last one has the same.
    """
    blocks: list[list[str]] = [[]]
    links: list[str] = []
    for line in lines:
        if link := _LINKS.get(line.strip()):
            links.append(link)
            blocks.append([])
        else:
            blocks[-1].append(line)
    *earlier, (last_frames, last_lines) = [_short_block(block) for block in blocks]
    last_text = "\n".join(last_lines)
    shown: list[str] = []
    for (frames, error_lines), link in zip(earlier, links, strict=True):
        is_inner = all(is_library for _, is_library in frames)
        message = "\n".join(error_lines).partition(": ")[2]
        if is_inner and message and message in last_text:
            continue
        shown += [*([] if is_inner else _folded(frames)), *error_lines, link]
    return [*shown, *_folded(last_frames), *last_lines]


def _short_block(lines: Sequence[str]) -> tuple[list[tuple[str, bool]], list[str]]:
    """Return the frames of one exception, each with whether it is a library's, and the lines that follow them."""
    frames: list[tuple[str, bool]] = []
    error_lines: list[str] = []
    rest = deque(lines)
    while rest:
        line = rest.popleft()
        if _RULE.fullmatch(line) or _HEADING.fullmatch(line) or _HIDDEN.fullmatch(line):
            continue
        if cell := _CELL.fullmatch(line):
            source = _take_source(rest)
            place = f"{cell['place']}{(cell['of'] or '').rstrip()}"
            frames.append((f"{place}: {source}" if source else place, False))
        elif file := _FILE.fullmatch(line):
            source = _take_source(rest)
            if _OURS not in file["path"]:
                frames.append(_frame(file, source))
        elif line or error_lines:
            error_lines.append(line)
    while error_lines and not error_lines[-1]:
        error_lines.pop()
    return frames, error_lines


def without_cell_file(error: str) -> str:
    """Return an error's words without the name that Python knows the cell by."""
    return _CELL_FILE.sub("", error)


def short_warnings(text: str) -> str:
    """Return printed text in which warnings name the cell, or the library's file without the folders above it."""
    text = _WARNED_CELL.sub(r"Cell In[\1], line \2: ", text)
    return _WARNED_FILE.sub(lambda found: f"{_LIBRARY.sub('', found['path'])}{found['said']}", text)


def _take_source(rest: deque[str]) -> str:
    """Remove the lines of source that follow a frame, and return the one that the arrow points at."""
    source = ""
    while rest and (not rest[0].strip() or _SOURCE.fullmatch(rest[0])):
        if not rest[0].strip() and len(rest) > 1 and not _SOURCE.fullmatch(rest[1]):
            break  # an empty line ends the frames
        line = rest.popleft()
        if arrow := _ARROW.fullmatch(line):
            source = arrow["code"].strip()
    return "" if source.startswith(_NO_SOURCE) else source


def _frame(file: re.Match[str], source: str) -> tuple[str, bool]:
    """Return the line for a frame in a file, and whether the file is a library's."""
    path, name = file["path"], (file["name"] or "").strip()
    of = f", in {name}" if name else ""
    if path.startswith(_OWN_CODE) and not _LIBRARY.match(path):
        line = f"{path}:{file['line']}{of}"
        return (f"{line}: {source}" if source else line), False
    short = _LIBRARY.sub("", path, count=1)
    if short.startswith("/"):  # neither installed nor the session's: the last folder says enough
        short = "/".join(short.split("/")[-2:])
    return f"{short}:{file['line']}{of}", True


def _folded(frames: Sequence[tuple[str, bool]]) -> Iterator[str]:
    """Yield the lines of frames; of a long row of library frames only the first and the last ones."""
    for is_library, row in groupby(frames, key=lambda frame: frame[1]):
        lines = [line for line, _ in row]
        if is_library and len(lines) > MAX_LIBRARY_FRAMES + 1:
            lines[1 : 1 - MAX_LIBRARY_FRAMES] = [f"... {len(lines) - MAX_LIBRARY_FRAMES} more library frames ..."]
        yield from lines
