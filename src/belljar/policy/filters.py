"""What callers do not get to see of an execution's output. It changes text; how text arrives is not its business."""

from collections.abc import Iterable

from belljar.policy.regexes import compiled
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
