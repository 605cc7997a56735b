"""Applies the policy's rules for output: replaces or withholds text of an execution before callers see it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, cast

from pydantic import JsonValue

from belljar.outputs.events import (
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    InputRequest,
    MimeBundle,
    Notice,
    Raised,
    Stream,
    with_clean_text,
)
from belljar.policy.expressions import compiled
from belljar.policy.rules import OutputRule

WITHHELD = "output withheld by {rule}{reason}; the cell ran, show less of what it made"


class OutputFilter:
    """Applies the rules for output to the text of one execution. It does not know how the text arrives."""

    def __init__(self, rules: Iterable[OutputRule]) -> None:
        self._rules = [(f"output.{number}", rule) for number, rule in enumerate(rules, 1)]
        self.withheld = ""
        """Why, once something is withheld; the notice that stands in its place."""

    def clean(self, text: str) -> str:
        """Return the text as callers see it; once something is withheld, everything after it is withheld too."""
        if self.withheld:
            return ""
        for name, rule in self._rules:
            if rule.withhold and _is_in(rule, text):
                self.withheld = WITHHELD.format(rule=name, reason=f": {rule.reason}" if rule.reason else "")
                return self.trial(self._before(text))
        return self.trial(text)

    def _before(self, text: str) -> str:
        """Return the lines before the first one that is withheld, as if each had come by itself."""
        withholding = [rule for _, rule in self._rules if rule.withhold]
        lines = text.splitlines(keepends=True)
        found = (place for place, line in enumerate(lines) if any(_is_in(rule, line) for rule in withholding))
        return "".join(lines[: next(found, 0)])

    def trial(self, text: str) -> str:
        """Return the text after replacements, without withholding anything."""
        for _, rule in self._rules:
            text = _replaced(rule, text)
        return text


def _is_in(rule: OutputRule, text: str) -> bool:
    return rule.text in text if rule.text else compiled(rule.pattern).search(_encodable(text)) is not None


def _replaced(rule: OutputRule, text: str) -> str:
    if rule.text:
        return text.replace(rule.text, rule.replace)
    # In a replacement, backslashes would refer to groups.
    return compiled(rule.pattern).sub(rule.replace.replace("\\", "\\\\"), _encodable(text))


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, because RE2 searches UTF-8, which has none."""
    return text if text.isascii() else text.encode(errors="replace").decode()


# The screen: passes streams through the filter line by line, and all other text as it is.

# An endless line is passed on in pieces, cut where nothing that the rules look for crosses the cut.
MAX_LINE_CHARS = 65_536
OVERLAP_CHARS = 4_096


class FilterScreen:
    """Filters one execution's events by the policy's rules. See `belljar.outputs.recorder.OutputScreen`."""

    def __init__(self, rules: Iterable[OutputRule]) -> None:
        self._filter = OutputFilter(rules)
        self._lines: dict[Literal["stdout", "stderr"], str] = {}
        self._has_noted = False

    def screen(self, event: Event) -> list[Event]:
        """Return the event as callers may see it; an unfinished line is held back until its end arrives."""
        if not isinstance(event, Stream):
            held = [*self.flush()]
            cleaned = self._cleaned(event)
            return [*held, *self._withheld_notice(), *([cleaned] if cleaned is not None else [])]
        whole = self._lines.pop(event.name, "") + event.text
        cut = self._cut(whole)
        if cut < len(whole):
            self._lines[event.name] = whole[cut:]
        text = self._filter.clean(whole[:cut]) if cut else ""
        return [*([replace(event, text=text)] if text else []), *self._withheld_notice()]

    def _withheld_notice(self) -> list[Event]:
        """Return the notice that output is withheld, once."""
        if self._has_noted or not self._filter.withheld:
            return []
        self._has_noted = True
        return [Notice(self._filter.withheld)]

    def flush(self) -> Iterator[Event]:
        """Yield the lines that were held back because they had not ended."""
        held, self._lines = self._lines, {}
        for name, text in held.items():
            if cleaned := self._filter.clean(text):
                yield Stream(name, cleaned)
        yield from self._withheld_notice()

    def _cut(self, whole: str) -> int:
        """Return a place that no match crosses: after the last line end; a carriage return counts as one."""
        cut = max(whole.rfind("\n"), whole.rfind("\r")) + 1
        if len(whole) - cut <= MAX_LINE_CHARS:
            return cut
        # Cut an endless line where cleaning both sides separately gives the same as cleaning them together.
        for place in range(len(whole) - OVERLAP_CHARS, len(whole) - 2 * OVERLAP_CHARS, -64):
            before, after = whole[place - OVERLAP_CHARS : place], whole[place : place + OVERLAP_CHARS]
            apart = self._filter.trial(before) + self._filter.trial(after)
            if apart == self._filter.trial(before + after):
                return place
        return len(whole)

    def _cleaned(self, event: Event) -> Event | None:
        """Return what is left of an event that is no stream; None for a display or a result that is withheld."""
        clean = self._filter.clean
        match event:
            case DisplayData() | ExecuteResult():
                data = with_clean_text(event.data, self._deep)
                # The rules cannot search pictures, so no picture is passed on once output is withheld.
                return None if self._filter.withheld else replace(event, data=data)
            case Raised():
                raised = Raised(clean(event.name), clean(event.message), clean("\n".join(event.traceback)).split("\n"))
                # That the cell failed is no output. The notice before it says why its error cannot be read.
                return Raised("Error", "withheld", []) if self._filter.withheld else raised
            case InputRequest():
                form = cast("MimeBundle", self._deep(event.form)) if event.form else None
                prompt = clean(event.prompt)
                return replace(event, prompt="(withheld) " if self._filter.withheld else prompt, form=form)
            case CommMessage():
                return self._cleaned_comm(event)
            case _:
                return event

    def _cleaned_comm(self, event: CommMessage) -> CommMessage:
        # The keys are chosen by the session, so none of them marks a picture that could be left as it is.
        data, metadata = (cast("MimeBundle", self._deep(values)) for values in (event.data, event.metadata))
        if self._filter.withheld:
            return replace(event, data={"text/plain": self._filter.withheld}, metadata={}, buffers=())
        return replace(event, data=data, metadata=metadata)

    def _deep(self, value: JsonValue) -> JsonValue:
        match value:
            case str():
                return self._filter.clean(value)
            case list():
                return [self._deep(item) for item in value]
            case dict():
                return {self._filter.clean(name): self._deep(item) for name, item in value.items()}
            case _:
                return cast("JsonValue", value)
