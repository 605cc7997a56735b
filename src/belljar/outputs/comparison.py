"""Comparison of what a cell showed in two runs: what counts as the same, and the lines in which they differ.

Compares text. Of pictures and interactive output it only compares that there was one, because their bytes change with
every release of the library that drew them. Knows only the outputs of notebooks, which may come from anybody.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

from belljar.outputs.mime_bundles import PAGE, PLAIN, is_readable
from belljar.outputs.terminal_text import as_plain

Bundle = Mapping[str, Any]
# Text that changes from run to run without meaning anything, listed for users in docs/guides/notebooks.md.
# Repetitions are bounded, because a cell may print a number with a million digits.
VOLATILE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"^\[(?:printed: )?belljar: .*\]$\n?", ""),
        (r"\b0x[0-9a-fA-F]{6,16}\b", "0x…"),
        (r"\b(In|Out) ?\[\d{1,9}\]", r"\1[…]"),
        (r"<ipython-input-\d{1,9}-[0-9a-f]{1,64}>|/tmp/ipykernel_\d{1,9}/\d{1,12}\.py", "<cell>"),
        (r"^(CPU times:|Wall time:).*$", r"\1 …"),
        (r"^[^±\n]{1,40} ± [^±\n]{1,40} per loop \(mean ± std\. dev\. of [^)\n]{1,80}\)", "… per loop"),
        (r"(?<!\d)\d{1,4}(?::\d\d){1,2}<(?:\d{1,4}(?::\d\d){1,2}|\?), {0,9}(?:[\d.]{1,12}|\?) ?\w{1,20}/\w{1,20}", "…"),
        (r"(?<![\w.])\d{1,9}\.\d{1,12}(?:e-?\d{1,3})? ?(?:ns|[uµμ]s|ms|s|secs?|seconds?|min|minutes?)\b", "… s"),
        (r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", "…-uuid"),
        (r"/tmp/tmp[a-z0-9_]{8}\b", "/tmp/tmp…"),  # noqa: S108 - how they are called, not where we write
        (r"(?:/[\w.+@-]{1,255}){1,20}/site-packages/", "…/site-packages/"),
    )
)
_RICH_TEXTS = ("text/markdown", "text/latex", "application/json", PAGE)
_INTERACTIVE = "application/vnd."
# Finding differences takes quadratic time, and nobody reads more of them than this.
_DIFF_LINES, _DIFF_INPUT, _LINE_CHARS = 16, 400, 160


@dataclass(frozen=True, slots=True)
class CellOutput:
    """What a cell showed, without the order between the two streams, because the operating system decides that."""

    stdout: str
    stderr: str
    shown: tuple[Bundle, ...]
    error: str
    """The error's name and message; empty when the cell raised nothing. Tracebacks have paths and versions in them."""


class Comparison:
    """A comparison that ignores what `VOLATILE` lists and what the `ignored` patterns match."""

    def __init__(self, ignored: Sequence[re.Pattern[str]] = ()) -> None:
        self._ignored = ignored

    def said(self, outputs: Sequence[Mapping[str, Any]]) -> CellOutput:
        """Return what one cell's outputs in a notebook say."""
        streams = {"stdout": "", "stderr": ""}
        for name in streams:
            texts = [
                text_in(out.get("text")) for out in outputs if out.get("name", "stdout") == name and _is(out, "stream")
            ]
            streams[name] = self._normalised("".join(texts))
        shown = tuple(_bundle(out) for out in outputs if _is(out, "display_data") or _is(out, "execute_result"))
        return CellOutput(streams["stdout"], streams["stderr"], shown, self._normalised(error_in(outputs)))

    def differences(self, then: CellOutput, now: CellOutput) -> list[str]:
        """Return the lines in which two runs differ, shortened; empty when they are the same."""
        lines: list[str] = []
        shown_then, shown_now = self._displays(then.shown, now.shown)
        parts = (
            ("stdout", then.stdout, now.stdout),
            ("stderr", then.stderr, now.stderr),
            ("shown", shown_then, shown_now),
            ("error", then.error, now.error),
        )
        for name, before, after in parts:
            if before != after:
                lines += [f"{name}:", *_diff(before.split("\n") if before else [], after.split("\n") if after else [])]
        return lines

    def _normalised(self, text: str) -> str:
        text = as_plain(text)
        for pattern, replacement in VOLATILE:
            text = pattern.sub(replacement, text)
        for pattern in self._ignored:
            text = pattern.sub("", text)
        return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")

    def _displays(self, then: Sequence[Bundle], now: Sequence[Bundle]) -> tuple[str, str]:
        before: list[str] = []
        after: list[str] = []
        for one, other in zip_longest(then, now):
            both = [bundle for bundle in (one, other) if bundle is not None]
            mime = _common(both)
            is_interactive = any(mime.startswith(_INTERACTIVE) for bundle in both for mime in bundle)
            before += [] if one is None else [self._shown(one, mime, is_interactive=is_interactive)]
            after += [] if other is None else [self._shown(other, mime, is_interactive=is_interactive)]
        return "\n".join(before), "\n".join(after)

    def _shown(self, bundle: Bundle, mime: str | None, *, is_interactive: bool) -> str:
        text = self._normalised(text_in(bundle[mime])) if mime is not None else ""
        # Front ends draw the same figure in different ways: interactive in one run, it may be a picture in the other.
        mark = "" if is_interactive else _picture_mark(bundle)
        return f"{mark}{text}" or ("[interactive]" if is_interactive else f"[{', '.join(sorted(bundle))}]")


