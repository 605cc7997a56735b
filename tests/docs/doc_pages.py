"""The pages of the documentation: their code blocks, their links, and the commands that they name."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)
_INLINE = re.compile(r"(?<!`)`(belljar [^`]+)`(?!`)")
_LINK = re.compile(r"!?\[(?:[^][]|\[[^][]*\])*\]\(([^)\s]+)\)")
_PIPES = frozenset({"|", "||", "&&", ";", "&", "(", ")"})
_REDIRECTIONS = frozenset({">", ">>", "<", "2>", "<<"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Snippet:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page that we wrote for readers, by its path."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in [*found, ROOT / "examples" / "README.md"])


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def snippets(*languages: str) -> list[Snippet]:
    return [snippet for page in pages() for snippet in _in_page(page) if snippet.language in languages]


def of_page(page: str, *languages: str) -> list[Snippet]:
    return [snippet for snippet in _in_page(page) if snippet.language in languages]


@cache
def _in_page(page: str) -> list[Snippet]:
    text = text_of(page)
    return [
        Snippet(
            page,
            text.count("\n", 0, block.start()) + 1,
            block["language"],
            re.sub(rf"^{block['indent']}", "", block["text"], flags=re.MULTILINE),
        )
        for block in _FENCE.finditer(text)
    ]


def links(page: str) -> list[str]:
    return _LINK.findall(_FENCE.sub("", text_of(page)))


def anchors(page: str) -> set[str]:
    """The names of headings, as forges make them."""
    headings = re.findall(r"^#+ +(.+)$", _FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def named_commands(page: str) -> list[str]:
    """What stands in the text between single backticks and begins with `belljar `."""
    return [command.replace("\n", " ") for command in _INLINE.findall(_FENCE.sub("", text_of(page)))]


def shell_text(snippet: Snippet) -> str:
    """The commands of a block; of a recording, the lines after its prompts."""
    if snippet.language != "console" and not snippet.text.startswith("$ "):
        return snippet.text
    lines = snippet.text.splitlines()
    kept: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("$ ") or (kept and before.endswith("\\")):
            kept.append(line.removeprefix("$ "))
    return "\n".join(kept) + "\n"


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without redirections; assignments before it included."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        skips = False
        for word in lexer:
            if word in _PIPES:
                yield words
                words = []
            elif word in _REDIRECTIONS:
                skips = True
            elif skips:
                skips = False
            else:
                words.append(word)
        yield words


def without_assignments(words: list[str]) -> list[str]:
    first = next((index for index, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    return words[first:]


def assigned(words: list[str]) -> list[str]:
    """The names of the variables that a command is given, or that `export` sets."""
    bare = words[1:] if words[:1] == ["export"] else words[: len(words) - len(without_assignments(words))]
    return [word.partition("=")[0] for word in bare if _ASSIGNMENT.match(word)]
