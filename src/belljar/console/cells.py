"""The output of a cell as blocks of a page: text, errors, pictures, frames; whole, or one event after another.

One renderer serves the first look at a page and the changes of a page that is open. All of it is text of a session, so
nothing gets into our document but escaped text and the addresses of pictures and frames, which are made of ids of ours.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby, takewhile
from typing import Any, Final, Literal

from belljar.console.templating import markup
from belljar.json_values import check_values
from belljar.models import Display, OutputEvent
from belljar.outputs.forms import DRAWN, FRAMED, LATEX, PAGE, READ, WIDGET, display_id_of, form_of, is_readable
from belljar.outputs.html import LEAST_PIXELS, MAX_PIXELS, frame_height, highlighted, traceback_html
from belljar.outputs.mathematics import latex_html
from belljar.outputs.spoofed_notices import StreamDisarmer
from belljar.outputs.tables import table_html, table_in
from belljar.outputs.terminal_text import as_plain, coloured, printable

_CONTROLS: Final = re.compile("[\x08\r\x1b\x9b]")
_MAX_ALT_CHARS: Final = 200
# Of a taller text, 20 lines are shown at first; on a screen of 320 pixels a line has 36 characters.
_TALL_CHARS, _TALL_LINES = 2_400, 30
# A block that has grown beyond this is followed by another one, so that a change never sends more than this again.
_MAX_BLOCK_CHARS: Final = 8_000

BlockKind = Literal["text", "error", "picture", "frame", "table", "formulas", "left-out", "file"]
Fold = Literal["", "beginning", "end", "hidden"]
"""What is shown of a text at first: all, its first lines, its last lines, nothing."""


@dataclass(frozen=True, slots=True)
class PageContent:
    """What there is to know of a page that a cell showed, before it is shown."""

    has_script: bool = True
    table: Any = None
    """The page as a table, in markup of ours; None for a page that is no plain table."""


ReadPage = Callable[[str, str], PageContent]
"""Tells of the stored page of an execution, by its name."""


def page_content(text: str) -> PageContent:
    """Return what there is to know of a page."""
    table = table_in(text)
    return PageContent("<script" in text.lower(), None if table is None else markup(table_html(table, can_sort=True)))


def is_tall(text: str) -> bool:
    """Return whether only the beginning of a text is shown until somebody wants all of it."""
    return len(text) > _TALL_CHARS or text.count("\n") > _TALL_LINES


@dataclass(slots=True)
class OutputBlock:
    """One piece of a cell's output."""

    id: str
    kind: BlockKind
    execution_id: str
    stream: str = ""
    text: str = ""
    src: str = ""
    alt: str = ""
    frame_src: str = ""
    """The page beside a picture, which a person may ask for."""
    has_script: bool = False
    height: int = LEAST_PIXELS
    size: int = 0
    is_widget: bool = False
    display: str = ""
    """A key for displays that later output may update."""
    saves: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """The forms of a figure that can be saved: what a menu calls them, their addresses, names for their files."""
    table: Any = None
    fold: Fold = ""
    lines: int = 0
    """How many lines unfolding it shows."""
    whole: str = ""
    """Where the page gets all of the output, to show it in place of what was left out."""

    @property
    def html(self) -> Any:
        """Return its text as escaped HTML, with the colours that it had in a terminal."""
        if self.table is not None:
            return self.table
        if self.kind == "formulas":
            return markup(latex_html(self.text) or f"<pre>{coloured(self.text)}</pre>")
        return markup(traceback_html(self.text.split("\n")) if self.kind == "error" else coloured(self.text))


@dataclass(frozen=True, slots=True)
class RenderStep:
    """One change of the blocks of a cell."""

    kind: Literal["append", "replace", "text", "clear", "update"]
    block: OutputBlock | None = None
    text: str = ""


