"""Cells, questions and tool calls as the console's templates show them: what a template would have to compute."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from belljar.console.cells import OutputBlock, is_tall
from belljar.console.forms import FormField, form_fields
from belljar.console.templating import duration_text, markup, visible
from belljar.engine.contract import Access
from belljar.engine.models import UNFINISHED, CallEntry, ExecutionEntry
from belljar.outputs.html import highlighted
from belljar.questions.models import InboxQuestion

_WATERFALL_PIXELS: Final = 200
_LOST_SHOWN: Final = 20
_MAX_LINE_CHARS: Final = 120
_STATUS_TEXTS: Final = {
    "ok": "ok",
    "error": "error",
    "timeout": "timed out",
    "interrupted": "interrupted",
    "out_of_memory": "out of memory",
    "died": "died",
    "running": "running",
    "queued": "waiting",
    "rejected": "refused",
}


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell as templates show it."""

    entry: ExecutionEntry
    blocks: list[OutputBlock]
    code: Any
    is_rewindable: bool = False
    sequence: int = 0

    @property
    def label(self) -> str:
        """Return its number as notebooks write it."""
        return f"[{self.entry.execution_count or ('*' if self.is_running else ' ')}]"

    @property
    def status_text(self) -> str:
        """Return its status in words."""
        return _STATUS_TEXTS.get(self.entry.status, self.entry.status)

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self.entry.status in UNFINISHED

    @property
    def took(self) -> str:
        """Return how long it ran."""
        return duration_text(self.entry.usage.wall_s) if not self.is_running and self.entry.usage.wall_s else ""

    @property
    def first_line(self) -> str:
        """Return the first line of its code that is not empty."""
        lines = (line.strip() for line in self.entry.code.splitlines())
        return next((line for line in lines if line), "")[:_MAX_LINE_CHARS]

    @property
    def is_tall(self) -> bool:
        """Return whether its code may have more lines than are shown at once."""
        return is_tall(self.entry.code)

    @property
    def code_lines(self) -> int:
        """Return how many lines its code has."""
        return self.entry.code.count("\n") + 1

    @property
    def lost_more(self) -> int:
        """Return how many lost names are not listed."""
        return max(0, len(self.entry.lost) - _LOST_SHOWN)


@dataclass(frozen=True, slots=True)
class ExcerptLine:
    """A line of code that somebody is asked about; `left_out` lines before it are not shown. No text at the end."""

    number: int
    text: Any
    is_marked: bool = False
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class QuestionView:
    """One question as templates show it."""

    entry: InboxQuestion
    fields: list[FormField]
    may_answer: bool

    @property
    def asker(self) -> str:
        """Return who asks, as the server knows it."""
        about = self.entry.about
        match about.asked_by if about is not None else "":
            case "policy":
                return "The policy asks"
            case "plugin":
                return "A plugin of the server asks"
            case "server" if about is not None:
                return f"The MCP server {about.server} asks"
            case "workflow":
                return self.entry.message.partition(": ")[0].replace("workflow", "Workflow", 1) + " asks"
            case "code":
                return "Code of a cell asks"
            case _:  # asked by an earlier belljar
                return "A question"

    @property
    def asks_yes_or_no(self) -> bool:
        """Return whether the answer is a single yes or no."""
        return len(self.fields) == 1 and self.fields[0].kind == "checkbox"

    @property
    def outcome(self) -> str:
        """Return what was decided, in words."""
        if self.entry.state != "answered":
            return self.entry.state
        if not self.entry.fields:
            return "allowed with changes" if self.entry.edited else "allowed"
        return f"answered: {self.entry.chosen}" if self.entry.chosen else "answered"

    @property
    def has_parts(self) -> bool:
        """Return whether it is shown by its parts; otherwise its message is."""
        about = self.entry.about
        return about is not None and bool(about.tool or about.code or about.findings)

    @property
    def has_places(self) -> bool:
        """Return whether a finding is in a line of code."""
        return self.entry.about is not None and any(one.line is not None for one in self.entry.about.findings)

    @property
    def excerpt(self) -> list[ExcerptLine]:
        """Return the code with the gaps in it."""
        about, lines, last = self.entry.about, list[ExcerptLine](), 0
        if about is None:
            return []
        for line, text in zip(about.code, _coloured([line.text for line in about.code]), strict=True):
            lines.append(ExcerptLine(line.number, text, line.is_marked, max(0, line.number - last - 1)))
            last = line.number
        return [*lines, ExcerptLine(last, None, left_out=about.code_lines - last)] if about.code_lines > last else lines

    @classmethod
    def of(cls, entry: InboxQuestion, access: Access) -> "QuestionView":
        """Return a question with its form, for somebody who looks at it."""
        may_answer = access.is_operator or not entry.in_console
        return cls(entry, form_fields(entry.fields, is_password=entry.is_password), may_answer)


def _coloured(lines: list[str]) -> list[Any]:
    """Return lines of Python as HTML in the colours that cells have."""
    texts = [visible(line) for line in lines]
    made = highlighted("\n".join(texts)).split("\n")
    return [markup(line) for line in made] if len(made) == len(lines) else list(texts)


def waterfall(calls: list[CallEntry]) -> list[dict[str, Any]]:
    """Return tool calls with where each begins and how long it is in a picture of all of them."""
    if not calls:
        return []
    starts = [datetime.fromisoformat(call.started_at).timestamp() for call in calls]
    begin = min(starts)
    length = max(start + call.duration_s for start, call in zip(starts, calls, strict=True)) - begin or 1.0
    scale = _WATERFALL_PIXELS / length
    return [
        {
            **call.model_dump(),
            "x": f"{(start - begin) * scale:.1f}",
            "width": f"{max(2.0, call.duration_s * scale):.1f}",
        }
        for start, call in zip(starts, calls, strict=True)
    ]
