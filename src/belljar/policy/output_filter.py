"""What callers do not get to see of an execution's output. It changes text; how text arrives is not its business."""

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
    Raised,
    Stream,
)
from belljar.policy.expressions import compiled
from belljar.policy.rules import OutputRule

WITHHELD = "[belljar: output withheld by {rule}{reason}; the cell ran, show less of what it made]\n"


class OutputFilter:
    """The rules for output on their way through one execution's text."""

    def __init__(self, rules: Iterable[OutputRule]) -> None:
        self._rules = [(f"output.{number}", rule) for number, rule in enumerate(rules, 1)]
        self.withheld = ""
        """What is said instead, once something is withheld."""

    def clean(self, text: str) -> str:
        """The text as callers see it; once something is withheld, so is all that follows."""
        if self.withheld:
            return ""
        for name, rule in self._rules:
            if rule.withhold and _is_in(rule, text):
                self.withheld = WITHHELD.format(rule=name, reason=f": {rule.reason}" if rule.reason else "")
                return self.trial(self._before(text)) + self.withheld
        return self.trial(text)

    def _before(self, text: str) -> str:
        """The lines in front of what is withheld, as if each had come by itself."""
        withholding = [rule for _, rule in self._rules if rule.withhold]
        lines = text.splitlines(keepends=True)
        found = (place for place, line in enumerate(lines) if any(_is_in(rule, line) for rule in withholding))
        return "".join(lines[: next(found, 0)])

    def trial(self, text: str) -> str:
        """The text with what is to be replaced replaced."""
        for _, rule in self._rules:
            text = _replaced(rule, text)
        return text


def _is_in(rule: OutputRule, text: str) -> bool:
    return rule.text in text if rule.text else compiled(rule.pattern).search(_encodable(text)) is not None


def _replaced(rule: OutputRule, text: str) -> str:
    if rule.text:
        return text.replace(rule.text, rule.replace)
    # In a replacement backslashes would mean groups.
    return compiled(rule.pattern).sub(rule.replace.replace("\\", "\\\\"), _encodable(text))


def _encodable(text: str) -> str:
    """RE2 searches UTF-8, which has no lone surrogates."""
    return text if text.isascii() else text.encode(errors="replace").decode()


# The output of one execution under the policy's rules for output: streams line by line, all other text as it is.

# A line that does not end is given out in pieces that overlap in what is looked for.
MOST_LINE_CHARS = 65_536
OVERLAP_CHARS = 4_096
_BINARY = ("image/", "audio/", "video/", "font/", "application/pdf", "application/octet-stream", "application/zip")


class FilterScreen:
    """See `belljar.outputs.screens.OutputScreen`."""

    def __init__(self, rules: Iterable[OutputRule]) -> None:
        self._filter = OutputFilter(rules)
        self._lines: dict[Literal["stdout", "stderr"], str] = {}

    def screen(self, event: Event) -> list[Event]:
        """The event as callers may see it; the beginning of a line is held back until its end is known."""
        if not isinstance(event, Stream):
            return [*self.flush(), self._cleaned(event)]
        whole = self._lines.pop(event.name, "") + event.text
        cut = self._cut(whole)
        if cut < len(whole):
            self._lines[event.name] = whole[cut:]
        text = self._filter.clean(whole[:cut]) if cut else ""
        return [replace(event, text=text)] if text else []

    def flush(self) -> Iterator[Event]:
        """Lines that did not end."""
        held, self._lines = self._lines, {}
        for name, text in held.items():
            if cleaned := self._filter.clean(text):
                yield Stream(name, cleaned)

    def _cut(self, whole: str) -> int:
        """Where what is looked for cannot go on: behind the last line's end, which a carriage return is too."""
        cut = max(whole.rfind("\n"), whole.rfind("\r")) + 1
        if len(whole) - cut <= MOST_LINE_CHARS:
            return cut
        # Of a line without end, the place where cleaning both sides alone gives what cleaning them together does.
        for place in range(len(whole) - OVERLAP_CHARS, len(whole) - 2 * OVERLAP_CHARS, -64):
            before, after = whole[place - OVERLAP_CHARS : place], whole[place : place + OVERLAP_CHARS]
            apart = self._filter.trial(before) + self._filter.trial(after)
            if apart == self._filter.trial(before + after):
                return place
        return len(whole)

    def _cleaned(self, event: Event) -> Event:
        clean = self._filter.clean
        match event:
            case DisplayData() | ExecuteResult():
                return replace(event, data=self._bundle(event.data))
            case Raised():
                trace = clean("\n".join(event.traceback))
                return Raised(clean(event.name), clean(event.message), trace.split("\n"))
            case InputRequest():
                return replace(event, prompt=clean(event.prompt))
            case CommMessage():
                return self._cleaned_comm(event)
            case _:
                return event

    def _cleaned_comm(self, event: CommMessage) -> CommMessage:
        # Its names are the session's own, and none of them means a picture.
        data, metadata = (cast("MimeBundle", self._deep(told)) for told in (event.data, event.metadata))
        if self._filter.withheld:
            return replace(event, data={"text/plain": self._filter.withheld}, metadata={}, buffers=())
        return replace(event, data=data, metadata=metadata)

    def _bundle(self, bundle: MimeBundle) -> MimeBundle:
        cleaned = {mime: value if _is_binary(mime) else self._deep(value) for mime, value in bundle.items()}
        # Nothing of a picture can be read, so nothing of one goes out once output is withheld.
        return {"text/plain": self._filter.withheld} if self._filter.withheld else cleaned

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


def _is_binary(mime: str) -> bool:
    return mime.startswith(_BINARY) and mime != "image/svg+xml"