@dataclass(slots=True)
class RenderedOutput:
    """The blocks of one cell. `count` is its number, for those who cannot see its figures."""

    execution_id: str
    read_page: ReadPage
    count: int = 0
    blocks: list[OutputBlock] = field(default_factory=list[OutputBlock])
    updates: dict[str, OutputBlock] = field(default_factory=dict[str, OutputBlock])
    """The latest of displays that stand in earlier cells."""
    sequence: int = 0
    """The number of the latest event that is in the blocks."""
    _is_clear_pending: bool = False
    _figures: int = 0
    _disarmer: StreamDisarmer = field(default_factory=StreamDisarmer)

    def add_all(self, events: Iterable[OutputEvent]) -> None:
        """Add events whose single changes nobody wants."""
        for event in events:
            self.add(event)

    def add(self, event: OutputEvent) -> list[RenderStep]:
        """Add the next event; return what changes."""
        self.sequence = max(self.sequence, event.sequence)
        if event.kind == "clear":
            self._is_clear_pending = bool(event.data.get("wait"))
            return [] if self._is_clear_pending else self._clear()
        before = self._clear() if self._is_clear_pending else []
        return [*before, *self._add(event)]

    def _clear(self) -> list[RenderStep]:
        self._is_clear_pending = False
        self.blocks = []
        return [RenderStep("clear")]

    def _add(self, event: OutputEvent) -> list[RenderStep]:
        match event.kind:
            case "stdout" | "stderr":
                return self._add_text(event.kind, self._disarmer.feed(event.text), event.sequence)
            case "notice" if event.sequence == 0:
                return self._append(self._block(event, "left-out", text=event.text.strip()))
            case "notice":
                self._disarmer.notice()
                return self._add_text("notice", event.text, event.sequence)
            case "input":
                return self._add_text("input", f"{event.text}\n", event.sequence)
            case "error":
                return self._append(self._block(event, "error", text="\n".join(event.traceback or [event.text])))
            case _:
                return self._add_display(event)

    def _add_text(self, stream: str, text: str, sequence: int) -> list[RenderStep]:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != "text" or last.stream != stream or len(last.text) > _MAX_BLOCK_CHARS:
            return self._append(
                OutputBlock(self._id(sequence), "text", execution_id=self.execution_id, stream=stream, text=text)
            )
        is_plain = not (_CONTROLS.search(text) or _CONTROLS.search(last.text))
        last.text += text
        return [RenderStep("text", last, text)] if is_plain else [RenderStep("replace", last)]

    def _append(self, block: OutputBlock) -> list[RenderStep]:
        self.blocks.append(block)
        return [RenderStep("append", block)]

    def _id(self, sequence: int) -> str:
        # What was left out has no number of its own.
        return f"o-{self.execution_id}-{sequence or f'cut{len(self.blocks)}'}"

    def _block(self, event: OutputEvent, kind: BlockKind, **values: Any) -> OutputBlock:
        return OutputBlock(self._id(event.sequence), kind, execution_id=self.execution_id, **values)

    # Displays

    def _add_display(self, event: OutputEvent) -> list[RenderStep]:
        block = self._display_block(event)
        if (display_id := display_id_of(event)) is not None:
            block.display = hashlib.sha256(display_id.encode(errors="replace")).hexdigest()[:16]
            if event.data.get("update"):
                shown = [place for place, one in enumerate(self.blocks) if one.display == block.display]
                for place in shown:
                    self.blocks[place] = replace(block, id=self.blocks[place].id)
                if not shown:
                    self.updates[block.display] = block
                return [RenderStep("update", block)]
        return self._append(block)

    def _display_block(self, event: OutputEvent) -> OutputBlock:
        display = event.display
        if display is None:
            return self._text_block(event, event.text)
        forms = {form.mime: form for form in (display, *display.also)}
        picture = next((mime for mime in DRAWN if mime in forms), None)
        framed = next((mime for mime in FRAMED if mime in forms), None)
        plain = event.text or display.plain or ""
        if picture is not None:
            return self._picture(event, picture, forms, plain)
        if framed is not None:
            return self._frame(event, forms[framed], plain)
        latex = forms.get(LATEX)
        if latex is not None and latex.text is not None and latex_html(latex.text) is not None:
            return self._block(event, "formulas", text=latex.text)
        read = next((forms[mime] for mime in READ if mime in forms and forms[mime].text is not None), None)
        if is_readable(plain) or read is not None:
            block = self._text_block(event, plain if is_readable(plain) else _readable(read))
            block.is_widget = WIDGET in forms
            return block
        return self._file(event, display, plain)

    def _text_block(self, event: OutputEvent, text: str) -> OutputBlock:
        return self._block(event, "text", stream="result" if event.kind == "result" else "display", text=text)

    def _picture(self, event: OutputEvent, mime: str, forms: dict[str, Display], plain: str) -> OutputBlock:
        self._figures += 1
        page = forms.get(PAGE)
        has_script = page is not None and self._content(page).has_script
        name = f"figure {self._figures} of cell {self.count}"
        file = f"cell-{self.count}-figure-{self._figures}"
        saves = [
            (form_of(one).ending[1:].upper(), self._address(event, form_of(one).ending), file + form_of(one).ending)
            for one in DRAWN
            if one in forms
        ]
        if page is not None and page.uri:
            saves.append(("interactive page", self._stored(page), f"{file}.html"))
        return self._block(
            event,
            "picture",
            src=self._address(event, form_of(mime).ending),
            alt=as_plain(plain)[:_MAX_ALT_CHARS] if is_readable(plain) else name,
            frame_src=self._address(event, ".html") if has_script else "",
            has_script=has_script,
            saves=saves,
        )

    def _frame(self, event: OutputEvent, form: Display, plain: str) -> OutputBlock:
        content = self._content(form) if form.mime == PAGE else PageContent(has_script=False)
        if content.table is not None:
            return self._block(event, "table", table=content.table)
        return self._block(
            event,
            "frame",
            src=self._address(event, ".html"),
            alt=f"output {event.sequence} of cell {self.count}",
            has_script=content.has_script,
            height=frame_height(form.text) if form.text else MAX_PIXELS,
            text=plain if is_readable(plain) else "",
            size=form.size,
        )

    def _file(self, event: OutputEvent, display: Display, plain: str) -> OutputBlock:
        source = self._stored(display) if display.uri else ""
        return self._block(event, "file", src=source, text=plain or display.mime, alt=display.mime, size=display.size)

    def _content(self, form: Display) -> PageContent:
        if form.text is not None:
            return page_content(form.text)
        return self.read_page(self.execution_id, (form.uri or "").rpartition("/")[2])

    def _stored(self, form: Display) -> str:
        return f"/api/v1/executions/{self.execution_id}/displays/{(form.uri or '').rpartition('/')[2]}"

    def _address(self, event: OutputEvent, suffix: str) -> str:
        return f"/frames/{self.execution_id}/{event.sequence}{suffix}"