def error_in(outputs: Sequence[Mapping[str, Any]]) -> str:
    """Return the error that ended a cell, as text; empty when none did."""
    errors = [f"{out.get('ename', '')}: {out.get('evalue', '')}" for out in outputs if _is(out, "error")]
    return errors[-1] if errors else ""


def text_in(value: Any) -> str:
    """Return a notebook's text, which it has whole or as a list of lines; other values as JSON."""
    if isinstance(value, str):
        return value
    lines = cast("list[Any]", value) if isinstance(value, list) else None
    if lines is not None and all(isinstance(line, str) for line in lines):
        return "".join(lines)
    return "" if value is None else json.dumps(value, indent=1, sort_keys=True)


def _is(output: Mapping[str, Any], kind: str) -> bool:
    return output.get("output_type") == kind


def _bundle(output: Mapping[str, Any]) -> Bundle:
    data = output.get("data")
    return cast("Bundle", data) if isinstance(data, dict) else {}


def _picture_mark(bundle: Bundle) -> str:
    return "[picture]" if any(mime.startswith("image/") for mime in bundle) else ""


def _common(bundles: Sequence[Bundle]) -> str | None:
    """Return the form to compare: the plain one unless it says nothing, else one that all have."""
    if all(is_readable(text_in(bundle.get(PLAIN))) for bundle in bundles):
        return PLAIN
    if any(mime.startswith((_INTERACTIVE, "image/")) for bundle in bundles for mime in bundle):
        return None
    rich = (mime for mime in _RICH_TEXTS if all(mime in bundle for bundle in bundles))
    return next(rich, PLAIN if all(PLAIN in bundle for bundle in bundles) else None)


def _diff(before: list[str], after: list[str]) -> list[str]:
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    at = _first_difference(old[0], new[0]) if old and new else 0
    lines = _changed_lines(old[:_DIFF_INPUT], new[:_DIFF_INPUT])
    shown_lines = [f"{line[0]} {_window(line[1:], at)}" for line in lines[:_DIFF_LINES]]
    more = len(lines) - len(shown_lines) + max(len(old) - _DIFF_INPUT, 0) + max(len(new) - _DIFF_INPUT, 0)
    return [*shown_lines, f"… {more:,} more lines"] if more else shown_lines


def _changed_lines(old: list[str], new: list[str]) -> list[str]:
    lines: list[str] = []
    for tag, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            lines += [f"-{line}" for line in old[start:end]] + [f"+{line}" for line in new[new_start:new_end]]
    return lines


def _first_difference(one: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)


def _window(line: str, at: int) -> str:
    if len(line) <= _LINE_CHARS:
        return line
    start = max(0, min(at - _LINE_CHARS // 4, len(line) - _LINE_CHARS))
    end = start + _LINE_CHARS
    return f"{'…' if start else ''}{line[start:end]}{'…' if end < len(line) else ''}"
