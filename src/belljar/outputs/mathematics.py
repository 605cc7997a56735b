"""Mathematics in LaTeX as MathML, which browsers draw by themselves; and Markdown, which may have some in it.

The LaTeX comes out of sessions and latex2mathml escapes nothing, so its elements are written anew here: known elements
and attributes with harmless values, and everything else as escaped text. What is long, defines commands of its own or
cannot be read stays as it was written.
"""

import importlib
import re
from functools import lru_cache
from html import escape, unescape
from typing import Any, Final

from belljar.outputs.terminal_text import printable

MAX_TEXT_CHARS: Final = 16_384
"""A longer text with formulas stays as it was written."""
MAX_FORMULA_CHARS: Final = 4_000
"""A longer formula does: one of this length takes up to half a second."""
MAX_FORMULAS: Final = 100
_MAX_MARKDOWN_CHARS: Final = 65_536
"""A character of Markdown takes 25 µs and, as HTML, up to sixty times its size."""
_ELEMENTS: Final = frozenset(
    (
        *("math", "menclose", "merror", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow"),
        *(
            "mspace",
            "msqrt",
            "mstyle",
            "msub",
            "msubsup",
            "msup",
            "mtable",
            "mtd",
            "mtext",
            "mtr",
            "munder",
            "munderover",
        ),
    )
)
_ATTRIBUTES: Final = frozenset(
    (
        *("accent", "accentunder", "columnalign", "columnlines", "columnspacing", "depth", "display", "displaystyle"),
        *("fence", "form", "height", "largeop", "linethickness", "lspace", "mathcolor", "mathvariant", "maxsize"),
        *("minsize", "movablelimits", "notation", "rowlines", "rowspacing", "rspace", "scriptlevel", "separator"),
        *("stretchy", "width"),
    )
)
# Lengths have two digits, so that nothing can be large enough to hide what is around it.
_LENGTH: Final = r"[+-]?\d{0,2}(?:\.\d{1,4})?(?:em|ex|pt|px|mu|%)?"
_VALUE: Final = re.compile(rf"[a-z][a-z -]{{0,40}}|#[0-9a-fA-F]{{3,6}}|{_LENGTH}(?: {_LENGTH}){{0,5}}")
_DEFINES: Final = re.compile(r"\\(?:(?:re|provide)?newcommand|def|let|DeclareMathOperator|newenvironment)(?![a-zA-Z])")
_DISPLAYED: Final = ("$$", "\\[", "\\begin")
_OPENINGS: Final = re.compile(r"\$\$|\$|\\\(|\\\[|\\begin\{([a-z]{1,16}\*?)\}|\\[\\$]")
_CLOSINGS: Final = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_WORDS: Final = re.compile(r"\\(?:text|math)(?:bf|it|rm|tt|sf)\{([^{}\\]{0,200})\}|\\([%&#_$ ])|\\\\|~")


def latex_html(text: str) -> str | None:
    """Return LaTeX, which may be words with formulas in them, as HTML; None where there is no formula to set."""
    if len(text) > MAX_TEXT_CHARS or _DEFINES.search(text):
        return None
    parts: list[str] = []
    count = done = place = 0
    absent: set[str] = set()
    while opening := _OPENINGS.search(text, place):
        place = opening.end()
        closing = rf"\end{{{opening[1]}}}" if opening[1] else _CLOSINGS.get(opening[0], "")
        end = text.find(closing, place) if closing and closing not in absent else -1
        if end < 0:
            absent.add(closing)
            continue
        is_displayed = opening[0].startswith(_DISPLAYED)
        # An environment is a part of the formula, the signs around others are not.
        formula = text[opening.start() : end + len(closing)] if opening[1] else text[place:end]
        parts += [_words(text[done : opening.start()]), formula_html(formula, is_displayed=is_displayed)]
        done = place = end + len(closing)
        count += 1
        if count > MAX_FORMULAS:
            return None
    return "".join([*parts, _words(text[done:])]) if count else None


def _words(text: str) -> str:
    """Return the words between formulas: what LaTeX escapes as itself, the rest as it is."""
    return escape(printable(_WORDS.sub(lambda found: found[1] or found[2] or " ", text)))


def formula_html(formula: str, *, is_displayed: bool) -> str:
    """Return one formula as MathML; as it was written where it cannot be read."""
    set_formula = _mathml(formula.strip(), "block" if is_displayed else "inline")
    return set_formula or f"<code>{escape(printable(formula))}</code>"


@lru_cache(maxsize=256)
def _mathml(formula: str, display: str) -> str | None:
    if not formula or len(formula) > MAX_FORMULA_CHARS or _DEFINES.search(formula):
        return None
    # It takes 0.1 s to import, and is untyped.
    converter: Any = importlib.import_module("latex2mathml.converter")
    try:
        return _written(converter.convert_to_element(formula, display=display))
    except Exception:  # noqa: BLE001 - on hostile text the library raises anything, RecursionError too
        return None


def _written(element: Any) -> str:
    """Return an element of MathML with what is in it, as far as both are known."""
    inside = _text(element.text) + "".join(_written(child) + _text(child.tail) for child in element)
    if element.tag not in _ELEMENTS:
        return inside
    attributes = "".join(
        f' {name}="{escape(value)}"'
        for name, value in element.attrib.items()
        if name in _ATTRIBUTES and _VALUE.fullmatch(value)
    )
    return f"<{element.tag}{attributes}>{inside}</{element.tag}>"


def _text(text: str | None) -> str:
    # The library gives signs as references to characters.
    return escape(printable(unescape(text))) if text else ""


# Markdown


def markdown_html(text: str) -> str:
    """Return Markdown as HTML, its mathematics set; HTML in it stays text. What is too long is shown as it is."""
    if len(text) > _MAX_MARKDOWN_CHARS:
        return f"<pre>{escape(printable(text))}</pre>"
    markdown: Any = (
        importlib.import_module("markdown_it")
        .MarkdownIt("commonmark", {"html": False, "linkify": False, "maxNesting": 40})
        .enable("table")
    )
    markdown.inline.ruler.before("escape", "mathematics", _take_formula)
    markdown.add_render_rule("mathematics", _render_formula)
    return str(markdown.render(printable(text)))


def _take_formula(state: Any, silent: bool) -> bool:
    """Read `$…$` or `$$…$$`, as Jupyter has them; two prices in a line are no formula."""
    source, start = state.src, state.pos
    if source[start] != "$" or len(state.env.setdefault("formulas", [])) >= MAX_FORMULAS:
        return False
    mark = "$$" if source.startswith("$$", start) else "$"
    first = start + len(mark)
    end = source.find(mark, first, first + MAX_FORMULA_CHARS)
    formula = source[first:end] if end > 0 else ""
    after = source[end + len(mark) : end + len(mark) + 1]
    if not formula.strip() or "`" in formula or (mark == "$" and (formula != formula.strip() or after.isdecimal())):
        return False
    if not silent:
        state.env["formulas"].append(formula)
        token = state.push("mathematics", "", 0)
        token.content, token.markup = formula, mark
    state.pos = end + len(mark)
    return True


def _render_formula(_: Any, tokens: Any, place: int, *__: Any) -> str:
    token = tokens[place]
    return formula_html(token.content, is_displayed=token.markup == "$$")
