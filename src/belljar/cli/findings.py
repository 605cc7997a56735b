"""The findings of `belljar doctor`, and how they are printed. Knows no check."""

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

_WIDEST_NAME = 28


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One row of the report."""

    section: str
    status: Literal["ok", "warn", "fail"]
    name: str
    detail: str
    """What this host gives."""
    hint: str = ""
    """The command that gets the rest, or what else to do."""
    cost: str = ""
    """What it costs not to have it."""


def print_findings(findings: Sequence[HostFinding], *, as_json: bool) -> int:
    """Print the findings, and on stderr what they come to; return the exit status."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else report(findings, width))
    failed = sum(finding.status == "fail" for finding in findings)
    if failed:
        print(f"{failed} of {len(findings)} checks failed that these settings need", file=sys.stderr)
        return 1
    print("everything that these settings need is there", file=sys.stderr)
    return 0


def report(findings: Sequence[HostFinding], columns: int = 0) -> str:
    """Return the findings as a table: what this host gives, and below it what the lack of it costs and what gets it.

    Lines are wrapped between words to so many columns; with 0 they are as long as they are.
    """
    width = max((len(finding.name) for finding in findings), default=0)
    width = min(width, _WIDEST_NAME)
    indent = " " * (width + 10)
    lines = [f"{indent}what this host gives"]
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines += _wrapped(f"  {finding.status:<4}  {finding.name:<{width}}  ", finding.detail, indent, columns)
        if finding.cost:
            lines += _wrapped(f"{indent}without it: ", finding.cost, indent, columns)
        if finding.hint:
            lines += _wrapped(f"{indent}to get it: ", finding.hint, indent, columns)
    return "\n".join(lines)


def _wrapped(head: str, text: str, indent: str, columns: int) -> list[str]:
    """Return a text after its head, with every further line indented."""
    first, *others = text.split("\n")
    if not columns:
        return [f"{head}{first}", *(f"{indent}  {line}" for line in others)]
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )
    # Letters stand in for the head, whose spaces would be taken for places where a line may end.
    lines = wrapper.wrap(f"{'x' * len(head)}{first}")
    wrapper.initial_indent = wrapper.subsequent_indent
    return [f"{head}{lines[0][len(head) :]}", *lines[1:], *(line for each in others for line in wrapper.wrap(each))]