def update_earlier(outputs: Iterable[RenderedOutput]) -> None:
    """Show displays of cells as later ones among these have updated them."""
    latest: dict[str, OutputBlock] = {}
    for output in reversed([*outputs]):
        for place, block in enumerate(output.blocks):
            if block.display in latest:
                output.blocks[place] = replace(latest[block.display], id=block.id)
        latest = {**output.updates, **latest}


def fold(blocks: list[OutputBlock], *, total: int = 0, whole: str = "") -> None:
    """Fold the output of a cell that has ended, so that of each long text its beginning is shown, and one button.

    Of an output that was cut there is the beginning, the button and the end; `total` are its lines, `whole` where all
    of it is.
    """
    cut = next((place for place, block in enumerate(blocks) if block.kind == "left-out"), None)
    if cut is not None:
        blocks[cut].lines, blocks[cut].whole = total, whole
        _fold_cut(blocks, cut)
        return
    for _, row in groupby(blocks, key=lambda block: (block.kind, block.stream)):
        first, *rest = row
        text = "".join(block.text for block in (first, *rest))
        if first.kind == "text" and is_tall(text):
            first.fold, first.lines = "beginning", text.rstrip("\n").count("\n") + 1
            for block in rest:
                block.fold = "hidden"


def _fold_cut(blocks: list[OutputBlock], cut: int) -> None:
    before = [*takewhile(lambda block: block.kind == "text", reversed(blocks[:cut]))][::-1]
    after = [*takewhile(lambda block: block.kind == "text", blocks[cut + 1 :])]
    for block in (*before[1:], *after[:-1]):
        block.fold = "hidden"
    if before:
        before[0].fold = "beginning"
    if after:
        after[-1].fold = "end"


def formulas_of(events: Iterable[OutputEvent]) -> list[str]:
    """Return the LaTeX among the events, which takes time to set."""
    forms = [form for event in events if (display := event.display) for form in (display, *display.also)]
    return [form.text for form in forms if form.mime == LATEX and form.text]


def stored_pages(events: Iterable[OutputEvent]) -> list[str]:
    """Return the names of the stored displays among the events that are pages, to be looked into for scripts."""
    names: list[str] = []
    for event in events:
        if (display := event.display) is not None:
            names += [
                form.uri.rpartition("/")[2] for form in (display, *display.also) if form.mime == PAGE and form.uri
            ]
    return names


def _readable(form: Display | None) -> str:
    text = (form.text or "") if form is not None else ""
    if form is None or form.mime != "application/json":
        return text
    try:
        check_values(text)
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


# Code

_MAX_REMEMBERED: Final = 2_000
# Pygments takes a second for 50,000 characters. Longer cells, and what comes after so many of one page, stay plain.
_LONGEST_HIGHLIGHTED: Final = 10_000
_HIGHLIGHTED_AT_ONCE: Final = 100_000
_highlighted: dict[bytes, Any] = {}


async def highlight(codes: Iterable[str]) -> None:
    """Highlight code for `code_markup`, in a thread, because everybody's cells would wait for it otherwise."""
    wanted: dict[bytes, str] = {}
    left = _HIGHLIGHTED_AT_ONCE
    for code in codes:
        if len(code) <= min(left, _LONGEST_HIGHLIGHTED) and (key := _code_key(code)) not in _highlighted:
            wanted[key] = code
            left -= len(code)
    if not wanted:
        return
    made = await asyncio.to_thread(lambda: {key: markup(highlighted(code)) for key, code in wanted.items()})
    _highlighted.update(made)
    while len(_highlighted) > _MAX_REMEMBERED:
        del _highlighted[next(iter(_highlighted))]


def code_markup(code: str) -> Any:
    """Return Python as HTML, highlighted where `highlight` has done it; the same cells are shown again and again."""
    found = _highlighted.get(_code_key(code))
    return found if found is not None else markup(escape(printable(code.replace("\r\n", "\n"))))


def _code_key(code: str) -> bytes:
    return hashlib.sha256(code.encode(errors="replace")).digest()
